"""Busy thresholds of models; read and changed at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvscout_common.errors import InvalidArgument, ResourceExhausted

NO_LIMIT = 2**63 - 1

_DIGITS = 6
"""Fractions are compared to a millionth of a block: 0.29 · 100 is 29 blocks, not 28.999999999999996."""


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """A worker is busy when it is over any threshold that is set."""

    active_decode_blocks_threshold: float | None = None
    """Fraction of total_kv_blocks, 0 < f <= 1; None = off."""
    active_prefill_tokens_threshold: int | None = None
    """Tokens, >= 0; None = off."""

    def validate(self) -> BusyThresholds:
        """Return itself, if it is in range.

        Raises:
            InvalidArgument: Naming the threshold.
        """
        fraction, tokens = self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold
        if fraction is not None and not (math.isfinite(fraction) and 0 < fraction <= 1):
            raise InvalidArgument(f"must be above 0 and at most 1, not {fraction}", field=DECODE_BLOCKS)
        if tokens is not None and tokens < 0:
            raise InvalidArgument(f"must not be negative, is {tokens}", field=PREFILL_TOKENS)
        return self

    @property
    def off(self) -> bool:
        """Return whether no worker can be busy."""
        return self.active_decode_blocks_threshold is None and self.active_prefill_tokens_threshold is None

    def limits(self, total_kv_blocks: int, kv_cache_usage: float | None) -> tuple[int, int]:
        """Return active prefill tokens and active blocks above which a worker is busy.

        Args:
            total_kv_blocks: Blocks of its device cache; 0 = unknown, booked blocks cannot be judged.
            kv_cache_usage: Fraction in use by the engine's own account; None = not reported.

        Returns:
            `NO_LIMIT` where it is off. A worker whose engine reports too much is busy whatever is booked: -1.
        """
        fraction, tokens = self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold
        prefill_tokens = NO_LIMIT if tokens is None else tokens
        if fraction is None:
            return prefill_tokens, NO_LIMIT
        size = total_kv_blocks or 1
        allowed = round(fraction * size, _DIGITS)
        if kv_cache_usage is not None and round(kv_cache_usage * size, _DIGITS) > allowed:
            return prefill_tokens, -1
        return prefill_tokens, math.floor(allowed) if total_kv_blocks else NO_LIMIT


MAX_MODELS = 10_000
"""Models with thresholds of their own; anyone may name models that do not exist yet."""

NO_THRESHOLDS = BusyThresholds()

DECODE_BLOCKS = "active_decode_blocks_threshold"
PREFILL_TOKENS = "active_prefill_tokens_threshold"


class ThresholdTable:
    """Thresholds by (tenant, model); models without their own have the defaults."""

    def __init__(self, defaults: BusyThresholds) -> None:
        self._defaults = defaults.validate()
        self._own: dict[tuple[str, str], BusyThresholds] = {}
        self.on_change: Callable[[str, str, BusyThresholds], None] | None = None
        """Receives tenant, model and the thresholds in effect after each `change`."""

    def get(self, tenant: str, model: str) -> BusyThresholds:
        """Return thresholds in effect for a model, known or not."""
        return self._own.get((tenant, model), self._defaults) if self._own else self._defaults

    def change(self, tenant: str, model: str, /, **changes: float | int | None) -> BusyThresholds:
        """Change the named thresholds of a model, None clears; the others stay as they are in effect.

        Returns:
            What is in effect now.

        Raises:
            InvalidArgument: The model is empty, a threshold is unknown or out of range; the field is named.
            ResourceExhausted: Too many models have thresholds of their own.
        """
        if not model:
            raise InvalidArgument("must not be empty", field="model")
        for name in changes:
            if name not in (DECODE_BLOCKS, PREFILL_TOKENS):
                raise InvalidArgument(f"there is {DECODE_BLOCKS} and {PREFILL_TOKENS}", field=name)
        changed = replace(self.get(tenant, model), **changes).validate()  # type: ignore[arg-type]  # names are checked
        self.put(tenant, model, changed)
        if self.on_change is not None:
            self.on_change(tenant, model, changed)
        return changed

    def put(self, tenant: str, model: str, thresholds: BusyThresholds) -> None:
        """Replace the thresholds of a model.

        Raises:
            ResourceExhausted: Too many models have thresholds of their own.
        """
        if (tenant, model) not in self._own and len(self._own) >= MAX_MODELS:
            raise ResourceExhausted(f"{MAX_MODELS} models have thresholds of their own")
        self._own[tenant, model] = thresholds

    def of_tenant(self, tenant: str, models: Iterable[str]) -> dict[str, BusyThresholds]:
        """Return thresholds of every model of a tenant that has any, by model.

        Args:
            tenant: Whose.
            models: Beside those that have thresholds of their own.
        """
        named = sorted({*models, *(model for owner, model in self._own if owner == tenant)})
        found = {model: self.get(tenant, model) for model in named}
        return {model: thresholds for model, thresholds in found.items() if not thresholds.off}
