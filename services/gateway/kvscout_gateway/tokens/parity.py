"""Parity of our tokens with the engine's: where they differ, nothing that is cached is found, and no error shows it.

Each class of prompts (model, dialect, with or without tools) is compared for each source of tokens. A source whose
tokens differ is asked after all others for a while: then the class is tried again.

As many tokens are not the same tokens. An engine that finds more of a prompt in its cache than its events confirm makes
a class suspect: the next of its prompts is compared token by token.
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

    __slots__ = ("certain", "difference", "mismatches", "suspect", "unconfirmed", "until")

    def __init__(self) -> None:
        self.difference = ""
        """In the last comparison; "" = none."""
        self.mismatches = 0
        """In a row."""
        self.until = 0.0
        """When it is tried again."""
        self.certain = False
        """Tokens were compared one by one, and differed: no equal number of them says otherwise."""
        self.unconfirmed = 0
        """Prompts in a row of which the engine had cached more than its events confirmed."""
        self.suspect = False
        """The next prompt is compared token by token."""


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

    def due(self, of: TokenClass) -> bool:
        """Tell whether a request is compared token by token: the first is, then one in `every`, and those of a class
        that is suspect or tried again."""
        self._seen += 1
        state = self._classes.get(of)
        if state is not None and (state.suspect or state.certain):
            state.suspect = False
            return True
        return self._seen % self._every == 1 or self._every == 1

    def differs(self, of: TokenClass) -> bool:
        """Tell whether a class gets its tokens elsewhere for now."""
        state = self._classes.get(of)
        return state is not None and state.mismatches >= MAX_MISMATCHES and self._clock() < state.until

    def lengths(self, of: TokenClass, ours: int, theirs: int) -> None:
        """Compare the number of a prompt's tokens with the engine's usage."""
        matched = ours == theirs
        self._counter.labels(Parity.LENGTH_MATCH if matched else Parity.LENGTH_MISMATCH).inc()
        state = self._state(of)
        if not matched:
            self._differs(of, state, f"{ours} tokens here, {theirs} in the engine")
        elif not state.certain:
            state.mismatches, state.difference = 0, ""

    def tokens(self, of: TokenClass, ours: bytes, theirs: bytes) -> None:
        """Compare a prompt's tokens, u32 each."""
        state = self._state(of)
        state.certain = ours != theirs
        if not state.certain:
            self._counter.labels(Parity.MATCH).inc()
            state.mismatches, state.difference = 0, ""
            return
        self._counter.labels(Parity.MISMATCH).inc()
        same = _common_tokens(ours, theirs)
        state.mismatches = MAX_MISMATCHES
        self._differs(of, state, f"from token {same} of {len(ours) // 4} here, {len(theirs) // 4} in the engine")

    def confirmed(self, of: TokenClass, by_events: bool) -> None:
        """Note whether what an engine had cached of a prompt is what its events said."""
        state = self._state(of)
        state.unconfirmed = 0 if by_events else state.unconfirmed + 1
        if state.unconfirmed >= MAX_MISMATCHES:
            state.unconfirmed, state.suspect = 0, True

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

    def _state(self, of: TokenClass) -> _State:
        state = self._classes.setdefault(of, _State())
        self._classes.move_to_end(of)
        if len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)
        return state

    def _differs(self, of: TokenClass, state: _State, how: str) -> None:
        state.mismatches += 1
        state.difference, state.until = how, self._clock() + AGAIN_SECONDS
        model = printable(of.model)
        self._warnings.warning(of, "tokens of model %s differ from those of its engine: %s, %s", model, of, how)


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
