"""Policies that only the laboratory has: for comparison, and in no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.policies import Candidates, PolicyRegistry, installed_policies
from kvscout_scheduler.policies.builtin import LeastLoaded


class SessionSticky(LeastLoaded):
    """The worker where the request's session was last, whatever its load; a new session: the fewest active requests."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        columns = zip(candidates.slots, candidates.active_requests, strict=True)
        return [-1 if slot == candidates.home else requests for slot, requests in columns]


def lab_policies() -> PolicyRegistry:
    """Return the registry of schedulers' policies and those of the laboratory."""
    return installed_policies({"session-sticky": SessionSticky})
