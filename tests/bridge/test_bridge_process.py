"""The bridge as a process: killed and started again, ended by a signal, asked over gRPC, scraped."""

from __future__ import annotations

import asyncio

import pytest
from support.bridge_stack import SPEC, BridgeProcess, stacked
from support.engine_events import batch, chain, prompt, stored
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.source.recovery import recover_request
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.rpc.channel import open_channel, stream
from kvscout_common.worker import WorkerRank

OTHER = [batch(stored([500 + n], prompt(1, first=4000 + 4 * n))) for n in range(15)]


async def test_killed_and_started_again_it_goes_on_in_the_same_epoch(transport: str) -> None:
    blocks = [*chain(30), batch(stored([1], prompt(1)))]
    async with stacked(transport, process=True) as (stack, listener):
        assert isinstance(stack.bridge, BridgeProcess)
        await stack.publish(*blocks[:10], blocks[30])
        await listener.reaches(stack.payloads)
        epoch = listener.epoch
        await stack.recorded()
        await stack.bridge.kill()
        await stack.publish(*blocks[10:20])
        await stack.start_process()
        await stack.publish(*blocks[20:30])
        await listener.reaches(stack.payloads)
        assert listener.epoch == epoch
        assert listener.source.sequence.counters["restarts"] == 0
        assert (await stack.confirmed(30)).epoch == epoch


async def test_an_engine_that_restarts_while_the_bridge_is_away_is_found_out(transport: str) -> None:
    async with stacked(transport, process=True) as (stack, listener):
        assert isinstance(stack.bridge, BridgeProcess)
        await stack.publish(*chain(10))
        await listener.reaches(stack.payloads)
        epoch = listener.epoch
        await stack.recorded()
        await stack.bridge.kill()
        await stack.restart_engine(*OTHER[:12])
        bridge = await stack.start_process()
        await stack.publish(*OTHER[12:])
        await listener.reaches(stack.payloads)
        assert listener.epoch > epoch
        # Once more: this one has sent nothing yet.
        await stack.recorded()
        await bridge.kill()
        await stack.restart_engine()
        await stack.start_process()
        await listener.reaches([])


async def test_it_is_asked_over_grpc_scraped_and_ended_by_a_signal_which_sends_what_waits() -> None:
    async with stacked("jetstream", process=True) as (stack, listener):
        assert isinstance(stack.bridge, BridgeProcess)
        await stack.publish(*chain(20))
        await listener.reaches(stack.payloads)
        await stack.confirmed(19)
        channel = open_channel(stack.bridge.running.address)
        recover = bridge_pb2_grpc.BridgeStub(channel).Recover
        parts = [part async for part in stream(recover, recover_request("default", SPEC.ranks[0], 17), timeout=10)]
        assert [part.batch.event_id for part in parts] == [17, 18, 19]
        assert {part.outcome for part in parts} == {bridge_pb2.RECOVER_OUTCOME_EVENTS}
        parts = [part async for part in stream(recover, recover_request("default", SPEC.ranks[0], None), timeout=10)]
        index = make_index(4)
        index.add_worker(SPEC.ranks[0], WorkerOptions())
        index.load_messages([part.batch.SerializeToString() for part in parts])
        assert index.dump(SPEC.ranks[0]) == listener.index.dump(listener.rank)
        for rank, error in ((WorkerRank("", 0), InvalidArgument), (WorkerRank("nobody", 0), NotFound)):
            with pytest.raises(error):
                [part async for part in stream(recover, recover_request("default", rank, None), timeout=10)]
        await channel.close()
        metrics = await scrape(stack.bridge.running)
        labels = f'dp_rank="0",model="{SPEC.model}",tenant="default",worker="{SPEC.worker_id}"'
        assert metrics[f"kvscout_bridge_blocks{{{labels}}}"] == 20
        assert metrics["kvscout_nats_connected"] == 1
        await stack.publish(*chain(400)[20:])

        async def reading() -> bool:
            return (await stack.source()).blocks > 20

        await eventually(reading, what="a first batch")
        await stack.bridge.stop()
        before = listener.source.sequence.last_id
        await asyncio.sleep(0)
        assert before is not None
        await stack.start_process()
        await listener.reaches(stack.payloads)
