"""Memory of a model whose last worker is removed comes back, to the process and to the system."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.free_ports import free_ports
from support.indexer_client import local_indexer

from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.process.heap import trim
from kvscout_common.worker import EventEndpoint, WorkerRank, WorkerSpec
from kvscout_indexer.indexer import Indexer

BLOCKS = 400_000
PROMPT = 16
RANK = WorkerRank("w", 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def add(indexer: Indexer, model: str, prompts: int, **fields: Any) -> weakref.ref[object]:
    """Registers a worker that holds many short prompts; a reference to the model's index that does not keep it."""
    spec = WorkerSpec("w", model, 16, **fields)
    indexer.registry.register(spec)
    index = indexer.pools.of(spec)
    rng = random.Random(model)
    for _ in range(prompts):
        hashes = tuple(rng.getrandbits(64) for _ in range(PROMPT))
        index.apply(RANK, EventBatch((Stored(hashes, local_hashes=hashes),)))
    return weakref.ref(index)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is only kept by a cycle of references is kept."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_nobody_keeps_the_index_of_a_worker_that_published_at_an_endpoint() -> None:
    async with local_indexer() as (_, indexer):
        endpoints = (EventEndpoint(0, f"tcp://127.0.0.1:{free_ports(1)[0]}"),)
        index = add(indexer, "m", 10, event_endpoints=endpoints)
        await asyncio.sleep(0)
        indexer.registry.remove("default", "w")
        async with asyncio.timeout(30):
            while index() is not None:
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_collector")
async def test_nobody_keeps_the_index_of_a_worker_that_was_removed_while_its_history_was_read() -> None:
    async with local_indexer() as (_, indexer):
        with zmq.Context() as context, context.socket(zmq.XPUB) as engine:
            engine.bind("tcp://127.0.0.1:*")
            nobody = f"tcp://127.0.0.1:{free_ports(1)[0]}"
            endpoints = (EventEndpoint(0, engine.get_string(zmq.LAST_ENDPOINT), nobody),)
            index = add(indexer, "m", 10, event_endpoints=endpoints)
            async with asyncio.timeout(30):
                while not any(source.replaying for source in indexer._sources.values()):
                    await asyncio.sleep(0.01)
            indexer.registry.remove("default", "w")
            async with asyncio.timeout(30):
                while index() is not None:
                    await asyncio.sleep(0.01)


async def test_memory_goes_back_though_workers_are_removed_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = asyncio.Event()
    monkeypatch.setattr("kvscout_indexer.indexer.TRIM_SECONDS", 0.05)
    monkeypatch.setattr("kvscout_indexer.indexer.trim", trimmed.set)
    async with local_indexer() as (_, indexer), asyncio.timeout(30):
        while not trimmed.is_set():
            add(indexer, "m", 1)
            indexer.registry.remove("default", "w")
            await asyncio.sleep(0.01)


async def test_nobody_keeps_the_index_of_a_model_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    maintained = asyncio.Event()
    maintain_all = Indexer._maintain_all

    async def watched(indexer: Indexer) -> None:
        await maintain_all(indexer)
        if indexer.pools.by_key():
            maintained.set()

    monkeypatch.setattr(Indexer, "_maintain_all", watched)
    async with local_indexer() as (_, indexer):
        index = add(indexer, "m", 10)
        await maintained.wait()
        indexer.registry.remove("default", "w")
        async with asyncio.timeout(30):
            while index() is not None:
                await asyncio.sleep(0.01)


async def test_memory_of_a_removed_model_goes_back_to_the_system() -> None:
    if not trim():
        return  # the C library cannot
    async with local_indexer() as (_, indexer):
        before = resident_bytes()
        index = add(indexer, "m", BLOCKS // PROMPT)
        if not isinstance(index(), NativeIndex):
            return  # what the reference has is Python's to give back
        grown = resident_bytes() - before
        assert grown > 10_000_000
        indexer.registry.remove("default", "w")
        async with asyncio.timeout(20):
            while resident_bytes() - before > grown // 2:
                await asyncio.sleep(0.05)
