"""Peers: an indexer that starts, or meets a worker, takes what another one knows; and does without if there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engine_events import CLEARED, batch, chain, prompt, removed, stored
from support.indexer_client import IndexerClient, indexer_process, local_indexer
from support.nats_server import nats_server
from support.processes import eventually
from support.recorded_engine import RecordedEngine, recorded_engine
from support.scripted_publisher import ScriptedPublisher, core_publisher, dumped, follow, nats_config, served_indexer

from kvscout.v1 import events_pb2, indexer_pb2, types_pb2
from kvscout_blocks.bytes.codec import encode_dump
from kvscout_common.worker import EventEndpoint, Transport
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.feeds import peers
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer

LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE
NOBODY = "127.0.0.1:9"
"""The discard port, where nothing listens."""


@dataclass
class Member:
    """One indexer of several."""

    client: IndexerClient
    indexer: Indexer
    address: str
    dumps: int = 0


class CountedDumps(IndexerServicer):
    """Counts what is asked of a peer, and fails it on demand."""

    member: Member
    breaks_after: int | None = None
    """Messages of a dump after which the stream breaks."""

    def add_to(self, server: grpc.aio.Server) -> None:
        super().add_to(server)
        handler: grpc.RpcMethodHandler[Any, bytes] = grpc.unary_stream_rpc_method_handler(
            self.dump, request_deserializer=indexer_pb2.DumpRequest.FromString
        )
        server.add_registered_method_handlers("kvscout.v1.Indexer", {"Dump": handler})

    async def dump(self, request: indexer_pb2.DumpRequest, context: Any) -> AsyncIterator[bytes]:
        self.member.dumps += 1
        count = 0
        async for message in self.dump_messages(request, context):
            if count == self.breaks_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the peer dies")
            count += 1
            yield message


@asynccontextmanager
async def member(*peer_addresses: str, breaks_after: int | None = None, **fields: Any) -> AsyncIterator[Member]:
    """An indexer that others can ask."""
    async with local_indexer(IndexerConfig(peers=peer_addresses, **fields)) as (client, indexer):
        server = grpc.aio.server()
        raw = CountedDumps(indexer, None)
        raw.breaks_after = breaks_after
        raw.member = made = Member(client, indexer, "")
        raw.add_to(server)
        made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield made
        finally:
            await server.stop(None)


def read(indexer: Indexer, engine: RecordedEngine, **fields: Any) -> None:
    """Has an indexer read an engine's sockets."""
    follow(
        indexer,
        Transport.ZMQ,
        event_endpoints=(EventEndpoint(0, engine.endpoint, engine.replay_endpoint),),
        **fields,
    )


async def state(member: Member) -> events_pb2.KvEventBatch:
    """What a member knows of the worker; its one chunk."""
    spec = member.indexer.registry.get("default", "w").spec
    (message,) = await member.indexer.dump_messages(spec, spec.ranks[0])
    return events_pb2.KvEventBatch.FromString(message)


async def test_a_mute_engines_past_comes_from_a_peer_and_what_came_meanwhile_is_applied_to_it() -> None:
    async with recorded_engine(has_replay=False) as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        batches = chain(6)
        await engine.publish(*batches[:4])
        await old.client.until_applied(3)
        async with member(old.address) as new:
            read(new.indexer, engine)
            status = await new.client.until(lambda s: s.states == 1)
            assert (status.last_event_id, status.state, status.applied) == (3, LIVE, 0)
            await engine.publish(*batches[4:], batch(removed([6])))
            for one in (old, new):
                await one.client.until_applied(6)
            assert await state(new) == await state(old)
            assert not (await new.client.matches(prompt(6))).lower_bound
            assert new.indexer.peers.found == 1


