"""Delay until another replica of the scheduler sees a booking: two processes, a real NATS on loopback.

One replica books requests at a fixed rate, marks their prefill and frees them; the other notes when each becomes load
there. Both read CLOCK_MONOTONIC, which is one clock for the machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import uvloop

from kvscout_bench.service_process import NatsProcess
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.worker import WorkerSpec
from kvscout_lab.statistics import percentile
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.replicas.replicas import Replicas
from kvscout_scheduler.replicas.replication import Replication
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import Prompt, SelectionRequest, pack_hashes

WORKERS = 8
BLOCKS = 64
BLOCK_SIZE = 16
IN_FLIGHT = 500
"""Requests active at once."""
DEADLINE_SECONDS = 30.0


def visible_seconds(requests: int, per_second: float) -> float:
    """Book requests at one replica; return the 99th percentile of the seconds until another one counts their load.

    Args:
        requests: Number of requests.
        per_second: Rate of requests, each of three events; overdue ones are sent at once.

    Raises:
        DriverFailed: There is no nats-server.
        TimeoutError: They were not all seen within `DEADLINE_SECONDS`.
    """
    spawn = multiprocessing.get_context("spawn")
    with NatsProcess() as nats:
        ours, theirs = zip(*(spawn.Pipe() for _ in range(2)), strict=True)
        processes = [
            spawn.Process(target=_writer, args=(nats.url, theirs[0], requests, per_second), daemon=True),
            spawn.Process(target=_reader, args=(nats.url, theirs[1], requests), daemon=True),
        ]
        for process in processes:
            process.start()
        try:
            for connection in ours:
                _receive(connection)
            ours[0].send("go")
            booked: dict[str, float] = _receive(ours[0])
            seen: dict[str, float] = _receive(ours[1])
        finally:
            for process in processes:
                process.terminate()
                process.join()
    delays = sorted(seen[name] - at for name, at in booked.items())
    return percentile(delays, 99) or 0.0


def _receive(connection: Connection) -> dict[str, float]:
    if not connection.poll(DEADLINE_SECONDS):
        raise TimeoutError(f"a replica said nothing for {DEADLINE_SECONDS:g} s")
    answer: dict[str, float] = connection.recv()
    return answer


def _writer(url: str, parent: Connection, requests: int, per_second: float) -> None:
    uvloop.run(_write(url, parent, requests, per_second))


async def _write(url: str, parent: Connection, requests: int, per_second: float) -> None:
    core, replicas, run = _replica(url, "writer")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run())
        await replicas.link.join()
        parent.send({})
        await asyncio.to_thread(parent.recv)
        rng, booked, active = Random(7), {}, deque[SelectionRequest]()
        began = time.monotonic()
        for number in range(requests):
            due = began + number / per_second
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            hashes = pack_hashes(rng.randrange(1 << 63) for _ in range(BLOCKS))
            request = SelectionRequest(
                "bench", BLOCKS * BLOCK_SIZE, Prompt(hashes), request_id=f"r{number}", attempt_id=1
            )
            booked[request.request_id] = time.monotonic()
            core.select_and_reserve(request)
            active.append(request)
            core.mark_prefill_complete(request.key, 1)
            if len(active) > IN_FLIGHT:
                core.free(active.popleft().key, 1)
        await asyncio.sleep(0.1)
        parent.send(booked)


def _reader(url: str, parent: Connection, requests: int) -> None:
    uvloop.run(_read(url, parent, requests))


async def _read(url: str, parent: Connection, requests: int) -> None:
    core, replicas, run = _replica(url, "reader")
    seen: dict[str, float] = {}
    complete = asyncio.Event()
    add_mirror = core.bookings.add_mirror

    def observed(booking: Booking) -> None:
        add_mirror(booking)
        seen[booking.key.request_id] = time.monotonic()
        if len(seen) == requests:
            complete.set()

    core.bookings.add_mirror = observed  # type: ignore[method-assign]  # measured where the load is known
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run())
        await replicas.link.join()
        parent.send({})
        await complete.wait()
        parent.send(seen)


def _replica(url: str, name: str) -> tuple[Scheduler, Replicas, Callable[[], Coroutine[Any, Any, None]]]:
    """Return a replica, and what runs it."""
    core = Scheduler(clock=time.monotonic, rng=Random(7))
    replication = Replication(core, name)
    for number in range(WORKERS):
        core.workers.worker_added(WorkerSpec(worker_id=f"w{number}", model="bench", block_size=BLOCK_SIZE))
    link = NatsLink(NatsConfig(servers=(url,)), name)
    replicas = Replicas(core, replication, link)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.run())
            tasks.create_task(replicas.link.run())

    return core, replicas, run
