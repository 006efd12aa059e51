"""Recovery over NATS: parts arrive in order at the reader's pace, and either end notices that the other is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import nats
import nats.aio.client
import pytest
from support.nats_server import nats_server

from kvscout.v1 import bridge_pb2
from kvscout_blocks.source.feed import HistoryBroken
from kvscout_blocks.source.recovery import MAX_ANSWERS, WINDOW, Answer, recover, recover_request, serve_recovery
from kvscout_common.errors import NotFound
from kvscout_common.nats.barrier import NatsBarrier
from kvscout_common.worker import WorkerRank

SUBJECT = "kvscout.test.recover"
REQUEST = recover_request("default", WorkerRank("w", 0), 5)


@pytest.fixture
async def clients() -> AsyncIterator[tuple[nats.aio.client.Client, nats.aio.client.Client]]:
    async with nats_server() as server:
        async with await nats.connect(server.url) as one, await nats.connect(server.url) as other:
            yield one, other


Clients = tuple[nats.aio.client.Client, nats.aio.client.Client]


async def settled(client: nats.aio.client.Client) -> None:
    """What the client sent so far, subscriptions included, is with the server."""
    barrier = NatsBarrier(client)
    await barrier.wait(barrier.generation, seconds=10)


def numbered(count: int, sent: list[int]) -> Answer:
    def parts() -> Iterator[bridge_pb2.RecoverResponse]:
        for number in range(count):
            sent.append(number)
            yield bridge_pb2.RecoverResponse(part=number, last=number == count - 1)

    return answering(parts)


def answering(parts: Callable[[], Iterable[bridge_pb2.RecoverResponse]]) -> Answer:
    async def answer(_: bridge_pb2.RecoverRequest) -> Iterable[bridge_pb2.RecoverResponse]:
        return parts()

    return answer


async def test_parts_come_in_order_and_no_more_than_a_window_ahead_of_the_reader(clients: Clients) -> None:
    publisher, reader = clients
    sent: list[int] = []
    service = await serve_recovery(publisher, SUBJECT, numbered(100, sent))
    await settled(publisher)
    read = 0
    async for part in recover(reader, SUBJECT, REQUEST):
        assert part.part == read
        read += 1
        assert len(sent) <= read + WINDOW
    assert read == 100
    assert service.answered == 1
    await service.close()


async def test_an_answer_of_one_part_is_the_last_part(clients: Clients) -> None:
    publisher, reader = clients
    asked: list[bridge_pb2.RecoverRequest] = []

    async def answer(request: bridge_pb2.RecoverRequest) -> list[bridge_pb2.RecoverResponse]:
        asked.append(request)
        return [bridge_pb2.RecoverResponse(outcome=bridge_pb2.RECOVER_OUTCOME_TOO_NEW, last_event_id=4, last=True)]

    await serve_recovery(publisher, SUBJECT, answer)
    await settled(publisher)
    parts = [part async for part in recover(reader, SUBJECT, REQUEST)]
    assert [part.last_event_id for part in parts] == [4]
    assert asked == [REQUEST]


async def test_nobody_there_a_refusal_and_a_lost_part_are_distinguished(clients: Clients) -> None:
    publisher, reader = clients
    with pytest.raises(HistoryBroken, match="no publisher answers"):
        await anext(recover(reader, SUBJECT, REQUEST))

    async def refuse(request: bridge_pb2.RecoverRequest) -> list[bridge_pb2.RecoverResponse]:
        raise NotFound("no such rank")

    service = await serve_recovery(publisher, SUBJECT, refuse)
    await settled(publisher)
    with pytest.raises(HistoryBroken, match="no such rank"):
        await anext(recover(reader, SUBJECT, REQUEST))
    await service.close()

    await serve_recovery(publisher, SUBJECT, answering(lambda: [bridge_pb2.RecoverResponse(part=n) for n in (0, 2)]))
    await settled(publisher)
    with pytest.raises(HistoryBroken, match="part 2 came where 1"):
        [part async for part in recover(reader, SUBJECT, REQUEST)]


async def test_a_publisher_that_falls_silent_ends_the_recovery(clients: Clients) -> None:
    publisher, reader = clients
    await serve_recovery(publisher, SUBJECT, answering(lambda: [bridge_pb2.RecoverResponse()]))
    await settled(publisher)
    with pytest.raises(HistoryBroken, match="silent"):
        [part async for part in recover(reader, SUBJECT, REQUEST, idle_seconds=0.1)]


async def test_readers_that_went_away_do_not_occupy_the_publisher(clients: Clients) -> None:
    publisher, reader = clients
    sent: list[int] = []
    service = await serve_recovery(publisher, SUBJECT, numbered(100, sent), idle_seconds=0.2)
    await settled(publisher)
    held = [recover(reader, SUBJECT, REQUEST) for _ in range(MAX_ANSWERS)]
    for answer in held:
        await anext(answer)
    with pytest.raises(HistoryBroken, match="come again"):
        await anext(recover(reader, SUBJECT, REQUEST))
    for answer in held:
        await answer.aclose()
    async with asyncio.timeout(30):
        while True:
            try:
                assert len([part async for part in recover(reader, SUBJECT, REQUEST)]) == 100
                break
            except HistoryBroken:
                await asyncio.sleep(0.02)
    await service.close()
