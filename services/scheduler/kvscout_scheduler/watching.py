"""Decisions as they are made, for whoever watches; a slow watcher loses the oldest and is told how many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_common.registry import ALL_TENANTS
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.request import SelectionRequest

MAX_WATCHERS = 100
KEPT = 1_024
"""Decisions that wait for one watcher."""


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One selection and what came of it."""

    request: SelectionRequest
    outcome: Decision | KvscoutError
    timestamp: float
    """Seconds since the Unix epoch."""


class Watcher:
    """What one watcher has not read yet.

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
        self._records: deque[DecisionRecord] = deque(maxlen=KEPT)
        self._lost = 0

    def wants(self, request: SelectionRequest) -> bool:
        """Whether it watches a request's model."""
        return self.tenant in (ALL_TENANTS, request.tenant) and self.model in ("", request.model)

    def put(self, record: DecisionRecord) -> None:
        """Adds a decision; the oldest makes room."""
        self._lost += len(self._records) == KEPT
        self._records.append(record)
        self._wake()

    def take(self) -> tuple[int, Iterable[DecisionRecord]]:
        """Decisions lost since the last call, and those that are there, oldest first."""
        lost, self._lost = self._lost, 0
        records = list(self._records)
        self._records.clear()
        return lost, records


class Watchers:
    """Everyone who watches decisions."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._watchers: list[Watcher] = []
        self._wall_clock = wall_clock

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """Begins to tell a watcher.

        Raises:
            ResourceExhausted: There are too many.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise ResourceExhausted(f"{MAX_WATCHERS} watch already (limit)")
        self._watchers.append(watcher)

    def remove(self, watcher: Watcher) -> None:
        """Ends it."""
        self._watchers.remove(watcher)

    def explain(self, request: SelectionRequest) -> bool:
        """Whether anyone wants this decision explained."""
        return any(watcher.explain and watcher.wants(request) for watcher in self._watchers)

    def tell(self, request: SelectionRequest, outcome: Decision | KvscoutError) -> None:
        """Tells everyone who watches the request's model."""
        interested = [watcher for watcher in self._watchers if watcher.wants(request)]
        if interested:
            record = DecisionRecord(request, outcome, self._wall_clock())
            for watcher in interested:
                watcher.put(record)
