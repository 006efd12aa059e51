"""Events over NATS core: a real server, publishers with and without a local index, a channel that loses and repeats."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from support.engine_events import CLEARED, batch, chain, prompt, removed, stored
from support.indexer_client import MODEL, IndexerClient
from support.nats_server import NatsServer, nats_server
from support.processes import eventually
from support.scripted_publisher import (
    NAMES,
    CorePublisher,
    FaultyChannel,
    Life,
    ScriptedPublisher,
    bridge_at,
    core_publisher,
    dumped,
    follow,
    forget,
    nats_config,
    served_indexer,
)
from support.seeds import test_seed

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc, indexer_pb2, indexer_pb2_grpc, workers_pb2
from kvscout_blocks.source.sequence import OUTDATED_AFTER
from kvscout_common.errors import FailedPrecondition
from kvscout_common.shards import Shard, shard_of
from kvscout_common.worker import DEFAULT_TENANT, Transport, WorkerRank
from kvscout_indexer.feeds import nats_core
from kvscout_indexer.indexer import Indexer

SEED = test_seed()
CORE = workers_pb2.EVENT_TRANSPORT_NATS_CORE
LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as started:
        yield started


class Stack:
    """An indexer that follows one worker over NATS core."""

    def __init__(self, client: IndexerClient, indexer: Indexer, stub: indexer_pb2_grpc.IndexerStub) -> None:
        self.client = client
        self.indexer = indexer
        self.stub = stub

    async def same_as(self, publisher: ScriptedPublisher) -> None:
        """Waits until the indexer has all that was published, and compares."""
        await self.client.until(
            lambda s: s.epoch == publisher.epoch and s.last_event_id == publisher.last_id and s.state == LIVE
        )
        assert await dumped(self.stub) == publisher.truth()


@pytest.fixture(params=[1, 2], ids=["whole", "shard"])
async def stack(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[Stack]:
    shard = Shard(shard_of(DEFAULT_TENANT, "w", request.param), request.param)
    async with served_indexer(nats_config(server.url, shard=shard)) as (client, indexer, stub):
        follow(indexer, Transport.NATS_CORE)
        yield Stack(client, indexer, stub)


@pytest.fixture
async def core(server: NatsServer) -> AsyncIterator[CorePublisher]:
    async with core_publisher(server.url, ScriptedPublisher()) as started:
        yield started


async def subscribed(client: IndexerClient) -> None:
    """What is published from now on is received."""
    await client.until(lambda s: s.replays >= 1)


async def settled(client: IndexerClient) -> None:
    """The first recovery has ended."""
    await client.until(lambda s: s.replays >= 1 and s.state in (LIVE, indexer_pb2.SOURCE_STATE_WAITING))


async def test_batches_are_applied_in_order_and_a_duplicate_once(core: CorePublisher, stack: Stack) -> None:
    await settled(stack.client)
    await core.publish(*chain(4))
    again = core.publisher.make(batch(removed([4])))
    await core.client.publish(core.subject, again)
    await core.client.publish(core.subject, again)
    status = await stack.client.until(lambda s: s.dropped == 1)
    assert (status.applied, status.epoch, status.state, status.transport) == (5, 1, LIVE, CORE)
    assert await stack.client.overlap(prompt(4)) == 3
    await stack.same_as(core.publisher)


async def test_a_worker_that_is_discovered_late_is_recovered_in_full_and_a_removed_ones_blocks_go(
    core: CorePublisher, stack: Stack
) -> None:
    await core.publish(*chain(5))
    await core.client.flush()
    forget(stack.indexer)
    assert await stack.client.overlaps(prompt(5)) == {}
    follow(stack.indexer, Transport.NATS_CORE)
    await stack.same_as(core.publisher)
    status = await stack.client.status()
    # One state, no batch: what was published came before the registration.
    assert (status.states, status.applied) == (1, 0)


async def test_a_gap_within_the_ring_is_filled_with_exactly_the_events_that_are_missing(
    core: CorePublisher, stack: Stack
) -> None:
    await settled(stack.client)
    batches = chain(9)
    await core.publish(*batches[:6])
    await stack.client.until_applied(5)
    core.lose(*batches[6:8])
    await core.publish(batches[8])
    await stack.same_as(core.publisher)
    status = await stack.client.status()
    assert (status.applied, status.gaps, status.states) == (9, 1, 1)


async def test_a_gap_older_than_the_ring_is_filled_by_the_state_and_its_cursor_is_gone_on_from(
    server: NatsServer, stack: Stack
) -> None:
    async with core_publisher(server.url, ScriptedPublisher(ring=3)) as core:
        await core.publish(*chain(2))
        await stack.client.until_applied(1)
        core.lose(*chain(20)[2:19])
        await core.publish(chain(20)[19])
        await stack.same_as(core.publisher)
        replays = (await stack.client.status()).replays
        await core.publish(batch(removed([20])))
        await stack.same_as(core.publisher)
        # No endless loop: the batch after the state continued it.
        assert (await stack.client.status()).replays == replays


async def test_a_restart_that_was_missed_is_found_by_asking_for_what_the_publisher_no_longer_has(
    core: CorePublisher, stack: Stack
) -> None:
    await core.publish(*chain(5))
    await stack.client.until_applied(4)
    core.publisher.restart()
    core.lose(batch(stored([77], prompt(1, first=900))))
    # Nothing comes live; a reconnect alone must do.
    next(iter(stack.indexer.nats_core._feeds.values())).on_reconnect()  # type: ignore[union-attr]
    await stack.same_as(core.publisher)
    assert await stack.client.overlap(prompt(5)) == 0
    assert await stack.client.overlap(prompt(1, first=900)) == 1


async def test_a_state_that_comes_live_replaces_what_was_known(core: CorePublisher, stack: Stack) -> None:
    await core.publish(*chain(3))
    await stack.client.until_applied(2)
    core.lose(batch(removed([3])), batch(stored([50], prompt(1, first=500))))
    for chunk in (await core.publisher.local.state()).messages:
        await core.client.publish(core.subject, chunk)
    await stack.same_as(core.publisher)
    await core.publish(batch(removed([50])))
    await stack.same_as(core.publisher)
    assert (await stack.client.status()).gaps == 0


async def test_cleared_during_a_recovery_wins(core: CorePublisher, stack: Stack) -> None:
    await settled(stack.client)
    await core.publish(*chain(2))
    await stack.client.until_applied(1)
    await core.recovery.close()
    core.lose(*chain(4)[2:])
    await core.publish(batch(removed([1])))
    await stack.client.until(lambda s: s.lag_batches == 1)
    await core.publish(batch(CLEARED, stored([90], prompt(1, first=700))))
    await stack.same_as(core.publisher)
    assert (await stack.client.status()).blocks == 1


async def test_without_an_answer_held_blocks_become_predictions_and_the_worker_heals_when_its_publisher_answers(
    server: NatsServer, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_blocks.source.replay.MAX_ATTEMPTS", 2)
    monkeypatch.setattr("kvscout_blocks.source.replay.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kvscout_indexer.feeds.healing.HEAL_SECONDS", 0.05)
    async with core_publisher(server.url, ScriptedPublisher(), recovers=False) as core:
        await subscribed(stack.client)
        await core.publish(*chain(3))
        status = await stack.client.until(lambda s: s.last_event_id == 2 and not s.lag_batches)
        core.lose(batch(removed([3])))
        await core.publish(batch(stored([9], prompt(1, first=300))))
        status = await stack.client.until(lambda s: s.state == INCOMPLETE)
        assert status.demotions == 1
        assert status.reason.startswith("events are missing: 3..3")
        found = await stack.client.matches(prompt(3))
        assert (list(found.overlaps.device_blocks), list(found.overlaps.predicted_blocks)) == ([0], [3])
        await core.serve()
        await stack.same_as(core.publisher)
        assert (await stack.client.status()).demotions == 1


async def test_a_publisher_that_sends_events_and_never_answers_counts_as_one_without_history(
    server: NatsServer, stack: Stack
) -> None:
    async with core_publisher(server.url, ScriptedPublisher(), recovers=False) as core:
        batches = iter(chain(1000))
        core.lose(next(batches))

        async def publish() -> bool:
            await core.publish(next(batches))
            return (await stack.client.status()).state == INCOMPLETE

        await eventually(publish, what="the publisher to be taken for one without history")
        status = await stack.client.until(lambda s: s.last_event_id == core.publisher.last_id)
        # Far fewer than the eight tries that a publisher which is away gets.
        assert status.replays < 6


class BridgeRpc(bridge_pb2_grpc.BridgeServicer):
    """A bridge that answers by rpc only."""

    def __init__(self, publisher: ScriptedPublisher, *, keeps: bool) -> None:
        self.publisher = publisher
        self.keeps = keeps
        self.asked: list[bridge_pb2.RecoverRequest] = []

    async def Recover(
        self, request: bridge_pb2.RecoverRequest, context: object
    ) -> AsyncIterator[bridge_pb2.RecoverResponse]:
        self.asked.append(request)
        if not self.keeps:
            raise FailedPrecondition("runs without a local index")
        for part in await self.publisher.local.answer(request):
            yield part


@pytest.mark.parametrize("keeps", [True, False], ids=["with a local index", "without"])
async def test_where_nats_brings_no_answer_the_bridges_rpc_is_asked(server: NatsServer, *, keeps: bool) -> None:
    async with core_publisher(server.url, ScriptedPublisher(), recovers=False) as core:
        bridge = BridgeRpc(core.publisher, keeps=keeps)  # type: ignore[abstract]  # the rest is not called
        async with (
            bridge_at(bridge) as address,
            served_indexer(nats_config(server.url)) as (client, indexer, stub),
        ):
            core.lose(*chain(3))
            follow(indexer, Transport.NATS_CORE, bridge_endpoint=address)
            await settled(client)
            core.lose(batch(removed([3])))
            await core.publish(batch(stored([9], prompt(1, first=300))))
            status = await client.until(lambda s: s.last_event_id == 4 and s.state in (LIVE, INCOMPLETE))
            assert status.state == (LIVE if keeps else INCOMPLETE)
            assert bridge.asked
            if keeps:
                assert await dumped(stub) == core.publisher.truth()
            else:
                # Told at once that there is none: nothing is tried again.
                assert len(bridge.asked) <= 3


async def test_five_percent_lost_and_repeated_messages_restarts_and_reconnects_end_in_the_publishers_truth(
    server: NatsServer, stack: Stack
) -> None:
    rng = random.Random(SEED)
    channel = FaultyChannel(rng)
    async with core_publisher(server.url, ScriptedPublisher(ring=64), channel=channel) as core:
        life = Life(rng)
        for _ in range(600):
            await core.publish(life.payload())
            if rng.random() < 0.01:
                await core.client.flush()
            if rng.random() < 0.004:
                core.publisher.restart()
                life = Life(rng)
        assert channel.lost > 5
        channel.loss = 0.0
        await core.publish(life.payload())
        await stack.same_as(core.publisher)


async def test_nats_killed_and_restarted_costs_nothing_but_the_time(
    server: NatsServer, core: CorePublisher, stack: Stack
) -> None:
    rng = random.Random(SEED)
    life = Life(rng)
    await core.publish(*(life.payload() for _ in range(20)))
    await stack.same_as(core.publisher)
    await server.kill()
    status = await stack.client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_DISCONNECTED)
    assert "NATS" in status.reason
    core.lose(*(life.payload() for _ in range(20)))
    await server.start()
    await stack.same_as(core.publisher)
    await core.publish(life.payload())
    await stack.same_as(core.publisher)


async def test_an_indexer_that_starts_before_nats_recovers_once_it_is_there(server: NatsServer) -> None:
    await server.kill()
    async with served_indexer(nats_config(server.url)) as (client, indexer, stub):
        follow(indexer, Transport.NATS_CORE)
        status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_DISCONNECTED)
        assert indexer.warnings()
        await server.start()
        async with core_publisher(server.url, ScriptedPublisher()) as core:
            await core.publish(*chain(3))
            await Stack(client, indexer, stub).same_as(core.publisher)
        status = await client.status()
        assert status.demotions == 0


async def test_a_slow_consumer_is_counted_and_asks_for_what_was_dropped(
    server: NatsServer, core: CorePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_core, "PENDING_MESSAGES", 8)
    async with served_indexer(nats_config(server.url)) as (client, indexer, stub):
        follow(indexer, Transport.NATS_CORE)
        await settled(client)
        life = Life(random.Random(SEED))
        assert indexer.nats_core is not None
        while not indexer.nats_core.dropped_messages:
            # One write, most of which the client reads in one go, as a rule: more than its queue takes.
            for _ in range(300):
                await core.publish(life.payload())
            await core.client.flush()
        await Stack(client, indexer, stub).same_as(core.publisher)


async def test_sources_that_nobody_registered_are_counted_and_not_indexed(core: CorePublisher, stack: Stack) -> None:
    await settled(stack.client)
    stranger = ScriptedPublisher("stranger")
    await core.client.publish(NAMES.core_events("default", MODEL, stranger.rank), stranger.make(chain(1)[0]))
    await core.publish(*chain(1))
    await stack.same_as(core.publisher)
    assert stack.indexer.nats_core is not None
    # They do not even come to a shard of several.
    assert stack.indexer.nats_core.unknown_messages == (stack.indexer.shard.count == 1)
    assert set(await stack.client.overlaps(prompt(1))) == {("w", 0)}


async def test_poison_quarantines_its_worker_and_no_other(server: NatsServer, stack: Stack) -> None:
    follow(stack.indexer, Transport.NATS_CORE, worker_id="healthy")
    async with core_publisher(server.url, ScriptedPublisher("healthy")) as healthy:
        await subscribed(stack.client)
        subject = NAMES.core_events("default", MODEL, WorkerRank("w", 0))
        for number in range(120):
            await healthy.client.publish(subject, b"\xff" * (1 + number % 7))
        await healthy.publish(*chain(2))
        status = await stack.client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_QUARANTINED)
        assert status.malformed >= 100
        assert (await stack.client.until_applied(1, "healthy")).state == LIVE


async def test_a_publisher_whose_clock_went_back_is_shown_and_a_reset_begins_anew_with_it(
    server: NatsServer, stack: Stack
) -> None:
    async with core_publisher(server.url, ScriptedPublisher(epoch=9)) as before:
        await settled(stack.client)
        await before.publish(*chain(3))
        await stack.client.until_applied(2)
    async with core_publisher(server.url, ScriptedPublisher(epoch=5)) as core:
        await core.publish(*chain(2 * OUTDATED_AFTER))
        status = await stack.client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED)
        assert "clock" in status.reason
        assert (status.epoch, status.last_event_id) == (9, 2)
        await stack.client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w"))
        await core.publish(batch(CLEARED), *chain(2))
        await stack.same_as(core.publisher)


async def test_without_nats_a_worker_of_nats_is_shown_as_misconfigured() -> None:
    async with served_indexer() as (client, indexer, _):
        follow(indexer, Transport.NATS_CORE)
        status = await client.status()
        assert (status.state, status.reason) == (
            indexer_pb2.SOURCE_STATE_MISCONFIGURED,
            "transport nats-core needs --nats-server",
        )


async def test_a_publisher_with_another_block_size_is_shown_and_not_indexed(server: NatsServer, stack: Stack) -> None:
    async with core_publisher(server.url, ScriptedPublisher(block_size=8), recovers=False) as core:
        await subscribed(stack.client)
        await core.publish(batch(stored([1], prompt(2), block_size=8)))
        status = await stack.client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_MISCONFIGURED)
        assert "8 tokens" in status.reason
        assert "4 tokens" in status.reason
        assert status.blocks == 0


async def test_a_shard_receives_the_events_of_its_own_workers_alone(server: NatsServer) -> None:
    received: dict[int, list[int]] = {}
    for workers in (4, 40):
        names = [f"w{number}" for number in range(workers)]
        async with AsyncExitStack() as entered:
            started = [
                await entered.enter_async_context(served_indexer(nats_config(server.url, shard=Shard(index, 2))))
                for index in range(2)
            ]
            publishers = [
                await entered.enter_async_context(core_publisher(server.url, ScriptedPublisher(name))) for name in names
            ]
            for name in names:
                for _, indexer, _ in started:
                    follow(indexer, Transport.NATS_CORE, worker_id=name)
                owner, _, _ = started[shard_of(DEFAULT_TENANT, name, 2)]
                await owner.until(lambda s: s.replays >= 1 and s.state == indexer_pb2.SOURCE_STATE_WAITING, name)
            for publisher in publishers:
                await publisher.publish(*chain(3))
            for name in names:
                owner, _, _ = started[shard_of(DEFAULT_TENANT, name, 2)]
                await owner.until(lambda s: s.applied == 3, name)
            cores = [indexer.nats_core for _, indexer, _ in started]
            assert all(core is not None and core.unknown_messages == 0 for core in cores)
            received[workers] = [core._received for core in cores if core is not None]
    for workers, counts in received.items():
        owned = [sum(shard_of(DEFAULT_TENANT, f"w{n}", 2) == index for n in range(workers)) for index in range(2)]
        assert counts == [3 * count for count in owned]


async def test_a_rank_that_a_shard_has_no_more_is_not_received_any_more(server: NatsServer) -> None:
    shard = Shard(shard_of(DEFAULT_TENANT, "w", 2), 2)
    async with (
        served_indexer(nats_config(server.url, shard=shard)) as (client, indexer, _),
        core_publisher(server.url, ScriptedPublisher()) as core,
    ):
        follow(indexer, Transport.NATS_CORE)
        await settled(client)
        await core.publish(*chain(3))
        await client.until(lambda s: s.applied == 3)
        forget(indexer)
        transport = indexer.nats_core
        assert transport is not None
        await eventually(lambda: not transport._tasks)
        await core.publish(batch(removed([3])))
        await core.client.flush()
        await transport.link.client.flush()
        assert (transport._received, transport.unknown_messages) == (3, 0)
