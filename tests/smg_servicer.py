"""Runs the relay of `smg-grpc-servicer` beside a simulated engine: an index from its stream is that from the sockets.

    PYTHONPATH=tests python tests/smg_servicer.py [DIRECTORY]

The packages are downloaded, unless DIRECTORY has them installed. Three workers of one indexer are the same engine: over
ZMQ, over the relay's stream and over the mocker's own.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

from support.indexer_client import MODEL, IndexerClient
from support.mocker_process import MockerProcess, running_mocker
from support.processes import START_SECONDS
from support.scripted_publisher import dumped, served_indexer
from support.seeds import VARIABLE, test_seed

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc

PACKAGES: Final = ("smg-grpc-proto==0.4.28", "smg-grpc-servicer==0.14.1", "msgspec")
BLOCK = 16
RANKS = 2
REQUESTS = 120
ADAPTER = "sql"
LIVE, INCOMPLETE = indexer_pb2.SOURCE_STATE_LIVE, indexer_pb2.SOURCE_STATE_INCOMPLETE


class Published(NamedTuple):
    """Where a rank is read."""

    endpoint: str
    replay_endpoint: str = ""


@asynccontextmanager
async def relaying(packages: str, mocker: MockerProcess) -> AsyncIterator[Published]:
    """Run the relay in a process of its own."""
    path = os.pathsep.join((packages, os.environ.get("PYTHONPATH", "")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.smg_relay", *(f"{rank['events']},{rank['replay']}" for rank in mocker.ranks)),
        env={**os.environ, "PYTHONPATH": path},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            port = (await process.stdout.readline()).decode().strip()
        assert port, "the relay did not start"
        yield Published(f"grpc://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.communicate()


async def run_requests(mocker: MockerProcess, rng: random.Random) -> None:
    """Send prompts that share prefixes, more than the caches hold, some with an adapter or a salt."""
    prefixes = [[rng.randrange(1000) for _ in range(BLOCK * 4)] for _ in range(6)]
    for _ in range(REQUESTS):
        prompt = rng.choice(prefixes)[: BLOCK * rng.randrange(1, 5)] + [rng.randrange(1000) for _ in range(24)]
        fields = {"model": ADAPTER} if rng.random() < 0.2 else {"cache_salt": "pepper"} if rng.random() < 0.2 else {}
        rank = {"X-data-parallel-rank": str(rng.randrange(RANKS))}
        await mocker.complete(prompt, rank, max_tokens=rng.randrange(1, 20), **fields)


async def fill_block(mocker: MockerProcess, rng: random.Random) -> None:
    """Have each rank publish a batch that is not dropped."""
    await mocker.post("/mock/faults", {"drop_events": 0})
    for rank in range(RANKS):
        prompt = [rng.randrange(1000) for _ in range(2 * BLOCK)]
        await mocker.complete(prompt, {"X-data-parallel-rank": str(rank)}, max_tokens=1)


async def compare(client: IndexerClient, stub: indexer_pb2_grpc.IndexerStub, mocker: MockerProcess) -> int:
    """Compare what is known of each rank, once all is applied; return the number of blocks."""
    blocks = 0
    for rank in range(RANKS):
        last = int.from_bytes((await mocker.replay(0, rank))[-2][-2], "big")
        dumps = []
        for worker in ("sockets", "relay", "mocker"):
            status = await client.until_applied(last, worker, rank)
            assert status.state == LIVE, status
            dumps.append(await dumped(stub, worker, rank))
        assert dumps[0].blocks == dumps[1].blocks == dumps[2].blocks
        blocks += len(dumps[0].blocks)
    return blocks


async def run(packages: str) -> None:
    """Compare; raises what is different."""
    rng = random.Random(test_seed())
    flags = ("--model", MODEL, "--lora", ADAPTER, "--block-size", str(BLOCK), "--num-gpu-blocks", "80")
    async with AsyncExitStack() as stack:
        client, _, stub = await stack.enter_async_context(served_indexer())
        mocker = await stack.enter_async_context(running_mocker(*flags, "--dp-size", str(RANKS), "--grpc-port", "0"))
        fields: dict[str, Any] = {"block_size": BLOCK, "dp_size": RANKS, "adapters": [{"name": ADAPTER, "lora_id": 1}]}
        sockets = [Published(rank["events"], rank["replay"]) for rank in mocker.ranks]
        await client.register(*sockets, worker_id="sockets", **fields)
        await client.register(Published(f"grpc://127.0.0.1:{mocker.grpc_port}"), worker_id="mocker", **fields)
        async with relaying(packages, mocker) as relay:
            await client.register(relay, worker_id="relay", **fields)
            for worker in ("sockets", "relay", "mocker"):
                await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_WAITING, worker)
            # The relay's own subscription is asynchronous.
            await asyncio.sleep(1)
            await fill_block(mocker, rng)  # a first batch that is lost nobody asks for
            await mocker.post("/mock/faults", {"drop_events": 0.05})
            await run_requests(mocker, rng)
            await fill_block(mocker, rng)  # what was dropped last is noticed by what follows
            print(f"{REQUESTS} requests, {RANKS} ranks: {await compare(client, stub, mocker)} blocks, alike")
        status = await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_DISCONNECTED, "relay")
        print(f"without the relay: {status.reason}")
        async with relaying(packages, mocker) as relay:
            await client.register(relay, worker_id="late", **fields)
            await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_WAITING, "late")
            await asyncio.sleep(1)
            await fill_block(mocker, rng)
            status = await client.until(lambda s: s.state == INCOMPLETE, "late")
            print(f"a relay that is called late: {status.reason}")


def main() -> None:
    """Install the packages if necessary, and compare."""
    print(f"{VARIABLE}={test_seed()}")
    with tempfile.TemporaryDirectory() as folder:
        packages = sys.argv[1] if len(sys.argv) > 1 else folder
        if packages == folder:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
            subprocess.run(install, check=True)
        asyncio.run(run(packages))


if __name__ == "__main__":
    main()
