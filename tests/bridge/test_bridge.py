"""Engine → bridge → NATS → index: whoever is killed, an index ends where the engine's own bytes would have led it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import nats
import pytest
from support.bridge_stack import NAMES, SPEC, BridgeHere, Stack, stacked
from support.engine_events import CLEARED, batch, chain, prompt, removed, stored
from support.event_listener import Listener
from support.nats_server import nats_server
from support.processes import eventually
from support.recorded_engine import recorded_engine
from support.seeds import test_seed

from kvscout_blocks.source.feed import HistoryBroken
from kvscout_blocks.source.recovery import recover, recover_request
from kvscout_bridge.config import BridgeConfig
from kvscout_bridge.servicer import BridgeServicer
from kvscout_common.errors import FailedPrecondition, Unavailable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_bucket import Stored, WorkerBucket
from kvscout_common.worker import Adapter, EventEndpoint, Transport


async def test_events_arrive_as_the_engine_sent_them(transport: str) -> None:
    async with stacked(transport) as (stack, listener):
        await stack.publish(*chain(20))
        await listener.reaches(stack.payloads)
        await stack.publish(batch(removed([20])), b"\xc1 malformed", batch(stored([30], prompt(1), medium="CPU")))
        await listener.reaches([*stack.payloads[:21], batch(), stack.payloads[22]])
        assert listener.events == [(listener.epoch, event_id) for event_id in range(23)]
        assert not listener.incomplete
        source = await stack.confirmed(22)
        assert (source.epoch, source.dropped_batches, source.blocks) == (listener.epoch, 0, 19)


async def test_what_the_engines_socket_drops_of_a_replay_is_requested_again_and_costs_readers_nothing(
    transport: str,
) -> None:
    blocks = chain(40)
    async with stacked(transport) as (stack, listener):
        await stack.publish(*blocks[:5])
        await listener.reaches(stack.payloads)
        states = len(listener.states)
        stack.engine.lost_replies.extend([range(3, 20), range(2, 40)])
        stack.payloads.extend(blocks[5:39])
        stack.engine.lose(*blocks[5:39])
        await stack.publish(blocks[39])
        await listener.reaches(stack.payloads)
        assert listener.events == [(listener.epoch, event_id) for event_id in range(40)]
        assert (listener.incomplete, len(listener.states)) == (False, states)
        assert not stack.engine.lost_replies


async def test_who_comes_later_recovers_everything(transport: str) -> None:
    async with stacked(transport) as (stack, listener):
        await stack.publish(*chain(5))
        await listener.reaches(stack.payloads)
        async with stack.listening() as late:
            await late.reaches(stack.payloads)


async def test_nats_killed_and_started_again_loses_and_doubles_nothing(transport: str) -> None:
    blocks = chain(30)
    async with stacked(transport) as (stack, listener):
        await stack.publish(*blocks[:10])
        await listener.reaches(stack.payloads)
        await stack.nats.kill()
        await stack.publish(*blocks[10:20])
        await eventually(lambda: _waiting(stack, 10), what="batches waiting for NATS")
        await stack.nats.start()
        await stack.publish(*blocks[20:])
        await listener.reaches(stack.payloads)
        source = await stack.confirmed(29)
        assert source.dropped_batches == 0
        assert not listener.incomplete
        assert listener.source.sequence.counters["demotions"] == 0


async def test_what_was_under_way_when_nats_died_is_sent_again(transport: str) -> None:
    blocks = chain(30)
    async with stacked(transport) as (stack, listener):
        await stack.publish(*blocks[:10])
        await listener.reaches(stack.payloads)
        await stack.confirmed(9)
        stack.nats.pause()
        await stack.publish(*blocks[10:20])
        await eventually(lambda: _waiting(stack, 10), what="batches under way")
        await stack.nats.kill()
        await stack.nats.start()
        await stack.publish(*blocks[20:])
        await listener.reaches(stack.payloads)
        assert (await stack.confirmed(29)).dropped_batches == 0
        assert listener.source.sequence.counters["demotions"] == 0


async def _waiting(stack: Stack, number: int) -> bool:
    source = await stack.source()
    return bool(source.buffered_batches >= number or source.dropped_batches)


async def test_beyond_its_buffer_the_state_is_sent(transport: str) -> None:
    blocks = chain(60)
    async with stacked(transport, max_buffered_bytes=2048) as (stack, listener):
        await stack.publish(*blocks[:10])
        await listener.reaches(stack.payloads)
        states = len(listener.states)
        await stack.nats.kill()
        await stack.publish(*blocks[10:50])
        await eventually(lambda: _dropped(stack), what="dropped batches")
        await stack.nats.start()
        await listener.reaches(stack.payloads)
        await stack.publish(*blocks[50:])
        await listener.reaches(stack.payloads)
        await stack.confirmed(59)
        assert len(listener.states) > states
        assert not listener.states[-1].history_incomplete
        assert not listener.incomplete


async def _dropped(stack: Stack) -> bool:
    return bool((await stack.source()).dropped_batches)


async def test_an_engine_that_restarts_begins_a_higher_epoch(transport: str) -> None:
    async with stacked(transport) as (stack, listener):
        await stack.publish(*chain(10))
        await listener.reaches(stack.payloads)
        epoch = listener.epoch
        await stack.restart_engine()
        await stack.engine.subscribed()
        await stack.publish(batch(stored([77], prompt(1, first=500))))
        await listener.reaches(stack.payloads)
        assert listener.epoch > epoch


async def test_an_engine_that_restarts_behind_a_reconnect_is_found_out(transport: str) -> None:
    other = [batch(stored([500 + n], prompt(1, first=4000 + 4 * n))) for n in range(15)]
    async with stacked(transport) as (stack, listener):
        await stack.publish(*chain(10))
        await listener.reaches(stack.payloads)
        epoch = listener.epoch
        await stack.restart_engine(*other[:12])
        await stack.engine.subscribed()
        await stack.publish(*other[12:])
        await listener.reaches(stack.payloads)
        assert listener.epoch > epoch


async def test_a_batch_larger_than_a_message_arrives_as_a_state(transport: str) -> None:
    # 70,000 blocks: 16 bytes each are more than NATS takes in one message.
    blocks = 70_000
    async with stacked(transport) as (stack, listener):
        await stack.publish(*chain(3))
        await listener.reaches(stack.payloads)
        await stack.publish(batch(stored(range(10, 10 + blocks), prompt(blocks, first=100))))
        await stack.publish(batch(removed([1])))
        await listener.reaches(stack.payloads)
        assert listener.largest <= 512 * 1024
        assert listener.states[-1].last_event_id in (3, 4)
        assert not listener.incomplete


async def test_history_that_the_engine_lost_is_reported_and_a_cleared_cache_ends_it(transport: str) -> None:
    blocks = chain(30)
    async with stacked(transport, has_replay=False) as (stack, listener):
        await stack.publish(*blocks[:10])
        await listener.reaches(stack.payloads)
        stack.engine.lose(*blocks[10:20])
        stack.payloads.extend(blocks[10:20])
        await stack.publish(*blocks[20:])
        await eventually(lambda: _incomplete(listener), what="an incomplete history")
        await eventually(lambda: _at(listener, 29), what="the last event")
        assert listener.dump().blocks == ()
        await stack.publish(batch(CLEARED, stored([1], prompt(1))))
        await listener.reaches(stack.payloads)
        assert not listener.incomplete


async def _incomplete(listener: Listener) -> bool:
    return bool(listener.incomplete)


async def _at(listener: Listener, event_id: int) -> bool:
    return bool(listener.source.sequence.last_id == event_id)


async def test_another_block_size_is_visible_behind_the_bridge_and_in_its_status(transport: str) -> None:
    async with stacked(transport) as (stack, listener):
        await stack.publish(batch(stored([1, 2], prompt(4), block_size=8)))

        async def incompatible() -> str:
            stats = listener.index.worker_stats(listener.rank)
            return stats.incompatible if stats is not None else ""

        assert "8 tokens, the registration says 4" in await eventually(incompatible, what="an incompatible worker")
        assert stack.bridge is not None
        warnings = (await stack.bridge.status()).service.warnings
        assert any("8 tokens, the registration says 4" in warning for warning in warnings)


async def test_it_starts_before_nats_and_before_the_engine() -> None:
    async with stacked("jetstream") as (stack, listener):
        assert stack.bridge is not None
        await stack.bridge.stop()
        await stack.nats.kill()
        await stack.engine.stop()
        stack.start_bridge()
        await asyncio.gather(stack.engine.start(), stack.nats.start())
        await stack.engine.subscribed()
        await stack.publish(*chain(5))
        await listener.reaches(stack.payloads)


async def test_only_what_is_read_otherwise_is_read_anew() -> None:
    async with stacked("nats-core") as (stack, listener):
        assert isinstance(stack.bridge, BridgeHere)
        bridge = stack.bridge.bridge
        await stack.engine.subscribed()
        await stack.publish(*chain(3))
        await listener.reaches(stack.payloads)
        [before], first = bridge.ranks("*"), await stack.source()
        asked = len(stack.engine.replays_asked)
        spec = before.spec
        for other in (
            replace(spec, labels={"zone": "b"}),
            replace(spec, total_kv_blocks=100, http_endpoint="http://elsewhere:8000", draining=True),
            replace(spec, adapters=(Adapter("poet", 1),)),
        ):
            bridge.registry.update(other)
            [rank] = bridge.ranks("*")
            assert rank is before
            assert rank.spec == other
        await stack.publish(*chain(5)[3:])
        await listener.reaches(stack.payloads)
        assert (await stack.source()).epoch == first.epoch
        assert len(stack.engine.replays_asked) == asked
        [endpoint] = spec.event_endpoints
        bridge.registry.update(replace(spec, event_endpoints=(replace(endpoint, topic="kv"),)))
        [rank] = bridge.ranks("*")
        assert rank is not before


async def test_an_engine_that_is_removed_or_that_others_remove_is_registered_no_more() -> None:
    async with nats_server() as server, recorded_engine() as engine:
        stack = Stack(server, engine, "nats-core")
        stack.start_bridge()
        link = NatsLink(NatsConfig((server.url,), "test"), "test")
        running = asyncio.create_task(link.run())
        bucket = WorkerBucket(link)

        async def registered() -> Stored | None:
            try:
                stored = await bucket.get(WorkerName(SPEC.tenant, SPEC.worker_id))
            except Unavailable:
                return None
            return stored if isinstance(stored, Stored) else None

        async def gone() -> bool:
            return await registered() is None

        try:
            stored: Stored = await eventually(registered, what="a registration")
            assert (stored.spec.transport, stored.spec.block_size) == (Transport.NATS_CORE, 4)

            async def renewed() -> bool:
                now = await registered()
                return now is not None and now.revision >= stored.revision + 2

            await eventually(renewed, what="a lease that is kept")
            assert stack.bridge is not None
            await stack.bridge.stop()
            await eventually(gone, what="a lease that ended")
            stack.start_bridge()
            await eventually(registered, what="a registration")
            await bucket.remove(WorkerName(SPEC.tenant, SPEC.worker_id))

            async def told() -> bool:
                assert stack.bridge is not None
                return any("somebody removed it" in text for text in (await stack.bridge.status()).service.warnings)

            await eventually(told, what="a warning")
            assert await gone()
        finally:
            assert stack.bridge is not None
            await stack.bridge.stop()
            running.cancel()
            await link.close()


async def test_plain_nats_suffices_and_a_restarted_bridge_is_learnt_anew() -> None:
    async with stacked("nats-core", jetstream=False) as (stack, listener):
        await stack.publish(*chain(10))
        await listener.reaches(stack.payloads)
        epoch = listener.epoch
        assert stack.bridge is not None
        await stack.bridge.stop()
        stack.start_bridge()
        await stack.publish(*chain(12)[10:])
        await listener.reaches(stack.payloads)
        assert listener.epoch > epoch


async def test_without_a_local_index_requests_are_refused_and_events_go_on() -> None:
    async with stacked("nats-core", local_indexer=False) as (stack, listener):
        await stack.publish(*chain(3))
        assert stack.bridge is not None
        servicer = BridgeServicer(stack.bridge.bridge)  # type: ignore[attr-defined]
        with pytest.raises(FailedPrecondition, match="without a local index"):
            await anext(servicer.Recover(recover_request(SPEC.tenant, SPEC.ranks[0], None), None))
        with pytest.raises(HistoryBroken, match="no publisher answers"):
            async with await nats.connect(stack.nats.url) as client:
                subject = NAMES.recover(SPEC.tenant, SPEC.ranks[0])
                await anext(recover(client, subject, recover_request(SPEC.tenant, SPEC.ranks[0], None)))
        await eventually(lambda: _heard(listener, 2), what="live events")


async def _heard(listener: Listener, event_id: int) -> bool:
    return any(number == event_id for _, number in listener.events)


async def test_a_deleted_bucket_and_a_deleted_stream_are_made_again() -> None:
    async with stacked("jetstream") as (stack, _):
        await stack.publish(*chain(3))
        await stack.confirmed(2)
        async with await nats.connect(stack.nats.url) as client:
            js = client.jetstream()
            await js.delete_key_value(NAMES.bridges_bucket)
            stream = NAMES.stream(SPEC.tenant, SPEC.model)
            await js.delete_stream(stream)
            await stack.publish(*chain(6)[3:])
            await stack.confirmed(5)
            assert (await js.stream_info(stream)).state.messages > 0
            await stack.restart_engine()
            await stack.engine.subscribed()
            await stack.publish(*chain(1))
            await stack.confirmed(0)
            record = await stack.recorded()
            assert record.epoch == (await stack.source()).epoch


async def test_chaos_ends_in_the_engines_truth(transport: str) -> None:
    seed = test_seed()
    rng = random.Random(seed)
    async with stacked(transport) as (stack, listener):
        number, held = 0, [0]
        for _ in range(30):
            for _ in range(rng.randrange(6)):
                number += 1
                kind = rng.random()
                if kind < 0.1:
                    payload = batch(CLEARED, stored([number], prompt(1, first=4 * number)))
                    held = [number]
                elif kind < 0.4:
                    payload = batch(removed([held.pop(rng.randrange(len(held)))] if len(held) > 1 else [999_999]))
                else:
                    parent = rng.choice(held) or None
                    payload = batch(stored([number], prompt(1, first=4 * number), parent=parent))
                    held.append(number)
                if rng.random() < 0.05:
                    stack.payloads.append(payload)
                    stack.engine.lose(payload)
                else:
                    await stack.publish(payload)
            chance = rng.random()
            if chance < 0.08:
                await stack.nats.kill()
                await asyncio.sleep(rng.random() * 0.05)
                await stack.nats.start()
            elif chance < 0.16:
                assert stack.bridge is not None
                await stack.bridge.stop()
                stack.start_bridge()
                await stack.engine.subscribed()
            elif chance < 0.24:
                await stack.restart_engine()
                held = [0]
            else:
                await asyncio.sleep(rng.random() * 0.02)
        # Something must come after what was lost last.
        await stack.engine.subscribed()
        await stack.publish(batch(stored([number + 1], prompt(1, first=7))))
        await listener.reaches(stack.payloads)


async def test_an_engine_that_is_served_over_grpc_is_left_to_the_indexers(caplog: pytest.LogCaptureFixture) -> None:
    streamed = replace(
        SPEC, transport=Transport.SUBSCRIBE, event_endpoints=(EventEndpoint(0, "grpc://127.0.0.1:1"),)
    ).validate()
    async with nats_server() as nats:
        bridge = BridgeHere(BridgeConfig(nats=NatsConfig((nats.url,), "test"), worker=streamed))
        try:
            assert list(bridge.bridge.ranks("*")) == []
            assert "worker engine.0 is served over gRPC: indexers read its events" in caplog.text
        finally:
            await bridge.stop()
