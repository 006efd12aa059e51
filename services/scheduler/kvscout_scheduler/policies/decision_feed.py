"""Decisions as they are made, for watchers; a slow watcher loses the oldest and receives their number.

A record has no prompt, and of an error its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_common.worker import ALL_TENANTS
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import SelectionRequest
from kvscout_scheduler.values.reservation import RequestKey

MAX_WATCHERS = 100
KEPT = 1_024
"""Decisions that wait for one watcher."""
KEPT_BYTES = 4 * 1024 * 1024
"""Bytes of these decisions; above, the oldest go, all but one."""
MAX_MESSAGE_CHARACTERS = 1_024

_RECORD_BYTES = 1_024
_CANDIDATE_BYTES = 640
"""About; measured with 64-bit CPython, ids of 256 bytes are counted beside them."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One selection and what came of it."""

    key: RequestKey
    attempt_id: int
    isl_tokens: int
    timestamp: float
    """Seconds since the Unix epoch."""
    decision: Decision | None = None
    """None = it failed."""
    error: type[KvscoutError] | None = None
    """Class of its error."""
    message: str = ""

    @property
    def bytes(self) -> int:
        """Return what keeping it takes, about."""
        explanation = self.decision.explanation if self.decision is not None else None
        names = len(self.key.request_id) + len(self.message) + (len(explanation.summary) if explanation else 0)
        candidates = len(explanation.candidates) if explanation is not None else 0
        return _RECORD_BYTES + 4 * names + candidates * _CANDIDATE_BYTES

    def without_explanation(self) -> DecisionRecord:
        """Return the same without explanation."""
        if self.decision is None or self.decision.explanation is None:
            return self
        return replace(self, decision=replace(self.decision, explanation=None))


class DecisionWatcher:
    """Decisions that one watcher has not read yet.

    Args:
        tenant: Whose decisions; "*" = all.
        model: "" = all.
        explain: Whether it wants explanations.
        wake: Called when there is something to read; must not block.
    """

    def __init__(self, tenant: str, model: str, explain: bool, wake: Callable[[], None]) -> None:
        self.tenant = tenant
        self.model = model
        self.explain = explain
        self._wake = wake
        self._records: deque[DecisionRecord] = deque()
        self._bytes = 0
        self._lost = 0

    def wants(self, request: SelectionRequest) -> bool:
        """Return whether it watches a request's model."""
        return self.tenant in (ALL_TENANTS, request.tenant) and self.model in ("", request.model)

    def put(self, record: DecisionRecord) -> None:
        """Add a decision; the oldest make room."""
        self._records.append(record)
        self._bytes += record.bytes
        while len(self._records) > KEPT or (self._bytes > KEPT_BYTES and len(self._records) > 1):
            self._bytes -= self._records.popleft().bytes
            self._lost += 1
        self._wake()

    def take(self) -> tuple[int, Iterable[DecisionRecord]]:
        """Return decisions lost since the last call, and those that are there, oldest first."""
        lost, self._lost = self._lost, 0
        records = list(self._records)
        self._records.clear()
        self._bytes = 0
        return lost, records


class DecisionFeed:
    """Everyone who watches decisions."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._watchers: list[DecisionWatcher] = []
        self._wall_clock = wall_clock

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, watcher: DecisionWatcher) -> None:
        """Add a watcher.

        Raises:
            ResourceExhausted: There are too many.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise ResourceExhausted(f"{MAX_WATCHERS} watch already (limit)")
        self._watchers.append(watcher)

    def remove(self, watcher: DecisionWatcher) -> None:
        """End it."""
        self._watchers.remove(watcher)

    def explain(self, request: SelectionRequest) -> bool:
        """Return whether anyone wants this decision explained."""
        return bool(self._watchers) and any(each.explain and each.wants(request) for each in self._watchers)

    def record(self, request: SelectionRequest, outcome: Decision | KvscoutError) -> None:
        """Put a decision, or its error, to everyone who watches the request's model."""
        if not self._watchers:
            return
        interested = [watcher for watcher in self._watchers if watcher.wants(request)]
        if not interested:
            return
        record = DecisionRecord(request.key, request.attempt_id, request.isl_tokens, self._wall_clock())
        if isinstance(outcome, Decision):
            record = replace(record, decision=outcome)
        else:
            # Not the error itself: its traceback holds on to all that the call had.
            record = replace(record, error=type(outcome), message=str(outcome)[:MAX_MESSAGE_CHARACTERS])
        short = record.without_explanation()
        for watcher in interested:
            watcher.put(record if watcher.explain else short)
