"""`make chaos-serve`: three `kvscout serve` on one NATS under kills, stops and silence; afterwards all agree exactly.

Clients of each process, over HTTP and gRPC, stream completions from three mockers; one more gateway, a process of its
own, has the three for its indexers and schedulers. Processes are killed and started again, stopped and continued, cut
off from NATS or from that gateway by relays that swallow what they pass, and NATS itself is killed or stopped. No
request may fail unless the process that it came through was killed, or stopped for longer than clients wait.

When the faults end, requests are held open through every process: a quiet second later all three must have the same
bookings and loads, and exactly those of the requests held once the owner timeout of the killed processes is over; a
quiet second after the last is gone, nothing. Their indexes must give the same overlaps.
CHAOS_SEED repeats the choice of faults.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import grpc
from support.free_ports import free_ports
from support.nats_server import NatsServer
from support.processes import eventually
from support.replica_client import BLOCK, MODEL, ReplicaClient, State
from support.tcp_relay import TcpRelay

from chaos.fronts import Front, GrpcFront, HttpFront, Wanted
from chaos.members import Member, kill_all
from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, scheduler_pb2, workers_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call, open_channel

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
PROCESSES = 3
ENGINES = 3
HELD = 4
"""Requests held open through each process."""
AWAY_SECONDS = (0.1, 2.5)
LONG_AWAY_SECONDS = 13.0
"""A stop that is longer than the owner timeout: the others end what the process runs, and have it again later."""
KEEPALIVE_SECONDS = 10.0
"""After which gRPC clients leave a process that does not answer their pings."""
LONG_AFTER_SECONDS = 40.0
"""Length of a run in which there is one."""
QUIET_SECONDS = 1.0
OWNER_SECONDS = 20.0
"""The owner timeout of 10 s, 2 s that others leave to the first replica, and what a busy machine adds."""
FAULTS = ("kill", "kill", "stop", "stop", "cut from NATS", "cut from the gateway", "NATS killed", "NATS stopped")
GATEWAY = "gateway"


class Serve:
    """One process, and the relays in front of NATS and of itself."""

    def __init__(self, name: str, nats: NatsServer) -> None:
        self.name = name
        self.nats = TcpRelay(f"127.0.0.1:{nats.port}")
        (self.http_port,) = free_ports(1)
        self.away: list[tuple[float, float]] = []
        """From when to when it was killed, or stopped for longer than the keepalive of its clients."""
        self.defects: list[str] = []
        """Errors that processes logged that are no more."""

    async def start(self) -> None:
        """Starts it and its relays."""
        await self.nats.start()
        self.client = ReplicaClient(
            self.name, f"nats://{self.nats.address}", "--http-port", str(self.http_port), "--log-level", "warning",
            "--engine-idle-seconds", "60", "--engine-first-output-seconds", "60",
            module="kvscout_serve.main",
        )  # fmt: skip
        self.member = self.client.member
        self.relay = TcpRelay(self.client.address)
        await self.relay.start()
        await self.client.start()

    async def close(self) -> None:
        """Ends everything."""
        await self.client.close()
        await self.relay.close()
        await self.nats.close()

    async def is_ready(self) -> bool:
        """Return whether it knows the workers."""
        try:
            return await self.client.knows_workers(ENGINES)()
        except KvscoutError:
            return False

    async def agrees(self) -> bool:
        """Return whether it is connected to NATS and to both others, by connections that have missed nothing."""
        try:
            known = await self.client.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
        except KvscoutError:
            return False
        live = sum(each.live for each in known.replicas)
        return not (known.problem or self.nats.deaf or self.relay.deaf) and live == PROCESSES


class World:
    """The processes."""

    def __init__(self, folder: Path) -> None:
        self.nats = NatsServer(folder)
        self.serves = [Serve(f"s{number}", self.nats) for number in range(PROCESSES)]
        self.engines = [self._engine(number, *free_ports(3)) for number in range(ENGINES)]
        self.failures: list[tuple[str, float, float, str]] = []
        """(front, from, until, why) of each request that failed."""
        self.endings: Counter[str] = Counter()

    @staticmethod
    def _engine(number: int, http: int, events: int, replay: int) -> tuple[Member, workers_pb2.Worker]:
        member = Member(
            f"w{number}", "kvscout_mocker.main", "--port", str(http), "--events-port", str(events),
            "--replay-port", str(replay), "--model", MODEL, "--speedup", "2",
            "--buffer-steps", "1000000",
        )  # fmt: skip
        endpoint = workers_pb2.EventEndpoint(
            endpoint=f"tcp://127.0.0.1:{events}", replay_endpoint=f"tcp://127.0.0.1:{replay}"
        )
        return member, workers_pb2.Worker(
            worker_id=f"w{number}", model=MODEL, block_size=BLOCK, total_kv_blocks=4095,
            engine=workers_pb2.ENGINE_KIND_MOCK, http_endpoint=f"http://127.0.0.1:{http}", event_endpoints=[endpoint],
        )  # fmt: skip

    async def start(self) -> None:
        """Starts everything, and registers the engines at the first process."""
        await self.nats.start()
        await asyncio.gather(*(member.start() for member, _ in self.engines), *(serve.start() for serve in self.serves))
        for _, worker in self.engines:
            await self.serves[0].client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker))
        for serve in self.serves:
            await eventually(serve.is_ready, what="the workers")
            await eventually(serve.agrees, what="the other processes")
        upstreams = [
            flag for s in self.serves for flag in ("--indexer", s.relay.address, "--scheduler", s.relay.address)
        ]
        port, http_port = free_ports(2)
        self.gateway = Member(
            GATEWAY, "kvscout_gateway.main", "--port", str(port), "--http-port", str(http_port), "--metrics-port", "0",
            "--nats-server", self.nats.url, "--log-level", "warning", *upstreams,
        )  # fmt: skip
        await self.gateway.start()

    async def close(self) -> None:
        """Ends everything."""
        await asyncio.gather(*(serve.close() for serve in self.serves))
        await kill_all([member for member, _ in self.engines])
        if hasattr(self, "gateway"):
            await self.gateway.kill()
        await self.nats.kill()

    def fronts(self) -> list[Front]:
        """Return clients of every process and of the gateway."""
        made: list[Front] = []
        for name, rpc, http in [
            *((serve.name, serve.client.address, serve.http_port) for serve in self.serves),
            (GATEWAY, f"127.0.0.1:{self.gateway.ready['port']}", self.gateway.ready["http_port"]),
        ]:
            made.append(GrpcFront(name, rpc))
            made.append(HttpFront(f"{name} http", name, f"http://127.0.0.1:{http}", begins_with_headers=False))
        return made

    async def load(self, front: Front, rng: Random, stop: asyncio.Event) -> None:
        """Send one request after the other until told to stop, each to its end."""
        while not stop.is_set():
            began = time.monotonic()
            ending = await front.ask(Wanted.drawn(rng, MODEL))
            self.endings[ending.outcome] += 1
            if ending.outcome == "failed":
                self.failures.append((front.through, began, time.monotonic(), f"{front.name}: {ending.why}"))
                await asyncio.sleep(0.1)
            await asyncio.sleep(rng.uniform(0.0, 0.05))

    async def strike(self, kind: str, rng: Random, away: float) -> str:
        """Inject one fault; return its description when it is over."""
        struck, began = rng.choice(self.serves), time.monotonic()
        if kind == "kill":
            struck.defects += struck.member.defects()
            await struck.client.kill()
            await asyncio.sleep(away)
            await struck.client.start()
            # Until then it says that it is not ready.
            await eventually(struck.is_ready, what="the workers")
            struck.away.append((began, time.monotonic()))
        elif kind == "stop":
            struck.client.signal(signal.SIGSTOP)
            await asyncio.sleep(away)
            struck.client.signal(signal.SIGCONT)
            if away > KEEPALIVE_SECONDS:
                struck.away.append((began, time.monotonic()))
        elif kind.startswith("cut"):
            relay = struck.nats if kind.endswith("NATS") else struck.relay
            directions = rng.choice([("up",), ("down",), ("up", "down")])
            relay.swallow(*directions)
            await asyncio.sleep(away)
            relay.heal()
            kind = f"{kind} {' and '.join(directions)}"
        else:
            if kind == "NATS killed":
                await self.nats.kill()
            else:
                self.nats.pause()
            await asyncio.sleep(away)
            if kind == "NATS killed":
                await self.nats.start()
            else:
                self.nats.resume()
            return f"{kind}, {away:.1f} s"
        return f"{kind} {struck.name}, {away:.1f} s"

    def offences(self) -> list[str]:
        """Return the requests that failed through a process that was not killed meanwhile."""
        away = {serve.name: serve.away for serve in self.serves}
        return [
            f"failed though {through} was there: {why}"
            for through, began, ended, why in self.failures
            if not any(since <= ended and until >= began for since, until in away.get(through, ()))
        ]

    async def states(self) -> list[State]:
        """Return what each process has booked."""
        return await asyncio.gather(*(serve.client.state() for serve in self.serves))

    async def overlaps(self) -> list[list[dict[str, int]]]:
        """Return the overlaps of prompts that many requests began with, as each process has them."""
        channels = [open_channel(serve.client.address) for serve in self.serves]
        prompts = [[topic * 10_000 + position for position in range(40 * BLOCK)] for topic in range(8)]

        async def at(channel: grpc.aio.Channel) -> list[dict[str, int]]:
            stub: Any = indexer_pb2_grpc.IndexerStub(channel)
            requests = [indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt) for prompt in prompts]
            found = [(await call(stub.FindMatches, request, timeout=10.0)).overlaps for request in requests]
            return [dict(zip(one.worker_ids, one.device_blocks, strict=True)) for one in found]

        try:
            return [await at(channel) for channel in channels]
        finally:
            for channel in channels:
                await channel.close()

    async def until_settled(self) -> None:
        """Wait until all processes are connected again."""
        for serve in self.serves:
            await eventually(serve.agrees, what=f"the other processes at {serve.name}")


class Held:
    """A request that is held open: its answer is read, and goes on."""

    def __init__(self, url: str, number: int) -> None:
        self._url = url
        self._body = {
            "model": MODEL, "prompt": [number * 100_003 + n for n in range(5 * BLOCK)], "max_tokens": 8_000,
            "stream": True,
        }  # fmt: skip
        self.begun = asyncio.Event()
        self.why = ""
        """Reason for which it ended by itself."""

    async def run(self) -> None:
        """Read its answer, until cancelled."""
        async with aiohttp.ClientSession() as http, http.post(self._url, json=self._body) as response:
            async for _ in response.content.iter_any():
                self.begun.set()
            self.why = f"a held request ended with {response.status}"


def differences(states: Sequence[State], held: int | None) -> list[str]:
    """Return where processes differ from one another, and from the number of requests held, if it is given."""
    found = []
    for number, (requests, loads) in enumerate(states):
        if (requests, loads) != states[0]:
            only = sorted(set(requests.items()) ^ set(states[0][0].items()))[:4]
            found.append(f"s{number} and s0 differ: {only}, loads {loads} and {states[0][1]}")
        if sum(load[0] for load in loads.values()) != len(requests):
            found.append(f"s{number}: {len(requests)} requests, but loads {loads}")
        if held is not None and len(requests) != held:
            found.append(f"s{number}: {len(requests)} requests, {held} held: {sorted(requests.items())[:4]}")
        if held == 0 and any(map(any, loads.values())):
            found.append(f"s{number}: nothing is held, loads {loads}")
    return found


async def run(seconds: float, seed: int, *, faults: Sequence[str] = FAULTS, quiet: bool = False) -> list[str]:
    """One run.

    Args:
        seconds: Length of the time with faults.
        seed: Of their choice.
        faults: Kinds of faults to draw from.
        quiet: Prints nothing.

    Returns:
        What is wrong afterwards.
    """
    rng = Random(seed)

    def say(text: str) -> None:
        if not quiet:
            print(f"  {text}", flush=True)

    async with AsyncExitStack() as stack:
        world = World(Path(stack.enter_context(TemporaryDirectory(prefix="kvscout-chaos-"))))
        stack.push_async_callback(world.close)
        await world.start()
        stop, fronts = asyncio.Event(), world.fronts()
        for front in fronts:
            stack.push_async_callback(front.close)
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for front in fronts:
                tasks.create_task(world.load(front, Random(rng.randrange(2**32)), stop))
            try:
                if seconds >= LONG_AFTER_SECONDS:
                    say(await world.strike("stop", rng, LONG_AWAY_SECONDS))
                for kind in _drawn(faults, rng):
                    if time.monotonic() - began >= seconds:
                        break
                    done = await world.strike(kind, rng, rng.uniform(*AWAY_SECONDS))
                    say(f"{time.monotonic() - began:5.1f} s  {done}")
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                await world.until_settled()
            finally:
                stop.set()
        wrong = await _compared(world, stack, say)
        for member in (*(serve.member for serve in world.serves), world.gateway):
            member.require_alive()
            wrong += [f"{member.name}: {one}" for one in member.defects()]
        offences = world.offences()
        wrong += [f"{serve.name}: {one}" for serve in world.serves for one in serve.defects] + offences
        say(f"{dict(world.endings)}, {len(world.failures) - len(offences)} with the process that was killed")
        for line in wrong:
            say(f"WRONG {line}")
        return wrong


def _drawn(faults: Sequence[str], rng: Random) -> Any:
    """Yield faults without end: each kind once before any of them again."""
    while True:
        yield from rng.sample(faults, len(faults))


async def _compared(world: World, stack: AsyncExitStack, say: Any) -> list[str]:
    """Hold requests open through every process, compare, and let them go."""
    held = [
        Held(f"http://127.0.0.1:{serve.http_port}/v1/completions", 10 * number + each)
        for number, serve in enumerate(world.serves)
        for each in range(HELD)
    ]
    reading = [asyncio.create_task(each.run()) for each in held]
    try:
        for each in held:
            await asyncio.wait_for(each.begun.wait(), 30)
        await asyncio.sleep(QUIET_SECONDS)
        # What was killed had bookings: the same ones everywhere, until its owner timeout.
        wrong, began = differences(await world.states(), None), time.monotonic()
        while not wrong and (more := differences(await world.states(), len(held))):
            if time.monotonic() - began > OWNER_SECONDS:
                wrong = more
            await asyncio.sleep(0.2)
        say(f"the same after a quiet second, exactly {len(held)} after {time.monotonic() - began:.1f} s more")
        wrong += [each.why for each in held if each.why]
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    await asyncio.sleep(QUIET_SECONDS)
    wrong += [f"after all was freed: {line}" for line in differences(await world.states(), 0)]
    overlaps = await world.overlaps()
    if any(each != overlaps[0] for each in overlaps):
        wrong.append(f"indexes differ: {overlaps}")
    if not any(map(any, overlaps)):
        wrong.append("indexes are empty")
    for serve in world.serves:
        figures = await call(serve.client.stub.GetReplicas, scheduler_pb2.GetReplicasRequest(), timeout=10)
        wrong += [f"{serve.name} diverged from {each.replica_id}" for each in figures.replicas if each.divergences]
    return wrong


async def main() -> int:
    """One run; 0 if all agreed."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g}", flush=True)
    return 1 if await run(SECONDS, SEED) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
