"""Engines that share a cache, over their own sockets, with an indexer that reads all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from support.engine_events import batch, prompt, removed, stored
from support.indexer_client import BLOCK_SIZE, IndexerClient, local_indexer
from support.processes import eventually
from support.zmq_publisher import Publisher

from kvscout.v1 import indexer_pb2, types_pb2, workers_pb2
from kvscout_common.errors import InvalidArgument

REMOTE = {"medium": "STORAGE", "locality": "REMOTE"}
LABELS = {"shared_cache": "store", "shared_cache_blocks": "1000"}


@pytest.fixture
async def client() -> AsyncIterator[IndexerClient]:
    """An indexer."""
    async with local_indexer() as (started, _):
        yield started


class Engine(Publisher):
    """An engine without a replay socket."""

    replay_endpoint = ""

    async def joined(self, client: IndexerClient, worker_id: str) -> None:
        """Register it as a member of the shared cache, and wait until its events are read."""
        await client.register(self, worker_id=worker_id, labels=LABELS)
        await asyncio.to_thread(self.await_subscription)


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Two engines."""
    both = Engine(), Engine()
    yield both
    for engine in both:
        engine.close()


def block(number: int, **fields: str) -> dict[str, object]:
    """Block `number` of the prompt is announced, from 1."""
    tokens = prompt(1, first=1 + (number - 1) * BLOCK_SIZE)
    return stored([number], tokens, parent=number - 1 if number > 1 else None, **fields)


async def external(client: IndexerClient) -> dict[str, int]:
    """Leading blocks of the prompt on any tier, by worker."""
    found = (await client.matches(prompt(8))).overlaps
    return dict(zip(found.worker_ids, found.external_blocks or found.device_blocks, strict=True))


async def shared(client: IndexerClient) -> list[indexer_pb2.SharedCacheStatus]:
    """The shared caches in the indexer's status."""
    status: indexer_pb2.IndexerGetStatusResponse = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    return [cache for index in status.indexes for cache in index.shared_caches]


async def test_a_block_that_one_engine_stored_remotely_is_found_for_all_that_share_the_cache(
    client: IndexerClient, engines: tuple[Engine, Engine]
) -> None:
    first, second = engines
    await first.joined(client, "first")
    await second.joined(client, "second")
    await client.register(worker_id="apart", transport=workers_pb2.EVENT_TRANSPORT_NONE)
    first.send_payloads(0, [batch(block(1), block(2), block(1, **REMOTE), block(2, **REMOTE), block(3, **REMOTE))])
    await client.until_applied(0, "first")
    second.send_payloads(0, [batch(block(1), block(4, **REMOTE))])
    await client.until_applied(0, "second")
    assert await external(client) == {"first": 4, "second": 4}
    (status,) = await shared(client)
    assert status == indexer_pb2.SharedCacheStatus(name="store", blocks=4, members=2)
    second.send_payloads(1, [batch(removed([3], **REMOTE))])
    await client.until_applied(1, "second")
    assert await external(client) == {"first": 2, "second": 2}


async def test_shared_blocks_stay_when_their_publisher_has_gone(
    client: IndexerClient, engines: tuple[Engine, Engine]
) -> None:
    for name, engine in zip(("first", "second"), engines, strict=True):
        await engine.joined(client, name)
    engines[0].send_payloads(0, [batch(block(1, **REMOTE), block(2, **REMOTE))])
    await client.until_applied(0, "first")
    engines[0].close()
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="first"))
    assert await external(client) == {"second": 2}
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="second"))

    async def gone() -> bool:
        return not await shared(client)

    await eventually(gone, what="a status without the cache")


async def test_an_operator_is_told_of_engines_that_cannot_read_what_others_stored(
    client: IndexerClient, engines: tuple[Engine, Engine]
) -> None:
    for name, engine in zip(("first", "second"), engines, strict=True):
        await engine.joined(client, name)
    engines[0].send_payloads(0, [batch(block(1, **REMOTE))])
    await client.until_applied(0, "first")
    engines[1].send_payloads(0, [batch({**block(1, **REMOTE), "block_hashes": [77]})])
    await client.until_applied(0, "second")
    status: indexer_pb2.IndexerGetStatusResponse = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    (warning,) = status.service.warnings
    assert warning.startswith("1 of 2 worker ranks that share the cache 'store'")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"shared_cache": "x", "shared_cache_blocks": "-1"}, "shared_cache_blocks must be a number"),
        ({"shared_cache": "x", "shared_cache_blocks": "9" * 200}, "shared_cache_blocks must be a number"),
        ({"shared_cache": "x", "shared_cache_blocks": "1e9"}, "shared_cache_blocks must be a number"),
        ({"shared_cache": "x", "shared_cache_tier": "device"}, "shared_cache_tier must be host or disk"),
    ],
)
async def test_labels_that_say_nothing_are_refused(client: IndexerClient, labels: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        await client.register(worker_id="w", labels=labels, transport=workers_pb2.EVENT_TRANSPORT_NONE)
    assert caught.value.field == "labels"
