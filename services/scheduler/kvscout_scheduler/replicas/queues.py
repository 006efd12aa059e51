"""Highest priorities in the queues of replicas, as they exchange them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from kvscout.v1 import replication_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.worker_proto import role_from_proto, role_to_proto
from kvscout_scheduler.values.request import UNCONSTRAINED
from kvscout_scheduler.values.reservation import PoolId

if TYPE_CHECKING:
    from kvscout_scheduler.queue.waiting import WaitingQueues

PRIORITIES_SECONDS: Final = 0.2
"""Seconds between two messages of queues."""
STALE_SECONDS: Final = 0.5
"""After which they count no more."""
MAX_PRIORITIES: Final = 64


class _View(Protocol):
    priorities: dict[PoolId, int]
    priorities_at: float

    def live(self, now: float) -> bool: ...


def priorities_of(waiting: WaitingQueues) -> dict[PoolId, int]:
    """Return the highest priority of unconstrained waiting requests, by pool, for `MAX_PRIORITIES` pools."""
    found = (
        (pool, queue.priority(UNCONSTRAINED)) for pool in waiting.pools if (queue := waiting.queue(pool)) is not None
    )
    return dict(islice(((pool, priority) for pool, priority in found if priority is not None), MAX_PRIORITIES))


def priorities_to_proto(priorities: Mapping[PoolId, int]) -> list[replication_pb2.ReplicaLine]:
    """Convert queues to messages for other replicas."""
    return [
        replication_pb2.ReplicaLine(
            tenant=pool.tenant, model=pool.model, role=role_to_proto(pool.role), priority=priority
        )
        for pool, priority in priorities.items()
    ]


def priorities_from_proto(lines: Iterable[replication_pb2.ReplicaLine]) -> dict[PoolId, int]:
    """Return priorities of another replica; what is beyond the bound, or of a role that is not known here, is left."""
    found = {}
    for line in islice(lines, MAX_PRIORITIES):
        with suppress(InvalidArgument):
            found[PoolId(line.tenant, line.model, role_from_proto(line.role))] = line.priority
    return found


def highest_priority(pool: PoolId, views: Iterable[_View], now: float) -> int | None:
    """Return the highest priority that waits for a pool at any replica; None = nobody waits."""
    known = (view.priorities.get(pool) for view in views if now - view.priorities_at < STALE_SECONDS and view.live(now))
    return max((priority for priority in known if priority is not None), default=None)
