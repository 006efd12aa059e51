"""An engine whose events are polled → bridge → NATS → index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from support.bridge_stack import NAMES, SPEC, BridgeHere
from support.engine_events import prompt
from support.event_listener import Listener, listening
from support.nats_server import nats_server
from support.polled_engine import PolledEngine, polled_engine
from support.processes import eventually, start

from kvscout_bridge.config import BridgeConfig
from kvscout_common.errors import Unavailable
from kvscout_common.hashing import block_hashes
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_bucket import Stored, WorkerBucket
from kvscout_common.worker import CopyMode, EngineKind, Transport


@asynccontextmanager
async def bridged(transport: str) -> AsyncIterator[tuple[PolledEngine, BridgeHere, Listener]]:
    async with nats_server(jetstream=True) as nats, polled_engine(PolledEngine()) as engine:
        spec = replace(SPEC, engine=EngineKind.TRTLLM, http_endpoint=engine.url)
        config = BridgeConfig(
            nats=NatsConfig((nats.url,), "test"), worker=spec, transport=Transport(transport), lease_seconds=1
        )
        bridge = BridgeHere(config)
        try:
            async with listening(nats.url, NAMES, spec, stream=transport == "jetstream") as listener:
                yield engine, bridge, listener
        finally:
            await bridge.stop()


async def until_overlap(listener: Listener, blocks: int, tokens: list[int]) -> None:
    hashes = block_hashes(tokens, SPEC.block_size)

    async def reached() -> bool:
        listener.source.tick()
        found = listener.index.find_matches(hashes, now=time.monotonic()).by_worker().get(listener.rank)
        return (found.device if found is not None else 0) == blocks

    await eventually(reached, what=f"an overlap of {blocks}")


async def test_what_is_fetched_reaches_readers_and_a_restart_is_a_higher_epoch(transport: str) -> None:
    async with bridged(transport) as (engine, bridge, listener):
        engine.store([1, 2, 3], prompt(3))
        await until_overlap(listener, 3, prompt(3))
        assert not listener.incomplete
        epoch = listener.epoch
        engine.restart()
        engine.store([1], prompt(1))
        await until_overlap(listener, 1, prompt(3))
        assert listener.epoch > epoch
        (source,) = (await bridge.status()).sources
        assert (source.problem, source.blocks) == ("", 1)


async def test_what_somebody_else_fetched_is_a_problem_that_readers_know(transport: str) -> None:
    async with bridged(transport) as (engine, bridge, listener):
        engine.store([1, 2], prompt(2))
        await until_overlap(listener, 2, prompt(2))
        engine.answering.clear()
        engine.remove(2)
        engine.drain()
        engine.store([1], prompt(1))
        engine.answering.set()
        await until_overlap(listener, 1, prompt(2))
        assert listener.incomplete
        (source,) = (await bridge.status()).sources
        assert source.problem == "events are missing: 2..2"


async def test_its_registration_counts_copies_as_the_engine_does() -> None:
    async with nats_server(jetstream=True) as nats, polled_engine(PolledEngine()) as engine:
        running = await start(
            "kvscout_bridge.main", "--nats-server", nats.url, "--namespace", "test", "--worker-id", "w", "--model", "m",
            "--block-size", "4", "--engine", "trtllm", "--http-endpoint", engine.url,
        )  # fmt: skip
        link = NatsLink(NatsConfig((nats.url,), "test"), "test")
        linked = asyncio.create_task(link.run())
        bucket = WorkerBucket(link)

        async def registered() -> Stored | None:
            try:
                stored = await bucket.get(WorkerName("default", "w"))
            except Unavailable:
                return None
            return stored if isinstance(stored, Stored) else None

        try:
            spec = (await eventually(registered, what="a registration")).spec
            assert (spec.copies, spec.engine, engine.polls > 0) == (CopyMode.SET, EngineKind.TRTLLM, True)
            assert await running.stop() == 0
        finally:
            linked.cancel()
            await asyncio.gather(linked, return_exceptions=True)
            await link.close()
