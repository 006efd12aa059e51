"""WatchLoads and WatchDecisions: loads when they change, decisions as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.identity.identity import tenant_to_show
from kvscout_common.transport.statuses import status_code
from kvscout_scheduler.messages import translate
from kvscout_scheduler.policies.decision_feed import DecisionRecord, DecisionWatcher
from kvscout_scheduler.rpc.listing import load_to_proto, potential_loads

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

DEFAULT_INTERVAL_MS = 500
MIN_INTERVAL_MS = 10
MAX_INTERVAL_MS = 60_000


class WatchRpcs:
    """The two rpcs, for the servicer to inherit."""

    _scheduler: Scheduler

    async def WatchLoads(
        self, request: scheduler_pb2.WatchLoadsRequest, context: Any
    ) -> AsyncGenerator[scheduler_pb2.WatchLoadsResponse, None]:
        interval = request.min_interval_ms or DEFAULT_INTERVAL_MS
        if not MIN_INTERVAL_MS <= interval <= MAX_INTERVAL_MS:
            raise InvalidArgument(f"must be between {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS}", field="min_interval_ms")
        pool = translate.pool_from_request(request)
        last: list[Any] | None = None
        while True:
            loads = potential_loads(self._scheduler, pool)
            # What runs by itself is no change.
            shown = [
                load._replace(
                    cooldown_seconds=float(load.cooldown_seconds > 0),
                    metrics_age_seconds=None if load.metrics_age_seconds is None else 0.0,
                )
                for load in loads
            ]
            if shown != last:
                last = shown
                yield scheduler_pb2.WatchLoadsResponse(loads=map(load_to_proto, loads))
            await asyncio.sleep(interval / 1000)

    async def WatchDecisions(
        self, request: scheduler_pb2.WatchDecisionsRequest, context: Any
    ) -> AsyncGenerator[scheduler_pb2.WatchDecisionsResponse, None]:
        tenant = tenant_to_show(request.tenant)
        news = asyncio.Event()
        watcher = DecisionWatcher(tenant, request.model, request.explain, news.set)
        self._scheduler.decision_feed.add(watcher)
        try:
            # Headers go out immediately: the caller knows from when on it misses nothing.
            await context.send_initial_metadata(())
            while True:
                await news.wait()
                news.clear()
                lost, records = watcher.take()
                for record in records:
                    yield _to_proto(record, lost=lost)
                    lost = 0
        finally:
            self._scheduler.decision_feed.remove(watcher)


def _to_proto(record: DecisionRecord, *, lost: int) -> scheduler_pb2.WatchDecisionsResponse:
    message = scheduler_pb2.WatchDecisionsResponse(
        decided_unix_seconds=record.timestamp,
        request=translate.key_to_proto(record.key, record.attempt_id),
        isl_tokens=record.isl_tokens,
        code=status_code(record.error).value[0] if record.error is not None else 0,
        message=record.message,
        lost=lost,
        session=record.decision.session if record.decision is not None else 0,
    )
    if record.decision is not None:
        message.decision.CopyFrom(translate.decision_to_proto(record.decision))
    return message
