"""Indexers and schedulers behind a name: they come and go while the gateway runs, and nothing is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from support.free_ports import free_ports
from support.openai_stack import scheduler_of
from support.processes import eventually, running

from kvscout.v1 import workers_pb2
from kvscout_common.registry.backends import Backends
from kvscout_common.rpc.channel import call
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import Transport, WorkerSpec
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.members import membership

A, B = "127.0.0.2", "127.0.0.3"
WORKER = WorkerSpec("w", "m", 16, transport=Transport.NONE)


class Names:
    """A resolver that answers as told."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | OSError = addresses

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert host == "helpers.test"
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


class World:
    """A gateway in this process, and what its name resolves to."""

    def __init__(self, gateway: Gateway, names: Names) -> None:
        self.gateway = gateway
        self.names = names

    @property
    def members(self) -> list[tuple[str, str]]:
        return sorted((m.kind, m.address.partition(":")[0]) for m in self.gateway.membership.members)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await eventually(condition, what=what)

    async def until_told(self, *hosts: str) -> None:
        """Waits until every indexer and scheduler at these hosts lists the worker."""

        async def told() -> bool:
            if self.members != sorted((kind, host) for kind in ("indexer", "scheduler") for host in hosts):
                return False
            answers = [
                await call(member.stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=5)
                for member in self.gateway.membership.members
            ]
            return all([entry.worker.worker_id for entry in answer.workers] == ["w"] for answer in answers)

        await eventually(told, what=f"{hosts} know the worker; there are {self.members}")


@asynccontextmanager
async def gateway(names: Names, indexer_port: int, scheduler_port: int) -> AsyncIterator[World]:
    config = GatewayConfig(
        indexers=((f"dns://helpers.test:{indexer_port}",),),
        schedulers=(f"dns://helpers.test:{scheduler_port}",),
    )
    made = Gateway(config, CollectorRegistry(), Backends.of_process("kvscout-gateway", config.server, None))
    made.membership._resolve = names
    tasks = [asyncio.create_task(run(), name=name) for name, run in made.tasks().items()]
    try:
        yield World(made, names)
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await made.close()


async def test_helpers_behind_a_name_are_told_and_used_as_they_come_and_let_go_of_as_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "RESOLVE_SECONDS", 0.05)
    indexer_port, scheduler_port = free_ports(2)

    async def start(stack: AsyncExitStack, host: str) -> None:
        await asyncio.gather(
            stack.enter_async_context(running("kvscout_indexer.main", "--host", host, "--port", str(indexer_port))),
            stack.enter_async_context(running("kvscout_scheduler.main", "--host", host, "--port", str(scheduler_port))),
        )

    async with AsyncExitStack() as stack:
        await start(stack, A)
        names = Names(A)
        async with gateway(names, indexer_port, scheduler_port) as world:
            await world.gateway.warm()
            world.gateway.registry.register(WORKER)
            await world.until_told(A)
            schedulers = scheduler_of(world.gateway).peers
            [first] = schedulers.members
            await world.until(lambda: schedulers.primary is first, "attached")

            await start(stack, B)
            names.addresses = [B, A]
            await world.until_told(A, B)
            assert schedulers.members[0] is first, "ordered by address, as at every gateway"
            assert [status.address for status in world.gateway.membership.statuses()] == [
                member.address for member in world.gateway.membership.members
            ]

            names.addresses = [B]
            await world.until_told(B)
            [second] = schedulers.members
            await world.until(lambda: schedulers.primary is second, "attached to the one that is left")
            assert first.stub.stream is None

            names.addresses = OSError("no such name")
            await world.until(lambda: len(world.gateway.membership.warnings()) == 2, "two warnings")
            assert "no such name" in shown(world.gateway.membership.warnings())[0]
            await world.until_told(B)
            names.addresses = [B]
            await world.until(lambda: not world.gateway.membership.warnings(), "no warnings")


async def test_of_very_many_addresses_some_are_used_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RESOLVE_SECONDS", 0.05)
    async with gateway(Names(*(f"127.0.1.{n}" for n in range(1, 200))), 9, 10) as world:
        await world.gateway.warm()
        assert len(world.members) == 2 * membership.MAX_ADDRESSES
        assert "more than 64 addresses" in shown(world.gateway.membership.warnings())[0]
