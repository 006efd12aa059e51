"""A registration that lives as long as its process, over a real NATS."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.processes import eventually
from support.registry_world import NAME, A, Node, making_world

from kvscout_common.registry.worker_bucket import Gone, Stored
from kvscout_common.registry.worker_lease import WorkerLease


@asynccontextmanager
async def keeping(lease: WorkerLease) -> AsyncIterator[WorkerLease]:
    """As a process keeps it that is killed in the end: nothing is removed."""
    task = asyncio.create_task(lease.run())
    try:
        async with asyncio.timeout(30):
            await lease.registered.wait()
        yield lease
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def stored(node: Node) -> Stored:
    found = await node.bucket.get(NAME)
    assert isinstance(found, Stored), found
    return found


async def test_it_is_kept_while_the_process_lives_and_ends_with_it() -> None:
    async with making_world() as world:
        bridge, service = await world.node("n"), await world.node("n")
        async with keeping(WorkerLease(bridge.link, A, lease_seconds=1)):
            await service.until(lambda: service.worker_ids == ["a"])
            first = (await stored(service)).revision

            async def renewed_often() -> bool:
                return (await stored(service)).revision >= first + 6

            await eventually(renewed_often)
            assert service.received == ["+a"]
        await service.until(lambda: service.received == ["+a", "-a:lease"])
        again = WorkerLease(bridge.link, A, lease_seconds=60)
        async with keeping(again):
            await service.until(lambda: service.worker_ids == ["a"])
        await again.remove()
        await service.until(lambda: service.received[-1] == "-a:nats")


async def test_changes_are_written_at_once_and_draining_is_kept() -> None:
    async with making_world() as world:
        node = await world.node("n")
        async with keeping(WorkerLease(node.link, A, lease_seconds=60)) as lease:
            await node.until(lambda: node.worker_ids == ["a"])
            await node.shared.set_draining(*NAME, True)
            lease.update(replace(A, total_kv_blocks=5))
            await node.until(lambda: node.registry.get(*NAME).spec == replace(A, total_kv_blocks=5, draining=True))
            with pytest.raises(ValueError, match="is not"):
                lease.update(replace(A, worker_id="b"))
        # A process that starts again does not undo what an operator asked for either.
        async with keeping(WorkerLease(node.link, A, lease_seconds=60)):
            await node.until(lambda: node.registry.get(*NAME).spec == A.with_draining(True))


async def test_what_was_removed_stays_removed_until_a_new_process_registers_it() -> None:
    async with making_world() as world:
        node = await world.node("n")
        async with keeping(WorkerLease(node.link, A, lease_seconds=3)) as lease:
            await node.until(lambda: node.worker_ids == ["a"])
            await node.shared.remove(*NAME)
            await eventually(lambda: lease.removed)
            assert await node.bucket.get(NAME) is Gone.REMOVED
            assert "removed" in lease.problem and not lease.registered.is_set()
        async with keeping(WorkerLease(node.link, A, lease_seconds=3)):
            await node.until(lambda: node.worker_ids == ["a"])


async def test_it_survives_a_nats_that_lost_its_store() -> None:
    async with making_world() as world:
        node = await world.node("n")
        async with keeping(WorkerLease(node.link, A, lease_seconds=2)) as lease:
            await node.until(lambda: node.worker_ids == ["a"])
            await world.server.kill()
            await eventually(lambda: bool(lease.problem))
            await asyncio.to_thread(shutil.rmtree, world.server.store)
            await world.server.start()
            await node.until_followed()

            async def back() -> bool:
                return not lease.problem and isinstance(await node.bucket.get(NAME), Stored)

            await eventually(back)
            assert node.received == ["+a"]


async def test_a_value_that_cannot_be_read_is_replaced() -> None:
    async with making_world() as world:
        node = await world.node("n")
        await node.raw(node.link.names.worker_key(*NAME), b"\xff\xff")
        await node.until(lambda: node.shared.unreadable == 1)
        async with keeping(WorkerLease(node.link, A, lease_seconds=60)):
            await node.until(lambda: node.worker_ids == ["a"])
            assert node.shared.warnings() == []
