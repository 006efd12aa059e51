"""`make chaos-rolling`: a rolling upgrade, seen by clients that are 10 ms away on each side of every connection.

The services of `make chaos-gateway` end with SIGTERM and start again, one after the other, as an orchestrator replaces
them. Clients of both gateways come through relays that hold each way up, so that many calls are on their way when a
service says that it ends. Each client asks the other gateway if one has not run its request, which HTTP tells by 503
or a connection without an answer, gRPC by UNAVAILABLE. Nothing else may come of any request: no other status, no
answer that breaks off, no request that both gateways refuse. Every service must end by itself, with 0.
CHAOS_ROUNDS is how often all are replaced; CHAOS_SEED repeats the prompts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

from support.tcp_relay import tcp_relay

from chaos.fronts import Ending, Front, GrpcFront, HttpFront, Wanted
from chaos.gateway_world import GATEWAYS, World
from chaos.members import kill_all

ROUNDS: Final = int(os.environ.get("CHAOS_ROUNDS", "2"))
SEED: Final = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
DELAY_SECONDS: Final = 0.01
CLIENTS: Final = 12
"""Of each kind; each has connections of its own, and starts at one or the other gateway."""
SETTLE_SECONDS: Final = 2.0
"""Between two replacements: what an orchestrator's readiness probe takes."""
NOT_RUN: Final = ("UNAVAILABLE", "503", "ServerDisconnectedError", "ClientConnectorError", "ClientOSError")
"""How clients are told that a request was not run."""
SERVICES: Final = (*GATEWAYS, "indexer", "scheduler")


class Client:
    """One client: it asks the gateway that answered last, and the other one if that has not run a request."""

    def __init__(self, fronts: Sequence[Front], rng: Random) -> None:
        self._fronts = list(fronts)
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Ask one request after the other until cancelled."""
        while True:
            await self._ask(Wanted.drawn(self._rng))
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))

    async def _ask(self, wanted: Wanted) -> None:
        refused: list[str] = []
        for front in tuple(self._fronts):
            ending = await front.ask(wanted)
            if ending.outcome != "failed":
                self.outcomes[ending.outcome if not refused else "whole elsewhere"] += 1
                return
            refused.append(f"{front.name}: {ending.why}")
            if not was_not_run(ending):
                break
            self._fronts.reverse()
        self.outcomes["failed"] += 1
        self.wrong.append("; ".join(refused))

    async def close(self) -> None:
        """Close the connections."""
        for front in self._fronts:
            await front.close()


def was_not_run(ending: Ending) -> bool:
    """Return whether a failure says that the request was not run, so that it may be tried elsewhere."""
    return not ending.begun and ending.why.startswith(NOT_RUN)


async def run(rounds: int, seed: int) -> list[str]:
    """Replace all services so many times; return what is wrong."""
    rng = Random(seed)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscout-chaos-"))
        world = World(Path(folder), rng)
        stack.push_async_callback(kill_all, world.members)
        await world.start()
        clients = await _clients(world, rng, stack)
        running = [asyncio.create_task(client.run()) for client in clients]
        try:
            await asyncio.sleep(SETTLE_SECONDS)
            for turn, name in itertools.product(range(rounds), SERVICES):
                world.defects += [f"{name}: {one}" for one in world.services[name].defects()]
                await world.services[name].stop()
                await world.services[name].start()
                print(f"  round {turn + 1}: {name} replaced", flush=True)
                await asyncio.sleep(SETTLE_SECONDS)
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
        wrong = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
        wrong += [why for client in clients for why in client.wrong]
        wrong += world.defects
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        print(f"  {dict(outcomes)}")
        return wrong


async def _clients(world: World, rng: Random, stack: AsyncExitStack) -> list[Client]:
    grpc_at: dict[str, str] = {}
    http_at: dict[str, str] = {}
    for name in GATEWAYS:
        for addresses, target in ((grpc_at, world.addresses[name]), (http_at, world.http_address(name))):
            relay = await stack.enter_async_context(tcp_relay(target, delay_seconds=DELAY_SECONDS))
            addresses[name] = relay.address
    clients = []
    for number in range(CLIENTS):
        names = GATEWAYS if number % 2 else GATEWAYS[::-1]
        kinds: tuple[list[Front], ...] = (
            [GrpcFront(name, grpc_at[name]) for name in names],
            [HttpFront(f"{name} http", name, f"http://{http_at[name]}", begins_with_headers=False) for name in names],
        )
        for fronts in kinds:
            clients.append(Client(fronts, Random(rng.randrange(2**32))))
            stack.push_async_callback(clients[-1].close)
    return clients


def main() -> int:
    """Run the upgrade; 0 if no client has noticed it."""
    print(f"CHAOS_SEED={SEED} CHAOS_ROUNDS={ROUNDS}", flush=True)
    wrong = asyncio.run(run(ROUNDS, SEED))
    for line in wrong:
        print("WRONG:", line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
