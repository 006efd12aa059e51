"""Connections that open streams and reset them at once do not take honest calls of others down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from support.http2_resets import attacking
from support.processes import running

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import call, open_channel

ATTACKERS = 4
STREAMS = 6_000
"""A connection; grpc refuses any caller once 3,000 calls of all connections wait to be looked at."""
CALL_SECONDS = 30.0


async def test_honest_calls_are_answered_while_other_connections_open_and_reset_streams_by_the_thousand() -> None:
    async with running("kvscout_scheduler.main") as scheduler, AsyncExitStack() as attack:
        channel = open_channel(scheduler.address)
        stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)

        async def ask() -> scheduler_pb2.SchedulerGetStatusResponse:
            return await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)

        assert (await ask()).service.version
        for _ in range(ATTACKERS):
            await attack.enter_async_context(
                attacking(scheduler.ready["port"], "/kvscout.v1.Scheduler/GetStatus", STREAMS)
            )
        answers: list[object] = []
        while len(answers) < 60:
            answers += await asyncio.gather(*(ask() for _ in range(3)), return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        await channel.close()
    assert not failed, f"{len(failed)} of {len(answers)}: {failed[0]!r}"