async def test_a_dump_shows_what_was_lost_while_its_cut_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded_engine(has_replay=False) as engine, member() as one:
        read(one.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await one.client.until_applied(2)
        ((_, _, source),) = one.indexer.sources("default")
        assert source is not None
        cut = source.cut

        async def late_cut() -> Any:
            source.on_reconnect()
            return await cut()

        assert not (await state(one)).events[0].state.history_incomplete
        monkeypatch.setattr(source, "cut", late_cut)
        assert (await state(one)).events[0].state.history_incomplete


async def test_live_batches_wait_for_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded_engine(has_replay=False) as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        batches = chain(5)
        await engine.publish(*batches[:3])
        await old.client.until_applied(2)
        asked, go = asyncio.Event(), asyncio.Event()
        dump = peers.Peer.dump

        async def held(*arguments: Any) -> Any:
            found = await dump(*arguments)
            asked.set()
            await go.wait()
            return found

        monkeypatch.setattr(peers.Peer, "dump", held)
        async with member(old.address) as new:
            read(new.indexer, engine)
            await asked.wait()
            await engine.publish(batches[3], batch(removed([4])), batches[4])
            status = await new.client.until(lambda s: s.lag_batches == 3)
            assert (status.state, status.reason) == (
                indexer_pb2.SOURCE_STATE_REPLAYING,
                "3 batches wait for peers",
            )
            assert await new.client.overlaps(prompt(3)) == {}
            go.set()
            await new.client.until_applied(5)
            await old.client.until_applied(5)
            assert await state(new) == await state(old)
            assert (await new.client.status()).state == LIVE


async def test_an_engine_with_a_replay_fills_what_a_peer_lags_behind() -> None:
    async with recorded_engine() as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        batches = chain(6)
        await engine.publish(*batches[:3])
        await old.client.until_applied(2)
        source = next(iter(old.indexer._sources.values()))
        source.feed.close()
        engine.lose(*batches[3:])
        asked_before = len(engine.replays_asked)
        async with member(old.address) as new:
            read(new.indexer, engine)
            status = await new.client.until_applied(5)
            assert (status.states, status.applied, status.state) == (1, 3, LIVE)
            # From the peer's last batch on, which is compared.
            assert set(engine.replays_asked[asked_before:]) == {2}
            assert await new.client.overlap(prompt(6)) == 6


async def test_a_peers_state_of_an_engines_former_life_is_found_out() -> None:
    async with recorded_engine() as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await old.client.until_applied(2)
        next(iter(old.indexer._sources.values())).feed.close()
        engine.forget()
        engine.lose(*(batch(stored([number], prompt(1, first=100 * number))) for number in range(1, 6)))
        async with member(old.address) as new:
            read(new.indexer, engine)
            status = await new.client.until(lambda s: s.last_event_id == 4 and s.state == LIVE)
            assert (status.resets, status.blocks) == (1, 5)
            assert await new.client.overlap(prompt(3)) == 0


async def test_a_worker_that_is_registered_late_is_requested_from_peers_then() -> None:
    async with recorded_engine(has_replay=False) as engine, member() as old, member(old.address) as new:
        await new.indexer.warm()
        assert old.dumps == 0
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await old.client.until_applied(2)
        # Its pool was not known here until now.
        read(new.indexer, engine)
        await new.client.until(lambda s: s.states == 1)
        assert await state(new) == await state(old)


async def test_the_first_peer_with_a_complete_history_wins() -> None:
    async with recorded_engine(has_replay=False) as engine, member() as lacking, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await old.client.until_applied(2)
        engine.forget_subscribers()
        read(lacking.indexer, engine)
        await engine.subscribed()
        await engine.publish(chain(4)[3])
        await lacking.client.until(lambda s: s.state == INCOMPLETE)
        await old.client.until_applied(3)
        async with member(NOBODY, lacking.address, old.address) as new:
            read(new.indexer, engine)
            await new.client.until(lambda s: s.states == 1 and s.state == LIVE)
            assert await state(new) == await state(old)
        async with member(lacking.address) as new:
            read(new.indexer, engine)
            # Better than nothing where the engine cannot be asked, and it says what it is.
            await new.client.until(lambda s: s.states == 1 and s.state == INCOMPLETE)


@pytest.mark.parametrize("breaks_after", [0, 1], ids=["before the first chunk", "half-way"])
async def test_a_peer_that_dies_half_way_leaves_nothing_half_loaded(
    monkeypatch: pytest.MonkeyPatch, breaks_after: int
) -> None:
    # Of both twins.
    monkeypatch.setattr("kvscout_blocks.index.native.MAX_CHUNK_BYTES", 8192)
    monkeypatch.setitem(cast(dict[str, Any], encode_dump.__kwdefaults__), "max_chunk_bytes", 8192)
    async with recorded_engine() as engine, member(breaks_after=breaks_after) as old:
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(600))
        await old.client.until_applied(599)
        async with member(old.address) as new:
            read(new.indexer, engine)
            # As without peers: from the engine's own replay.
            status = await new.client.until_applied(599)
            assert (status.states, status.applied, status.state) == (0, 600, LIVE)
            assert old.dumps == 1
            assert "the peer dies" in new.indexer.warnings()[0]


