"""Fair shares: whose request goes next among those of one priority.

::

    pool, priority 0 ─┬─ caller "search"   weight 2 ─┬─ fairness id "a"
                      │                              └─ fairness id "b"
                      └─ caller "batch"    weight 1 ──── fairness id "c"

Each name has an account of estimated seconds, divided by its weight. The name with the least goes next, and is charged
for the request when that is booked: deficit round-robin with a quantum so small that nobody waits for another's turn to
end. First among callers (names of tokens, or the tenant), then among the fairness ids of that caller: a client that
invents ids divides its own share, and nobody else's.

Rules
1. A name that begins to wait starts where the one served last started (`floor`), or where its own account is, if that
   is higher: it gains nothing by coming and going, and loses nothing by having been away.
2. Who leaves without being served is not charged.
3. Of names that could not be served meanwhile (no worker of theirs had room), nothing is saved up.
4. At most `MAX_NAMES` accounts are kept at each level. Idle ones that had least are forgotten first; where all wait,
   further names share the account `OTHERS`.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

MAX_NAMES: Final = 256
"""Accounts at one level, besides that of all others."""
OTHERS: Final = "(others)"
"""Shared by the names beyond `MAX_NAMES`."""


class Flow(NamedTuple):
    """Requests that share an account."""

    caller: str = ""
    fairness_id: str = ""


class Share(NamedTuple):
    """Queued requests of a flow."""

    flow: Flow
    waiting: int
    """Requests."""
    ahead_seconds: float
    """Estimated seconds by weight that its caller has had more than the one that goes next."""


class Accounts:
    """Accounts of one level."""

    __slots__ = ("floor", "had", "waiting")

    def __init__(self) -> None:
        self.floor = 0.0
        """Account at which the one served last started."""
        self.had: dict[str, float] = {}
        """Seconds by weight, by name."""
        self.waiting: dict[str, int] = {}
        """Requests that wait, by name; none is 0."""

    def enter(self, name: str) -> str:
        """Count a request that begins to wait; return the name of its account."""
        if name not in self.had and len(self.had) >= MAX_NAMES and not self._forget():
            name = OTHERS
        if name not in self.waiting:
            self.had[name] = max(self.had.get(name, 0.0), self.floor)
        self.waiting[name] = self.waiting.get(name, 0) + 1
        return name

    def leave(self, name: str) -> None:
        """Count a request that waits no more."""
        left = self.waiting[name] - 1
        if left:
            self.waiting[name] = left
            return
        del self.waiting[name]
        if self.had[name] <= self.floor:
            del self.had[name]

    def charge(self, name: str, seconds: float) -> None:
        """Charge an account for a request that was served.

        Args:
            name: The account.
            seconds: Divided by its weight.
        """
        self.floor = max(self.floor, self.had.get(name, 0.0))
        self.had[name] = self.floor + seconds

    def _forget(self) -> bool:
        """Forget half of the idle accounts, those that had least; False = none is idle."""
        idle = sorted((had, name) for name, had in self.had.items() if name not in self.waiting)
        for _, name in idle[: -(-len(idle) // 2)]:
            del self.had[name]
        return bool(idle)


class FairShares:
    """Accounts of one priority of a pool.

    Args:
        weights: By the name of a caller or a fairness id; others have 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.waiting = 0
        self.seconds = 0.0
        """Σ estimated seconds of those that wait."""
        self._weights = weights
        self._callers = Accounts()
        self._ids: dict[str, Accounts] = {}
        """Accounts of fairness ids, by caller; of callers that have an account."""

    def enter(self, flow: Flow, seconds: float) -> Flow:
        """Count a request that begins to wait; return the flow that it is charged to."""
        self.waiting += 1
        self.seconds += seconds
        caller = self._callers.enter(flow.caller)
        ids = self._ids.get(caller)
        if ids is None:
            self._ids = {name: ids for name, ids in self._ids.items() if name in self._callers.had}
            ids = self._ids[caller] = Accounts()
        return Flow(caller, ids.enter(flow.fairness_id))

    def leave(self, flow: Flow, seconds: float) -> None:
        """Count a request that waits no more."""
        self.waiting -= 1
        self.seconds = self.seconds - seconds if self.waiting else 0.0
        self._callers.leave(flow.caller)
        self._ids[flow.caller].leave(flow.fairness_id)

    def charge(self, flow: Flow, seconds: float) -> None:
        """Charge a flow for a request that was served."""
        caller, fairness_id = flow
        self._callers.charge(caller, seconds / self._weights.get(caller, 1.0))
        self._ids[caller].charge(fairness_id, seconds / self._weights.get(fairness_id, 1.0))

    def had(self, flow: Flow) -> tuple[float, float]:
        """Return the accounts of a flow that waits: its caller's, and its own. The least goes next."""
        return self._callers.had[flow.caller], self._ids[flow.caller].had[flow.fairness_id]

    def next_caller(self, callers: Iterable[str]) -> str:
        """Return the caller that goes next; of several equal ones the first."""
        return min(callers, key=self._callers.had.__getitem__)

    def next_id(self, caller: str, fairness_ids: Iterable[str]) -> str:
        """Return the fairness id of a caller that goes next; of several equal ones the first."""
        return min(fairness_ids, key=self._ids[caller].had.__getitem__)

    @property
    def ahead_seconds(self) -> float:
        """Return the seconds by weight that a caller who waits has had more than the one that goes next: the most."""
        had = [self._callers.had[name] for name in self._callers.waiting]
        return max(had) - min(had) if had else 0.0

    def report(self) -> list[Share]:
        """Return the flows that wait."""
        had = self._callers.had
        least = min((had[name] for name in self._callers.waiting), default=0.0)
        return [
            Share(Flow(caller, fairness_id), waiting, had[caller] - least)
            for caller in self._callers.waiting
            for fairness_id, waiting in self._ids[caller].waiting.items()
        ]
