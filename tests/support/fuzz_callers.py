"""Random calls of running services, several at a time, with a look at the world meanwhile: what `rpc_fuzz` and
`http_fuzz` share."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc

from support.hostile_world import HostileWorld

CHECK_SECONDS = 1.0
REMEMBERED = 40
"""Last calls that a finding tells."""

C = TypeVar("C")


class Callers(Generic[C]):
    """Makes calls of one seed until the time is over.

    Args:
        world: The services, looked at once a second and at the end.
        seed: All calls follow from it and their numbers; how they interleave is not repeated.
        make: The call of a seed and number.
        send: Makes a call and judges the answer.
        count: Calls at a time.
    """

    def __init__(
        self,
        world: HostileWorld,
        seed: str,
        make: Callable[[str, int], C],
        send: Callable[[C], Awaitable[None]],
        *,
        count: int,
    ) -> None:
        self._world = world
        self._seed = seed
        self._make = make
        self._send = send
        self._count = count
        self._numbers = itertools.count()
        self._last: deque[C] = deque(maxlen=REMEMBERED)

    async def run(self, seconds: float) -> None:
        """Make calls for so long.

        Raises:
            AssertionError: A finding; tells the last calls.
        """
        deadline = time.monotonic() + seconds
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._call_until(deadline))
                group.create_task(self._watch(deadline))
            await self._world.check()
        except (AssertionError, grpc.aio.AioRpcError, ExceptionGroup) as error:
            calls = "\n".join(map(str, self._last))
            leaves = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
            raise AssertionError(f"{leaves[0]!r}\nFUZZ_SEED={self._seed}, the last calls:\n{calls}") from error

    async def _watch(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            await self._world.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def _call_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            call = self._make(self._seed, next(self._numbers))
            self._last.append(call)
            await self._send(call)


def seconds_and_seed() -> tuple[float, str]:
    """Read `FUZZ_SECONDS` and `FUZZ_SEED`, and print what they are."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "3600"))
    seed = os.environ.get("FUZZ_SEED", str(random.SystemRandom().randrange(2**32)))
    print(f"FUZZ_SEED={seed} FUZZ_SECONDS={seconds:g}", flush=True)
    return seconds, seed