async def test_without_any_peer_it_begins_as_ever_and_says_so() -> None:
    async with recorded_engine() as engine, member(NOBODY) as new:
        engine.lose(*chain(3))
        read(new.indexer, engine)
        status = await new.client.until_applied(2)
        assert (status.states, status.state) == (0, LIVE)
        answer = await new.client.rpc("GetStatus", types_pb2.GetStatusRequest())
        assert any("no peer can be reached" in warning for warning in answer.service.warnings)
        assert new.indexer.peers.not_found == 1


async def test_two_that_start_at_once_and_ask_one_another_know_nothing_and_go_on() -> None:
    async with recorded_engine() as engine, member() as first, member(first.address) as second:
        first.indexer.peers = peers.Peers([second.address])
        engine.lose(*chain(3))
        read(first.indexer, engine)
        read(second.indexer, engine)
        for one in (first, second):
            assert (await one.client.until_applied(2)).state == LIVE
        assert await state(first) == await state(second)


async def test_an_engine_that_restarts_while_peers_are_asked_makes_their_answer_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with recorded_engine(has_replay=False) as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await old.client.until_applied(2)
        asked, go = asyncio.Event(), asyncio.Event()
        dump = peers.Peer.dump

        async def held(*arguments: Any) -> Any:
            found = await dump(*arguments)
            asked.set()
            await go.wait()
            return found

        monkeypatch.setattr(peers.Peer, "dump", held)
        async with member(old.address) as new:
            read(new.indexer, engine)
            await asked.wait()
            await engine.publish(chain(4)[3])
            await new.client.until(lambda s: s.lag_batches == 1)
            engine.forget()
            await engine.publish(batch(CLEARED, stored([70], prompt(1, first=700))))
            await new.client.until(lambda s: s.resets == 1)
            go.set()
            status = await new.client.until_applied(0)
            assert (status.states, status.blocks, status.state) == (0, 1, LIVE)


async def test_over_nats_core_a_peer_knows_what_an_absent_publisher_does_not_tell() -> None:
    async with nats_server() as server, core_publisher(server.url, ScriptedPublisher()) as core:
        async with served_indexer(nats_config(server.url)) as (client, indexer, stub):
            follow(indexer, Transport.NATS_CORE)
            await core.publish(*chain(4))
            await client.until_applied(3)
            await core.recovery.close()
            port = grpc.aio.server()
            IndexerServicer(indexer, None).add_to(port)
            address = f"127.0.0.1:{port.add_insecure_port('127.0.0.1:0')}"
            await port.start()
            try:
                async with served_indexer(nats_config(server.url, peers=(address,))) as (late, other, late_stub):
                    follow(other, Transport.NATS_CORE)
                    await late.until(lambda s: s.states == 1)
                    assert await dumped(late_stub) == await dumped(stub)
            finally:
                await port.stop(None)


async def test_health_says_serving_only_after_peers_were_asked(tmp_path: Any) -> None:
    async with recorded_engine(has_replay=False) as engine, member() as old:
        read(old.indexer, engine)
        await engine.subscribed()
        await engine.publish(*chain(3))
        await old.client.until_applied(2)
        file = tmp_path / "workers.yaml"
        file.write_text(
            "workers:\n  - {worker_id: w, model: tiny, block_size: 4,"
            f" event_endpoints: [{{dp_rank: 0, endpoint: '{engine.endpoint}'}}]}}\n"
        )
        flags = ("--workers-file", str(file), "--peers", old.address)
        async with indexer_process(*flags) as (client, running), grpc.aio.insecure_channel(running.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def serving() -> bool:
                answer = await health.Check(health_pb2.HealthCheckRequest())
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            await eventually(serving, what="SERVING")
            assert await client.overlap(prompt(3)) == 3
            assert (await client.status()).states == 1
