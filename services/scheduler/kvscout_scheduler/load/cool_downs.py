"""Cool-downs: worker ranks that failed requests are left out of selections for a while.

Who failed, and for how long, is the judgement of whoever reports it: a gateway's outlier detector
(`engines/health.py`), or an operator. The scheduler keeps the time, shares it with its replicas, and leaves out at most
half of a selection's ranks, since several gateways may report different ones.
"""

from __future__ import annotations

from collections.abc import Callable

from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.load.workers import Workers
from kvscout_scheduler.values.settings import SchedulerSettings


class CoolDowns:
    """Cool-downs of worker ranks: reports of failures, and early ends.

    Args:
        settings: How long they are.
        workers: Whose they are.
        clock: Monotonic seconds.
        pump: Lets those go who waited for one that is over.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        workers: Workers,
        clock: Callable[[], float],
        pump: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._pump = pump
        self.longest_seconds = settings.longest_cooldown_seconds
        self.on_change: Callable[[str, WorkerRank, float | None], None] | None = None
        """Receives tenant, rank and seconds of each cool-down reported here; None = it was ended before its time."""

    def report(self, tenant: str, rank: WorkerRank, cooldown_seconds: float = 0.0) -> float:
        """Leave a worker rank out of selections for a while (`Pool.left_out`); never shortens a cool-down.

        Args:
            tenant: Of the worker.
            rank: The rank that failed a request.
            cooldown_seconds: 0 = the default; above the longest one it is that.

        Returns:
            Seconds until its cool-down ends.

        Raises:
            InvalidArgument: The length is negative.
            NotFound: Unknown worker.
        """
        if not cooldown_seconds >= 0:
            raise InvalidArgument(f"must be at least 0, not {cooldown_seconds}", field="cooldown_seconds")
        pool, slot = self._workers.slot(tenant, rank)
        now = self._clock()
        seconds = min(cooldown_seconds or self._settings.cooldown_seconds, self._settings.longest_cooldown_seconds)
        until = max(now + seconds, pool.cooldown_until.get(slot, now))
        pool.cool_down(slot, until)
        if self.on_change is not None:
            self.on_change(tenant, rank, until - now)
        return until - now

    def put(self, tenant: str, rank: WorkerRank, seconds: float) -> None:
        """Set the cool-down of a worker rank, as another replica knows it.

        Raises:
            NotFound: Unknown worker.
        """
        pool, slot = self._workers.slot(tenant, rank)
        pool.cool_down(slot, self._clock() + seconds)

    def clear(self, tenant: str, *, worker_id: str = "", model: str = "") -> list[WorkerRank]:
        """End cool-downs before their time.

        Args:
            tenant: Of the workers.
            worker_id: "" = all.
            model: "" = all.

        Returns:
            The ranks that cooled down.

        Raises:
            NotFound: Unknown worker.
        """
        if worker_id:
            self._workers.require_worker(tenant, worker_id)
        now, cleared = self._clock(), []
        for pool in self._workers:
            if pool.id.tenant != tenant or model not in ("", pool.id.model):
                continue
            for slot, until in list(pool.cooldown_until.items()):
                rank = pool.ranks[slot]
                if until > now and worker_id in ("", rank.worker_id):
                    cleared.append(rank)
                    pool.cool_down(slot, now)
                    if self.on_change is not None:
                        self.on_change(tenant, rank, None)
        self._pump()
        return sorted(cleared)
