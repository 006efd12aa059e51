"""What indexers are told of routing decisions: bounded, together, never in the way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.processes import eventually

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_common import errors
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.rpc.service_info import TenantWarning, shown
from kvscout_common.shards import shard_of
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.indexer import reporter
from kvscout_gateway.upstreams.indexer.link import IndexerLink
from kvscout_gateway.upstreams.indexer.remote import RemoteIndexer
from kvscout_gateway.upstreams.indexer.reporter import (
    BATCH_DECISIONS,
    MAX_AGE_SECONDS,
    DecisionQueue,
    ReplicaReports,
)
from kvscout_gateway.values.cache_reports import CacheReports
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry

POOL = Geometry(16, eagle=False)


def decision(number: int = 0, *, worker: str = "w0", blocks: int = 2, model: str = "m") -> Decision:
    return Decision("default", model, WorkerRank(worker, 0), POOL, number.to_bytes(8, "little") * blocks)


def taken(queue: DecisionQueue, now: float = 0.0) -> list[int]:
    return [int.from_bytes(entry.block_hashes[:8], "little") for _, entry in queue.take(now)]


def test_a_queue_drops_the_oldest_and_counts_them() -> None:
    queue = DecisionQueue(max_decisions=3, max_blocks=1_000)
    for number in range(5):
        queue.put(decision(number), now=0.0)
    assert (queue.lost, len(queue)) == (2, 3)
    assert taken(queue) == [2, 3, 4]


def test_a_queue_is_bounded_by_blocks_but_takes_one_prompt_of_any_length() -> None:
    queue = DecisionQueue(max_decisions=100, max_blocks=10)
    queue.put(decision(1, blocks=6), now=0.0)
    queue.put(decision(2, blocks=6), now=0.0)
    assert (queue.lost, taken(queue)) == (1, [2])
    queue.put(decision(3, blocks=50), now=0.0)
    assert (queue.lost, taken(queue)) == (1, [3])


def test_a_message_is_bounded_and_the_rest_waits() -> None:
    queue = DecisionQueue()
    for number in range(BATCH_DECISIONS + 1):
        queue.put(decision(number), now=0.0)
    assert len(taken(queue)) == BATCH_DECISIONS
    assert taken(queue) == [BATCH_DECISIONS]
    queue.put(decision(1, blocks=reporter.BATCH_BLOCKS), now=0.0)
    queue.put(decision(2), now=0.0)
    assert [taken(queue), taken(queue)] == [[1], [2]]


def test_what_grew_old_or_was_withdrawn_is_not_told() -> None:
    queue = DecisionQueue()
    withdrawn = decision(2)
    for now, one in ((0.0, decision(1)), (5.0, withdrawn), (5.0, decision(3))):
        queue.put(one, now)
    withdrawn.withdrawn = True
    assert taken(queue, now=1.0 + MAX_AGE_SECONDS) == [3]
    assert queue.lost == 1


def test_what_could_not_be_delivered_goes_back_in_order_as_far_as_there_is_room() -> None:
    queue = DecisionQueue(max_decisions=3)
    for number in range(3):
        queue.put(decision(number), now=0.0)
    batch = queue.take(0.0)
    queue.put(decision(7), now=0.0)
    queue.restore(batch)
    assert (taken(queue), queue.lost) == ([1, 2, 7], 1)


class Recording(indexer_pb2_grpc.IndexerServicer):
    """Takes decisions as it is told to."""

    def __init__(self) -> None:
        self.messages: list[indexer_pb2.RecordRoutingRequest] = []
        self.error: Exception | None = None
        self.refused_models: set[str] = set()
        self.not_recorded: list[int] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def RecordRouting(
        self, request: indexer_pb2.RecordRoutingRequest, context: Any
    ) -> indexer_pb2.RecordRoutingResponse:
        self.messages.append(request)
        await self.goes_on.wait()
        if request.model in self.refused_models:
            raise errors.FailedPrecondition("other blocks")
        if self.error is not None:
            raise self.error
        return indexer_pb2.RecordRoutingResponse(not_recorded=self.not_recorded)

    @property
    def told(self) -> list[int]:
        """First hashes of all prompts."""
        return [prompt.block_hashes[0] for message in self.messages for prompt in message.prompts]


class Told:
    """The indexers of this process, and what is reported to them."""

    def __init__(self, shards: int) -> None:
        self.now = 100.0
        self.servicers: list[Recording] = []
        self.suspected: list[str] = []
        self.indexer = RemoteIndexer(
            [[] for _ in range(shards)],
            PLAINTEXT,
            timeout_seconds=1.0,
            served=lambda key: (),
            reports=lambda tenant, worker_id: True,
            caches=CacheReports(),
            resync=lambda member: self.suspected.append(member.address),
            clock=lambda: self.now,
        )

    @property
    def replicas(self) -> list[ReplicaReports]:
        return list(self.indexer.reports.values())

    async def until_told(self, servicer: Recording, *numbers: int) -> None:
        await eventually(lambda: servicer.told == list(numbers), what=f"{numbers} told, {servicer.told} are")


@asynccontextmanager
async def telling(shards: int = 1, replicas: int = 1) -> AsyncIterator[Told]:
    """Runs a reporter."""
    told = Told(shards)
    tasks = []
    async with AsyncExitStack() as stack:
        for shard in told.indexer.shards:
            for _ in range(replicas):
                servicer = Recording()  # type: ignore[abstract]  # the rest answers UNIMPLEMENTED

                def add(server: grpc.aio.Server, servicer: Recording = servicer) -> None:
                    indexer_pb2_grpc.add_IndexerServicer_to_server(servicer, server)

                channel = await stack.enter_async_context(serving(add))
                member = Member("indexer", f"{len(told.servicers)}", channel, IndexerLink(channel))
                shard.members.append(member)
                told.servicers.append(servicer)
                works = told.indexer.join(member)
                tasks.append(asyncio.create_task(works[f"report to {member.name}"]()))
        try:
            yield told
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_every_replica_of_the_shard_that_has_the_worker_is_told_and_no_other() -> None:
    async with telling(shards=2, replicas=2) as told:
        for number in range(8):
            told.indexer.routed(decision(number, worker=f"w{number}"))
        for shard in range(2):
            numbers = [n for n in range(8) if shard_of("default", f"w{n}", 2) == shard]
            assert numbers
            for servicer in told.servicers[2 * shard : 2 * shard + 2]:
                await told.until_told(servicer, *numbers)
        await eventually(lambda: sum(replica.delivered for replica in told.replicas) == 16)
        prompt = told.servicers[0].messages[0].prompts[0]
        assert (prompt.block_size, prompt.HasField("eagle"), list(prompt.block_hashes)) == (16, True, [0, 0])


async def test_what_comes_while_a_message_is_under_way_goes_together_one_message_a_model() -> None:
    async with telling() as told:
        [servicer] = told.servicers
        servicer.goes_on.clear()
        told.indexer.routed(decision(0))
        await told.until_told(servicer, 0)
        for number in range(1, 100):
            told.indexer.routed(decision(number, model="ab"[number % 2]))
        servicer.goes_on.set()
        await eventually(lambda: told.replicas[0].delivered == 100)
        assert sorted(servicer.told) == list(range(100))
        assert sorted(message.model for message in servicer.messages) == ["a", "b", "m"]


async def test_a_prompt_without_a_complete_block_is_not_worth_a_message() -> None:
    async with telling() as told:
        told.indexer.routed(decision(0, blocks=0))
        told.indexer.routed(decision(1))
        await told.until_told(told.servicers[0], 1)


async def test_one_that_lags_loses_the_oldest_and_hears_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "CALL_SECONDS", 0.05)
    monkeypatch.setattr(reporter, "RETRY_SECONDS", 0.01)
    async with telling() as told:
        [servicer], [replica] = told.servicers, told.replicas
        replica.queue.max_decisions = 10
        servicer.goes_on.clear()
        for number in range(50):
            told.indexer.routed(decision(number))

        async def noticed() -> bool:  # between two tries: during one, what is tried is in no queue
            return bool(replica.problem) and (len(replica.queue), replica.lost) == (10, 40)

        await eventually(noticed)
        servicer.messages.clear()
        servicer.goes_on.set()
        await eventually(lambda: replica.delivered == 10)
        assert servicer.told[-10:] == list(range(40, 50))
        assert (replica.lost, replica.problem, len(replica.queue)) == (40, "", 0)


@pytest.mark.parametrize(
    "error", [errors.FailedPrecondition("predictions are off"), errors.Unimplemented("an older release")]
)
async def test_one_that_predicts_nothing_is_left_alone_and_asked_again_later(error: Exception) -> None:
    async with telling() as told:
        [servicer], [replica] = told.servicers, told.replicas
        servicer.error = error
        told.indexer.routed(decision(0))
        await eventually(lambda: bool(replica.problems()))
        assert str(error) in shown(replica.problems())[0]
        for number in range(1, 20):
            told.indexer.routed(decision(number))
        assert (len(replica.queue), replica.lost) == (0, 0)
        servicer.error = None
        told.now += reporter.REFUSAL_SECONDS
        told.indexer.routed(decision(20))
        await told.until_told(servicer, 0, 20)
        await eventually(lambda: not replica.problems() and replica.delivered == 1)


async def test_one_that_takes_nothing_of_one_model_is_told_of_the_others() -> None:
    async with telling() as told:
        [servicer], [replica] = told.servicers, told.replicas
        servicer.refused_models = {"bad"}
        told.indexer.routed(decision(0, model="bad"))
        await eventually(lambda: bool(replica.problems()))
        for number in range(1, 5):
            told.indexer.routed(decision(number, model=("good", "bad")[number % 2]))
        await told.until_told(servicer, 0, 2, 4)
        assert replica.problems() == [TenantWarning("default", "bad: other blocks")]
        told.now += reporter.REFUSAL_SECONDS
        servicer.refused_models = set()
        told.indexer.routed(decision(5, model="bad"))
        await told.until_told(servicer, 0, 2, 4, 5)
        await eventually(lambda: not replica.problems())


async def test_one_that_does_not_know_the_worker_is_suspected_and_nothing_else_is_lost() -> None:
    async with telling() as told:
        [servicer], [replica] = told.servicers, told.replicas
        servicer.error = errors.NotFound("no worker")
        told.indexer.routed(decision(0))

        async def lost() -> int:
            return replica.lost

        await eventually(lost)
        servicer.error, servicer.not_recorded = None, [1]
        servicer.goes_on.clear()
        for number in (1, 2, 3):
            told.indexer.routed(decision(number))
        servicer.goes_on.set()
        await told.until_told(servicer, 0, 1, 2, 3)
        await eventually(lambda: (replica.lost, replica.delivered) == (2, 2))
        assert told.suspected == ["0", "0"]
        assert not replica.problem
