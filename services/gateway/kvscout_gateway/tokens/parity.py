"""Parity of our tokens with the engine's: where they differ, nothing that is cached is found, and no error shows it."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.rpc.service_info import TenantWarning, Warned

log = logging.getLogger("kvscout.gateway")

EVERY: Final = 256
"""Requests of which one is compared token by token; of each that reports its usage, the number of tokens is."""
MAX_MODELS: Final = 256
"""Models of which mismatches are remembered."""


class Parity(StrEnum):
    """Result of a comparison."""

    MATCH = "match"
    MISMATCH = "mismatch"
    LENGTH_MATCH = "length_match"
    LENGTH_MISMATCH = "length_mismatch"


class ParityCheck:
    """Counts comparisons; remembers which models' tokens differ."""

    def __init__(self, registry: CollectorRegistry, *, every: int = EVERY) -> None:
        self._counter = Counter(
            "kvscout_token_parity",
            "Prompts whose tokens were compared with the engine's",
            ["outcome"],
            registry=registry,
        )
        self._every = every
        self._seen = 0
        self.differing: dict[tuple[str, str], str] = {}
        """Difference in the last comparison, by tenant and model."""
        self._warnings = RateLimitedLog(log, period_seconds=60.0)

    def due(self) -> bool:
        """Tell whether this request is compared token by token: the first is, then one in `every`."""
        self._seen += 1
        return self._seen % self._every == 1 or self._every == 1

    def lengths(self, tenant: str, model: str, ours: int, theirs: int) -> None:
        """Compare the number of a prompt's tokens with the engine's usage."""
        if ours == theirs:
            self._counter.labels(Parity.LENGTH_MATCH).inc()
        else:
            self._counter.labels(Parity.LENGTH_MISMATCH).inc()
            self._differs(tenant, model, f"{ours} tokens here, {theirs} in the engine")

    def tokens(self, tenant: str, model: str, ours: bytes, theirs: bytes) -> None:
        """Compare a prompt's tokens, u32 each."""
        if ours == theirs:
            self._counter.labels(Parity.MATCH).inc()
            self.differing.pop((tenant, model), None)
            return
        self._counter.labels(Parity.MISMATCH).inc()
        same = _common_tokens(ours, theirs)
        self._differs(tenant, model, f"from token {same} of {len(ours) // 4} here, {len(theirs) // 4} in the engine")

    def warnings(self) -> list[Warned]:
        """Return what an operator should know: whose tokens differed when they were last compared one by one."""
        return [
            TenantWarning(
                tenant,
                f"tokens of model {model!r} are not those of its engine ({how}): its cache is not found;"
                " see --tokenizer",
            )
            for (tenant, model), how in self.differing.items()
        ]

    def _differs(self, tenant: str, model: str, how: str) -> None:
        if len(self.differing) < MAX_MODELS or (tenant, model) in self.differing:
            self.differing[tenant, model] = how
        self._warnings.warning((tenant, model), "tokens of model %s are not those of its engine: %s", model, how)


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
