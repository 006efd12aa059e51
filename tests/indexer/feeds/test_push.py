"""PublishEvents: real streams from publishers that lose, repeat, come back and fight over a source."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.engine_events import batch, chain, prompt, removed, stored
from support.grpc_server import serving
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.processes import DEADLINE_SECONDS, eventually
from support.scripted_publisher import (
    FaultyChannel,
    Life,
    Pushing,
    ScriptedPublisher,
    dumped,
    follow,
    forget,
    greeting,
    served_indexer,
)
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_common.errors import (
    Draining,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
)
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.rpc.channel import to_error
from kvscout_common.worker import Transport
from kvscout_indexer.feeds import push
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer

SEED = test_seed()
LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE
DISCONNECTED = indexer_pb2.SOURCE_STATE_DISCONNECTED


class Stack:
    """An indexer whose worker is pushed."""

    def __init__(self, client: IndexerClient, indexer: Indexer, stub: indexer_pb2_grpc.IndexerStub) -> None:
        self.client = client
        self.indexer = indexer
        self.stub = stub
        self._open: list[Pushing] = []

    def push(self) -> Pushing:
        self._open.append(Pushing(self.stub))
        return self._open[-1]

    async def same_as(self, publisher: ScriptedPublisher) -> None:
        await self.client.until(
            lambda s: (
                s.epoch == publisher.epoch and s.last_event_id == publisher.last_id and s.state in (LIVE, DISCONNECTED)
            )
        )
        assert await dumped(self.stub) == publisher.truth()

    async def close(self) -> None:
        for pushing in self._open:
            await pushing.close()


@asynccontextmanager
async def pushed() -> AsyncIterator[Stack]:
    async with served_indexer() as (client, indexer, stub):
        follow(indexer, Transport.GRPC)
        stack = Stack(client, indexer, stub)
        try:
            yield stack
        finally:
            await stack.close()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with pushed() as made:
        yield made


@pytest.fixture
def publisher() -> ScriptedPublisher:
    return ScriptedPublisher()


async def test_batches_are_applied_and_answered_with_the_last_one(stack: Stack, publisher: ScriptedPublisher) -> None:
    assert (await stack.client.status()).state == DISCONNECTED
    stream = stack.push()
    await stream.send(*map(publisher.make, chain(4)))
    answer = await stream.answer(lambda a: a.last_event_id == 3)
    assert (answer.epoch, answer.HasField("resend_from"), answer.malformed) == (1, False, 0)
    assert await stack.client.overlap(prompt(4)) == 4
    await stack.same_as(publisher)
    assert await stream.finish() is None
    status = await stack.client.until(lambda s: s.state == DISCONNECTED)
    assert status.reason == "no publisher is connected"


async def test_answers_are_coalesced(stack: Stack, publisher: ScriptedPublisher) -> None:
    stream = stack.push()
    life = Life(random.Random(SEED))
    await stream.send(*(publisher.make(life.payload()) for _ in range(500)))
    await stream.finish()
    assert stream.answers[-1].last_event_id == 499
    # The first, one in fifty, those that 20 ms made due, and the last.
    assert len(stream.answers) < 100


async def test_a_greeting_is_answered_with_where_to_go_on(stack: Stack, publisher: ScriptedPublisher) -> None:
    first = stack.push()
    await first.send(greeting(publisher))
    answer = await first.answer(lambda a: True)
    assert not answer.HasField("last_event_id")
    assert not answer.HasField("resend_from")
    await first.send(*map(publisher.make, chain(3)))
    await first.finish()
    missed = publisher.make(batch(removed([3])))
    second = stack.push()
    await second.send(greeting(publisher))
    answer = await second.answer(lambda a: True)
    assert (answer.last_event_id, answer.epoch, answer.HasField("resend_from")) == (2, 1, False)
    await second.send(missed)
    await second.answer(lambda a: a.last_event_id == 3)
    await stack.same_as(publisher)
    assert (await stack.client.status()).replays == 0


async def test_a_gap_is_requested_once_and_what_comes_meanwhile_waits(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    stream = stack.push()
    messages = [publisher.make(payload) for payload in chain(9)]
    await stream.send(*messages[:3])
    await stream.answer(lambda a: a.last_event_id == 2)
    await stream.send(messages[5], messages[6])
    answer = await stream.answer(lambda a: a.HasField("resend_from"))
    assert (answer.resend_from, answer.last_event_id) == (2, 2)
    await stream.send(messages[7])
    await stack.client.until(lambda s: s.lag_batches == 3)
    # Back to where it was asked to, and on past what came before.
    await stream.send(*messages[2:])
    await stack.same_as(publisher)
    await stream.finish()
    assert [a.resend_from for a in stream.answers if a.HasField("resend_from")] == [2]
    assert (await stack.client.status()).gaps == 1


async def test_first_contact_in_mid_stream_is_answered_from_the_state(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(5)]
    stream = stack.push()
    await stream.send(messages[4])
    assert (await stream.answer(lambda a: a.HasField("resend_from"))).resend_from == 0
    await stream.send(*(await publisher.local.state()).messages)
    await stack.same_as(publisher)
    status = await stack.client.status()
    assert (status.states, status.state) == (1, LIVE)


async def test_a_publisher_that_has_nothing_to_send_again_says_so_and_what_is_missing_is_reported(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(6)]
    stream = stack.push()
    await stream.send(*messages[:3], messages[4])
    await stream.answer(lambda a: a.HasField("resend_from"))
    await stream.send(greeting(publisher))
    status = await stack.client.until(lambda s: s.state == INCOMPLETE)
    assert status.reason == "events are missing: 3..3"
    await stream.send(messages[5])
    await stream.answer(lambda a: a.last_event_id == 5)
    assert list((await stack.client.matches(prompt(3))).overlaps.predicted_blocks) == [3]


async def test_a_publisher_that_ignores_what_it_is_asked_is_given_up(
    stack: Stack, publisher: ScriptedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "RESEND_SECONDS", 0.02)
    monkeypatch.setattr("kvscout_blocks.source.replay.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kvscout_blocks.source.replay.MAX_ATTEMPTS", 3)
    messages = [publisher.make(payload) for payload in chain(6)]
    stream = stack.push()
    await stream.send(*messages[:2], *messages[3:])
    status = await stack.client.until(lambda s: s.state == INCOMPLETE)
    assert (status.last_event_id, status.demotions) == (5, 1)
    await stream.finish()
    assert [a.resend_from for a in stream.answers if a.HasField("resend_from")] == [1]


async def test_a_source_that_is_incomplete_asks_a_publisher_that_comes_back_for_its_state(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(6)]
    first = stack.push()
    await first.send(*messages[:2], *messages[3:])
    await first.answer(lambda a: a.HasField("resend_from"))
    await first.send(greeting(publisher))
    await stack.client.until(lambda s: s.state == INCOMPLETE)
    await first.close()
    second = stack.push()
    await second.send(greeting(publisher))
    answer = await second.answer(lambda a: a.HasField("resend_from"))
    assert (answer.last_event_id, answer.resend_from) == (5, 0)
    await second.send(*(await publisher.local.state()).messages)
    await stack.client.until(lambda s: s.state == LIVE)
    await stack.same_as(publisher)


async def test_a_greeting_that_answers_an_earlier_question_ends_no_later_one(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(9)]
    stream = stack.push()
    await stream.send(*messages[:3], messages[4])
    await stream.answer(lambda a: a.HasField("resend_from"))
    await stream.send(*messages[2:5], messages[6])
    await stream.answer(lambda a: a.HasField("resend_from") and a.resend_from == 4)
    # The end of what was sent again first, told when more has been asked for already.
    await stream.send(greeting(publisher))
    await stream.asked(4, times=2)
    await stream.send(*messages[4:])
    await stack.same_as(publisher)
    assert (await stack.client.status()).demotions == 0


async def test_a_greeting_that_names_the_question_ends_that_one_at_once(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(9)]
    stream = stack.push()
    await stream.send(*messages[:3], messages[4])
    first = await stream.answer(lambda a: a.HasField("resend_from"))
    await stream.send(*messages[2:5], messages[6])
    second = await stream.answer(lambda a: a.HasField("resend_from") and a.resend_from == 4)
    assert (first.resend_id, second.resend_id) == (1, 2)
    await stream.send(greeting(publisher, resend_id=1), messages[7])
    await stack.client.until(lambda s: s.lag_batches == 2)
    await stream.send(greeting(publisher, resend_id=2))
    status = await stack.client.until(lambda s: s.state == INCOMPLETE)
    assert (status.reason, status.replays) == ("events are missing: 5..5", 2)


@pytest.mark.parametrize("reconnects", [True, False])
async def test_an_incomplete_source_is_made_whole_by_all_its_events(
    stack: Stack, publisher: ScriptedPublisher, monkeypatch: pytest.MonkeyPatch, *, reconnects: bool
) -> None:
    if not reconnects:
        monkeypatch.setattr("kvscout_indexer.feeds.healing.HEAL_SECONDS", 0.1)
    messages = [publisher.make(payload) for payload in chain(6)]
    stream = stack.push()
    await stream.send(*messages[1:])
    await stream.answer(lambda a: a.HasField("resend_from"))
    await stream.send(greeting(publisher))
    await stack.client.until(lambda s: s.state == INCOMPLETE)
    if reconnects:
        await stream.close()
        stream = stack.push()
        await stream.send(greeting(publisher))
        await stream.answer(lambda a: a.HasField("resend_from"))
    else:
        await stream.asked(0, times=2)
    # No state: who keeps none has what it sent, if that was not much.
    await stream.send(*messages)
    await stack.client.until(lambda s: s.state == LIVE)
    await stack.same_as(publisher)
    assert await stack.client.overlap(prompt(6)) == 6


async def test_duplicates_after_a_reconnect_are_dropped(stack: Stack, publisher: ScriptedPublisher) -> None:
    messages = [publisher.make(payload) for payload in chain(4)]
    first = stack.push()
    await first.send(*messages)
    await first.finish()
    second = stack.push()
    await second.send(*messages[1:], publisher.make(batch(removed([4]))))
    await second.answer(lambda a: a.last_event_id == 4)
    await stack.same_as(publisher)
    status = await stack.client.status()
    assert (status.applied, status.dropped, status.resets) == (5, 3, 0)


async def test_without_epochs_a_publisher_that_comes_back_must_show_its_last_batch(stack: Stack) -> None:
    publisher = ScriptedPublisher(epoch=0)
    messages = [publisher.make(payload) for payload in chain(4)]
    first = stack.push()
    await first.send(*messages[:3])
    await first.finish()
    # The engine restarted and has overtaken: only batch 2 tells.
    other = ScriptedPublisher(epoch=0)
    others = [other.make(batch(stored([number], prompt(1, first=100 * number)))) for number in range(1, 5)]
    second = stack.push()
    await second.send(greeting(other))
    assert (await second.answer(lambda a: a.HasField("resend_from"))).resend_from == 2
    await second.send(*others[2:])
    await second.answer(lambda a: a.HasField("resend_from") and a.resend_from == 0)
    await second.send(*others)
    await stack.same_as(other)
    assert (await stack.client.status()).resets == 1


async def test_a_stream_that_ends_amid_a_resend_is_asked_again_on_the_next_one(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(8)]
    first = stack.push()
    await first.send(*messages[:2], messages[6])
    await first.answer(lambda a: a.HasField("resend_from"))
    await first.send(messages[1], messages[2])
    await first.finish()
    second = stack.push()
    await second.send(greeting(publisher))
    answer = await second.answer(lambda a: a.HasField("resend_from"))
    assert answer.resend_from == 2
    await second.send(*messages[2:])
    await stack.same_as(publisher)
    assert (await stack.client.status()).demotions == 0


async def test_a_second_stream_takes_over_and_the_older_one_is_notified(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    older = stack.push()
    await older.send(publisher.make(chain(1)[0]))
    await older.answer(lambda a: a.last_event_id == 0)
    newer = stack.push()
    await newer.send(greeting(publisher))
    ended = await older.ended()
    assert isinstance(ended, FailedPrecondition)
    assert "took over" in str(ended)
    await newer.send(publisher.make(chain(2)[1]))
    await newer.answer(lambda a: a.last_event_id == 1)
    await stack.same_as(publisher)


async def test_a_removed_workers_stream_is_ended_with_a_reason(stack: Stack, publisher: ScriptedPublisher) -> None:
    stream = stack.push()
    await stream.send(publisher.make(chain(1)[0]))
    await stream.answer(lambda a: a.last_event_id == 0)
    forget(stack.indexer)
    ended = await stream.ended()
    assert isinstance(ended, FailedPrecondition)
    assert "removed" in str(ended)


async def test_a_higher_epoch_is_a_restart(stack: Stack, publisher: ScriptedPublisher) -> None:
    stream = stack.push()
    await stream.send(*map(publisher.make, chain(3)))
    publisher.restart()
    await stream.send(publisher.make(batch(stored([70], prompt(1, first=700)))))
    await stream.answer(lambda a: a.epoch == 2 and a.last_event_id == 0)
    await stack.same_as(publisher)
    assert (await stack.client.status()).resets == 1


async def test_a_restart_amid_a_resend_waits_for_no_number_of_the_former_life(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    messages = [publisher.make(payload) for payload in chain(9)]
    stream = stack.push()
    await stream.send(*messages[:3], messages[8])
    await stream.asked(2)
    publisher.restart()
    await stream.send(publisher.make(batch(stored([70], prompt(1, first=700)))))
    await stack.same_as(publisher)
    await stream.send(publisher.make(batch(removed([70]))))
    await stream.answer(lambda a: a.epoch == 2 and a.last_event_id == 1)


async def test_an_event_that_cannot_be_read_is_counted_in_the_answers(
    stack: Stack, publisher: ScriptedPublisher
) -> None:
    stream = stack.push()
    wrong = parse_batch(publisher.make(chain(1)[0]))
    wrong.events.add().stored.engine_hashes.extend([1, 2])
    wrong.events[-1].stored.local_hashes.append(3)
    await stream.send(wrong, publisher.make(chain(2)[1]))
    assert (await stream.answer(lambda a: a.last_event_id == 1)).malformed == 1
    await stack.same_as(publisher)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"worker_id": ""}, InvalidArgument, "worker_id"),
        ({"version": 0}, InvalidArgument, "version"),
        ({"version": 9}, FailedPrecondition, "version 9"),
        ({"worker_id": "nobody"}, NotFound, "nobody"),
        ({"dp_rank": 3}, NotFound, "rank 3"),
        ({"worker_id": "zmq"}, FailedPrecondition, "zmq"),
        ({"block_size": 8}, FailedPrecondition, "8 tokens"),
        ({"model": "another"}, FailedPrecondition, "another"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_what_a_first_message_must_say(
    stack: Stack, publisher: ScriptedPublisher, fields: dict[str, Any], error: type[KvscoutError], says: str
) -> None:
    follow(stack.indexer, Transport.ZMQ, worker_id="zmq")
    stream = stack.push()
    await stream.send(greeting(publisher, **fields))
    ended = await stream.ended()
    assert type(ended) is error
    assert says in str(ended)


@pytest.mark.parametrize(("tenant", "error"), [("t", PermissionDenied), ("default", None)])
async def test_a_publisher_sends_for_its_own_tenant_only(
    stack: Stack, publisher: ScriptedPublisher, tenant: str, error: type[KvscoutError] | None
) -> None:
    table = TokenTable({hashlib.sha256(b"secret").hexdigest(): Identity(AccessRole.WORKER, "default")})
    raw = IndexerServicer(stack.indexer, None)
    async with serving(raw.add_to, tokens=table) as channel:
        publish: Any = indexer_pb2_grpc.IndexerStub(channel).PublishEvents
        call = publish(metadata=(("authorization", "Bearer secret"),))
        await call.write(greeting(publisher, tenant=tenant))
        if error is None:
            assert await call.read() is not grpc.aio.EOF
            call.cancel()
            return
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert type(to_error(refused.value)) is error


async def test_a_message_of_another_source_ends_the_stream(stack: Stack, publisher: ScriptedPublisher) -> None:
    follow(stack.indexer, Transport.GRPC, worker_id="other")
    for wrong in (greeting(publisher, worker_id="other"), parse_batch(ScriptedPublisher("other").make(chain(1)[0]))):
        stream = stack.push()
        await stream.send(greeting(publisher), wrong)
        assert isinstance(await stream.ended(), InvalidArgument)
    assert (await stack.client.status("other")).applied == 0


async def test_a_defect_while_a_stream_is_read_is_reported(
    publisher: ScriptedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ExceptionGroup) as crash:
        async with pushed() as stack:
            stream = stack.push()
            await stream.send(greeting(publisher))
            await stream.answer(lambda a: True)
            monkeypatch.setattr("kvscout_blocks.source.source.Source.on_batch", broken)
            await stream.send(publisher.make(chain(1)[0]))
            assert isinstance(await stream.ended(), InternalError)
            await asyncio.sleep(DEADLINE_SECONDS)
    assert crash.group_contains(ZeroDivisionError)


async def test_an_indexer_that_shuts_down_sends_its_publishers_away_at_once(
    publisher: ScriptedPublisher, tmp_path: Path
) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"workers: [{{worker_id: w, model: {MODEL}, block_size: 4, transport: grpc}}]\n")
    # Longer than this test may take: whoever waits for streams to end by themselves fails it.
    flags = ("--workers-file", str(file), "--grace-seconds", "1000")
    async with indexer_process(*flags) as (_, running), grpc.aio.insecure_channel(running.address) as channel:
        stream = Pushing(indexer_pb2_grpc.IndexerStub(channel))
        await stream.send(publisher.make(chain(1)[0]))
        await stream.answer(lambda a: a.last_event_id == 0)
        running.process.terminate()
        assert isinstance(await stream.ended(), Draining)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await running.process.wait() == 0
        await stream.close()


async def push_until_all_is_there(stack: Stack, publisher: ScriptedPublisher, rng: random.Random, batches: int) -> None:
    """A publisher as it should be: greets, goes on from where it is told, goes back when it is asked."""
    channel, life = FaultyChannel(rng), Life(rng)
    made = 0
    quiet = False
    while not quiet:
        stream = stack.push()
        await stream.send(greeting(publisher))
        answer = await stream.answer(lambda a: True)
        known = answer.epoch == publisher.epoch and answer.HasField("last_event_id")
        seen = 0
        await stream.send(*await publisher.again(answer.last_event_id + 1 if known else 0))
        for _ in range(rng.randint(20, 80)):
            for asked in [a.resend_from for a in stream.answers[seen:] if a.HasField("resend_from")]:
                await stream.send(*(await publisher.again(asked) or [greeting(publisher).SerializeToString()]))
            seen = len(stream.answers)
            if made >= batches:
                break
            made += 1
            for arriving in channel.through(publisher.make(life.payload())):
                await stream.send(arriving)
            if rng.random() < 0.05:
                await asyncio.sleep(0)
        if made >= batches:
            channel.loss = 0.0
            await stream.send(publisher.make(life.payload()))

            async def caught_up(stream: Pushing = stream, start: int = seen) -> bool:
                nonlocal seen
                for asked in [a.resend_from for a in stream.answers[seen:] if a.HasField("resend_from")]:
                    await stream.send(*(await publisher.again(asked) or [greeting(publisher).SerializeToString()]))
                seen = len(stream.answers)
                return stream.answers[-1].last_event_id == publisher.last_id

            await eventually(caught_up, what="the last event")
            quiet = True
        elif rng.random() < 0.5:
            await stream.close()
        else:
            await stream.finish()
    assert channel.lost


async def test_a_publisher_that_loses_five_percent_and_reconnects_ends_in_its_truth(stack: Stack) -> None:
    publisher = ScriptedPublisher(ring=64)
    await push_until_all_is_there(stack, publisher, random.Random(SEED), 600)
    await stack.same_as(publisher)
