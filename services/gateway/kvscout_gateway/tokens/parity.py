"""Parity of our tokens with the engine's: where they differ, nothing that is cached is found, and no error shows it.

Each class of prompts (model, dialect, with or without tools) is compared for each source of tokens. A source whose
tokens differ is asked after all others for a while: then the class is tried again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.plain_text import printable
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_gateway.values.prompt import TokenClass

log = logging.getLogger("kvscout.gateway")

EVERY: Final = 256
"""Requests of which one is compared token by token; of each that reports its usage, the number of tokens is."""
MAX_CLASSES: Final = 1_024
"""Classes that are remembered; the least recently compared goes first."""
MAX_MISMATCHES: Final = 4
"""In a row, after which a class gets its tokens elsewhere. SGLang's releases are three, and are tried in turn."""
AGAIN_SECONDS: Final = 300.0
"""After which it is tried again; one mismatch more sends it back."""


class Parity(StrEnum):
    """Result of a comparison."""

    MATCH = "match"
    MISMATCH = "mismatch"
    LENGTH_MATCH = "length_match"
    LENGTH_MISMATCH = "length_mismatch"


class _State:
    """What is known of a class."""

    __slots__ = ("difference", "mismatches", "until")

    def __init__(self) -> None:
        self.difference = ""
        """In the last comparison; "" = none."""
        self.mismatches = 0
        """In a row."""
        self.until = 0.0
        """When it is tried again."""


class ParityCheck:
    """Counts comparisons; remembers which classes' tokens differ."""

    def __init__(
        self, registry: CollectorRegistry, *, every: int = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counter = Counter(
            "kvscout_token_parity",
            "Prompts whose tokens were compared with the engine's",
            ["outcome"],
            registry=registry,
        )
        self._every = every
        self._clock = clock
        self._seen = 0
        self._classes: OrderedDict[TokenClass, _State] = OrderedDict()
        self._warnings = RateLimitedLog(log, period_seconds=60.0)

    def due(self) -> bool:
        """Tell whether this request is compared token by token: the first is, then one in `every`."""
        self._seen += 1
        return self._seen % self._every == 1 or self._every == 1

    def differs(self, of: TokenClass) -> bool:
        """Tell whether a class gets its tokens elsewhere for now."""
        state = self._classes.get(of)
        return state is not None and state.mismatches >= MAX_MISMATCHES and self._clock() < state.until

    def lengths(self, of: TokenClass, ours: int, theirs: int) -> None:
        """Compare the number of a prompt's tokens with the engine's usage."""
        matched = ours == theirs
        self._counter.labels(Parity.LENGTH_MATCH if matched else Parity.LENGTH_MISMATCH).inc()
        self._note(of, "" if matched else f"{ours} tokens here, {theirs} in the engine")

    def tokens(self, of: TokenClass, ours: bytes, theirs: bytes) -> None:
        """Compare a prompt's tokens, u32 each."""
        matched = ours == theirs
        self._counter.labels(Parity.MATCH if matched else Parity.MISMATCH).inc()
        same = 0 if matched else _common_tokens(ours, theirs)
        how = f"from token {same} of {len(ours) // 4} here, {len(theirs) // 4} in the engine"
        self._note(of, "" if matched else how)

    def differences(self) -> dict[TokenClass, str]:
        """Return how the classes differed whose tokens did when they were last compared."""
        return {of: state.difference for of, state in self._classes.items() if state.difference}

    def warnings(self) -> list[Warned]:
        """Return what an operator should know: whose tokens differed when they were last compared."""
        return [
            TenantWarning(
                of.tenant,
                f"tokens of model {of.model!r} are not those of its engine ({of}: {how}): its cache is not found;"
                " see --tokenizer and --renderer",
            )
            for of, how in self.differences().items()
        ]

    def _note(self, of: TokenClass, difference: str) -> None:
        state = self._classes.setdefault(of, _State())
        self._classes.move_to_end(of)
        if len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)
        state.difference = difference
        if not difference:
            state.mismatches = 0
            return
        state.mismatches += 1
        state.until = self._clock() + AGAIN_SECONDS
        model = printable(of.model)
        self._warnings.warning(of, "tokens of model %s are not those of its engine: %s, %s", model, of, difference)


def _common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two prompts begin with."""
    least, most = 0, min(len(one), len(other)) // 4
    while least < most:
        middle = (least + most + 1) // 2
        if one[least * 4 : middle * 4] == other[least * 4 : middle * 4]:
            least = middle
        else:
            most = middle - 1
    return least
