"""One side of `kvscout bench rpc`: an indexer on one transport, and this process, which calls it over the same.

Told on standard input what to do, as the drivers of the index benchmark are: `run workload=find/4096/300 seconds=2`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import uvloop

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_bench.gateway_load import at_rate, random_tokens
from kvscout_bench.report import percentile
from kvscout_bench.service_process import ServiceProcess
from kvscout_common.channel import open_channel
from kvscout_common.transport import Transport, choose

MODEL, WORKER = "bench", "worker"
BLOCK_SIZE = 16
INDEXER = "/kvscout.v1.Indexer/"
CALL_SECONDS = 30.0
WARM_CALLS = 100
OUTSTANDING = 64
"""Where as many calls are made as get through."""

Call = Callable[[int], Awaitable[None]]


async def _calls(channel: Any, stack: AsyncExitStack, kind: str, tokens: int) -> Call:
    """What is called: one call, however it is waited for."""
    if kind == "python":
        keep_alive = channel.unary_unary(f"{INDEXER}KeepAlive")
        request = workers_pb2.KeepAliveRequest(worker_ids=[WORKER]).SerializeToString()
        return _unary(keep_alive, request)
    prompt = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=random_tokens(tokens, seed=1))
    if kind == "find":
        return _unary(channel.unary_unary(f"{INDEXER}FindMatches"), prompt.SerializeToString())
    stream = channel.stream_stream(f"{INDEXER}StreamFindMatches")()
    stack.callback(stream.cancel)
    return _messages(stream, indexer_pb2.StreamFindMatchesRequest(requests=[prompt]).SerializeToString())


def _unary(method: Any, request: bytes) -> Call:
    async def call(number: int) -> None:
        await method(request, timeout=CALL_SECONDS)

    return call


def _messages(stream: Any, request: bytes) -> Call:
    """A message on an open stream; answers come in order."""
    turn, answer = asyncio.Lock(), asyncio.Lock()

    async def call(number: int) -> None:
        async with turn:
            await stream.write(request)
            # The next one is written while this one's answer is waited for.
            reading = asyncio.ensure_future(_read(stream, answer))
        await reading

    return call


async def _read(stream: Any, turn: asyncio.Lock) -> None:
    async with turn:
        if await stream.read() is grpc.aio.EOF:
            raise ConnectionError("the stream ended")


async def _nothing(number: int) -> None:
    """What the loop that calls costs by itself."""


async def _load(call: Call, rate: str, seconds: float) -> list[float]:
    """Calls for so long; returns how long each took, in seconds."""
    if rate != "saturated":
        return (await at_rate(call, per_second=float(rate), seconds=seconds)).seconds
    ends_at, taken = time.perf_counter() + seconds, []

    async def caller() -> None:
        while (begun := time.perf_counter()) < ends_at:
            await call(0)
            taken.append(time.perf_counter() - begun)

    await asyncio.gather(*(caller() for _ in range(OUTSTANDING)))
    return taken


async def _run(server: ServiceProcess, workload: str, seconds: float) -> dict[str, Any]:
    kind, tokens, rate = workload.split("/")
    async with AsyncExitStack() as stack, open_channel(server.address) as channel:
        call = await _calls(channel, stack, kind, int(tokens))
        for number in range(WARM_CALLS):
            await call(number)
        alone = 0.0
        if rate != "saturated":
            alone = await _cost(lambda: _load(_nothing, rate, seconds / 4))
        before, begun = server.cpu_ns(), time.process_time_ns()
        taken = await _load(call, rate, seconds)
        ours, theirs = time.process_time_ns() - begun, server.cpu_ns() - before
    return {
        "workload": workload,
        "operations": len(taken),
        "server_us": theirs / len(taken) / 1e3,
        "client_us": ours / len(taken) / 1e3 - alone,
        "p99_us": (percentile(sorted(taken), 99) or 0.0) * 1e6,
    }


async def _cost(load: Callable[[], Awaitable[list[float]]]) -> float:
    """CPU of this process a call, in microseconds."""
    begun = time.process_time_ns()
    taken = await load()
    return (time.process_time_ns() - begun) / len(taken) / 1e3


async def _register(server: ServiceProcess) -> None:
    worker = workers_pb2.Worker(worker_id=WORKER, model=MODEL, block_size=BLOCK_SIZE)
    async with open_channel(server.address) as channel:
        request = workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=3600).SerializeToString()
        register: Any = channel.unary_unary(f"{INDEXER}RegisterWorker")
        await register(request, timeout=CALL_SECONDS)


def main(transport: str) -> None:
    """Serves commands until its input ends."""
    choose(Transport(transport))
    with ServiceProcess("indexer", "--rpc-transport", transport) as server:
        uvloop.run(_register(server))
        for line in sys.stdin:
            verb, *given = line.split()
            arguments = dict(pair.split("=", 1) for pair in given)
            if verb != "run":
                print(json.dumps({"error": f"{verb!r} is not known"}), flush=True)
                continue
            sample = uvloop.run(_run(server, arguments["workload"], float(arguments["seconds"])))
            print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
