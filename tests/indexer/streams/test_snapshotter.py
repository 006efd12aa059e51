"""The lock of snapshots: one replica has it, for as long as that takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.stream_world import World, stream_world

from kvscout_indexer.streams import snapshotter
from kvscout_indexer.streams.snapshotter import HeldLock, SnapshotLock

DEADLINE_SECONDS = 30.0
KEY = "snapshot.a.b.0of1"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with stream_world() as started:
        yield started


def lock(world: World, holder: str) -> SnapshotLock:
    return SnapshotLock(world.js, "locks", KEY, holder, 1)


async def test_a_lock_that_is_renewed_outlives_its_time_and_one_that_is_not_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "LOCK_SECONDS", 2.4)
    ours, theirs = lock(world, "ours"), lock(world, "theirs")
    first = await ours.acquire()
    assert first is not None
    held = HeldLock(ours, first)
    renewing = asyncio.create_task(held.renew())
    async with asyncio.timeout(DEADLINE_SECONDS):
        # Each renewal takes a third of the lock's time.
        while held.revision < first + 4:
            await asyncio.sleep(0.05)
            assert await theirs.acquire() is None
        renewing.cancel()
        while (taken := await theirs.acquire()) is None:
            await asyncio.sleep(0.05)
    assert await ours.renew(held.revision) is None
    await ours.release(held.revision)
    assert await ours.acquire() is None
    await theirs.release(taken)
    assert await ours.acquire() is not None
