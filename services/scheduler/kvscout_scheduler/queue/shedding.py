"""Requests of a priority below 0 are shed: refused, as soon as no worker can keep their target for the first token.

Two of the three places that shed are here: on arrival, where those before a request take longer than its target, and in
the queue, where its target passes. The third is the selection (`policies.headroom`), where no worker would keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscout_common.errors import DeadlineExceeded, KvscoutError
from kvscout_common.observability.warnings import TenantWarning
from kvscout_scheduler.load.workers import Workers
from kvscout_scheduler.policies.headroom import KV_TIME, Shed
from kvscout_scheduler.queue.waiting import RETRY_SECONDS, Waiter, WaitingQueues
from kvscout_scheduler.values.request import SelectionRequest
from kvscout_scheduler.values.settings import SchedulerSettings

WARNED_SECONDS: Final = 60.0
"""Seconds for which operators are warned that a request was shed."""


class Shedding:
    """Shedding of requests, and its warnings for operators.

    Args:
        settings: The policy, and the targets of the models.
        waiting: Those that wait.
        workers: Whom they wait for.
        clock: Monotonic seconds.
    """

    def __init__(
        self, settings: SchedulerSettings, waiting: WaitingQueues, workers: Workers, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._waiting = waiting
        self._workers = workers
        self._clock = clock
        self._shed_at: dict[tuple[str, str], float] = {}
        """When a request was last shed, by tenant and model; of models that have or had workers."""

    def limit(self, waiter: Waiter) -> None:
        """Let a request that joins the queue wait no longer than its target, if it may be shed.

        Raises:
            Shed: Those before it take longer than its target.
        """
        request = waiter.request
        if request.priority >= 0 or self._settings.policy != KV_TIME:
            return
        target = self._settings.targets_of(request.model, request.targets).ttft_seconds
        queued = self._queued_seconds(request)
        if queued > target and request.key not in self._waiting:
            raise Shed(
                f"those before it take about {queued:.3g} s, its target is {target:.3g} s",
                retry_after_seconds=max(RETRY_SECONDS, queued - target),
            )
        if waiter.joined + target < waiter.deadline:
            waiter.deadline, waiter.sheds = waiter.joined + target, True

    def late(self, waiter: Waiter, now: float) -> KvscoutError:
        """Return the refusal of a request whose time in the queue is over."""
        waited = now - waiter.since
        if not waiter.sheds:
            return DeadlineExceeded(f"its deadline passed in the queue, after {waited:.3g} s")
        return Shed(
            f"no worker had room within its target; it waited {waited:.3g} s",
            retry_after_seconds=max(RETRY_SECONDS, self._queued_seconds(waiter.request)),
        )

    def delay_retry(self, request: SelectionRequest, shed: Shed) -> None:
        """Add the time of those that wait before a request to that after which its caller should try again."""
        delay = (shed.retry_after_seconds or 0.0) + self._queued_seconds(request)
        shed.retry_after_seconds = max(RETRY_SECONDS, delay)

    def record(self, request: SelectionRequest) -> None:
        """Note that a request was shed."""
        self._shed_at[request.tenant, request.model] = self._clock()

    def warnings(self) -> list[TenantWarning]:
        """Return the models of which requests are shed now."""
        now = self._clock()
        return [
            TenantWarning(
                tenant,
                f"model {model}: requests of a priority below 0 are shed, no worker keeps their targets "
                "(--ttft-target-ms, --itl-target-ms, --model-target, objectives): add workers, or raise the targets",
            )
            for (tenant, model), at in self._shed_at.items()
            if now - at < WARNED_SECONDS
        ]

    def _queued_seconds(self, request: SelectionRequest) -> float:
        """Return the estimated seconds that each worker needs for those before a request; 0 = no worker is left."""
        queue, ranks = self._waiting.queue(request.pool), self._workers.ranks(request.pool)
        return queue.seconds(request.priority) / ranks if queue is not None and ranks else 0.0
