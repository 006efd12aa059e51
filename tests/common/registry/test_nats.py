"""The shared registry over a real NATS: who writes, who follows, and what happens when one of them goes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from nats.js.api import StreamConfig
from support.processes import eventually
from support.registry_world import NAME, A, World, making_world, until_listed, until_spec

from kvscout.v1 import workers_pb2
from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError, NotFound, Unavailable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.registry import Source, WorkerName
from kvscout_common.registry.worker_bucket import Gone, Stored
from kvscout_common.registry.worker_proto import spec_to_proto
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import EventEndpoint, WorkerSpec

B = WorkerSpec("b:1", "m", 16, tenant="team x")


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    async with making_world() as made:
        yield made


async def test_what_one_service_writes_every_service_shows(world: World) -> None:
    one, other = await world.node(), await world.node()
    assert await one.shared.register(A, 0)
    assert one.worker_ids == ["a"]  # shown where it was written when the call returns
    await until_listed(other, ["a"])
    assert not await other.shared.register(A, 0)
    await one.shared.register(B, 30)
    await other.until(lambda: other.worker_ids == ["a", "b:1"])
    entry = other.registry.get("team x", "b:1")
    assert (entry.source, entry.spec, entry.lease_seconds) == (Source.NATS, B, 30)
    await other.shared.update(replace(B, total_kv_blocks=7))
    await one.until(lambda: one.registry.get("team x", "b:1").spec.total_kv_blocks == 7)
    await one.shared.set_draining("team x", "b:1", True)
    await one.shared.set_draining("team x", "b:1", True)
    assert one.registry.get("team x", "b:1").spec.draining
    await other.shared.remove("team x", "b:1")
    await one.until(lambda: one.worker_ids == ["a"])
    late = await world.node()
    assert late.worker_ids == ["a"]
    assert late.received == ["+a"]
    assert one.received[-1] == "-b:1:nats"


async def test_namespaces_are_apart(world: World) -> None:
    one, elsewhere = await world.node("one"), await world.node("two")
    await one.shared.register(A, 0)
    await elsewhere.shared.register(B, 0)
    assert (one.worker_ids, elsewhere.worker_ids) == (["a"], ["b:1"])


async def test_a_registration_too_large_for_nats_is_refused(world: World) -> None:
    node = await world.node()
    with pytest.raises(InvalidArgument, match="bytes"):
        await node.shared.register(replace(A, labels={"x": "y" * 600_000}), 0)
    assert node.worker_ids == []


async def test_a_worker_that_is_not_there_cannot_be_changed(world: World) -> None:
    node = await world.node()
    for call in (node.shared.update(A), node.shared.remove(*NAME), node.shared.set_draining(*NAME, True)):
        with pytest.raises(NotFound):
            await call
    assert await node.shared.keep_alive("default", ["a", "a", "x"]) == ["a", "x"]
    assert node.worker_ids == []


async def test_a_lease_ends_everywhere_unless_any_service_renews_it(world: World) -> None:
    one, other = await world.node(), await world.node()
    await one.shared.register(A, 3)
    await one.shared.register(replace(A, worker_id="dead"), 3)
    for _ in range(5):  # more than a lease
        await asyncio.sleep(0.8)
        assert await other.shared.keep_alive("default", ["a"]) == []
    for node in (one, other):
        await until_listed(node, ["a"])
        assert node.received.count("-dead:lease") == 1
        assert "-a:lease" not in node.received
    assert await other.shared.keep_alive("default", ["dead"]) == ["dead"]
    assert await one.bucket.get(WorkerName("default", "dead")) is Gone.LOST


async def test_followers_tell_a_worker_that_was_taken_out_from_one_whose_lease_somebody_saw_end(world: World) -> None:
    node = await world.node()
    for name in ("ended", "removed"):
        stored = Stored(replace(A, worker_id=name), 60)
        stored = replace(stored, revision=await node.bucket.put(stored))
        await until_listed(node, [name])
        await (node.bucket.end(stored) if name == "ended" else node.bucket.remove(stored.name))
        await until_listed(node, [])
    assert [entry for entry in node.received if entry.startswith("-")] == ["-ended:lease", "-removed:nats"]


async def test_renewals_neither_bring_back_what_was_removed_nor_undo_a_change(world: World) -> None:
    node = await world.node()
    bucket = node.bucket
    first = Stored(A, 30)
    first = replace(first, revision=await bucket.put(first))
    await bucket.put(Stored(replace(A, draining=True), 30))
    renewed = await bucket.change(NAME, first)
    assert isinstance(renewed, Stored) and renewed.spec.draining
    await bucket.remove(NAME)
    assert await bucket.change(NAME, renewed) is Gone.REMOVED
    assert await bucket.change(NAME, None) is Gone.REMOVED
    assert await bucket.change(WorkerName("default", "never"), None) is Gone.LOST
    await node.until(lambda: node.worker_ids == [])
    assert await bucket.create(first) is None
    await bucket.put(first)
    await until_listed(node, [A.worker_id])
    kv, _ = await bucket.open()
    await kv.delete(node.link.names.worker_key(*NAME))  # as NATS' own tools do it
    assert await bucket.change(NAME, None) is Gone.REMOVED
    await until_listed(node, [])
    assert await node.shared.register(A, 30)


async def test_the_last_of_two_writers_wins_and_everyone_agrees(world: World) -> None:
    one, other = await world.node(), await world.node()
    writes = [
        node.shared.register(replace(A, total_kv_blocks=blocks), 30)
        for blocks, node in enumerate([one, other] * 20, start=1)
    ]
    await asyncio.gather(*writes)
    stored = await one.bucket.get(NAME)
    assert isinstance(stored, Stored)
    for node in (one, other):
        await until_spec(node, stored.spec)
        assert node.received[0] == "+a" and set(node.received[1:]) <= {"~a"}


async def test_concurrent_changes_of_one_worker_are_all_made(world: World) -> None:
    one, other = await world.node(), await world.node()
    await one.shared.register(A, 30)
    await other.until(lambda: other.worker_ids == ["a"])
    await asyncio.gather(
        one.shared.set_draining(*NAME, True), *(other.shared.keep_alive("default", ["a"]) for _ in range(5))
    )
    assert one.registry.get(*NAME).spec.draining
    await other.until(lambda: other.registry.get(*NAME).spec.draining)


async def test_nothing_is_lost_while_nats_is_away_and_the_dead_go_when_it_is_back(world: World) -> None:
    node = await world.node()
    for worker_id, lease in (("lasting", 0), ("alive", 3), ("dead", 3)):
        await node.shared.register(replace(A, worker_id=worker_id), lease)
    await world.server.kill()
    await node.until(lambda: node.shared.problem)
    node.skipped += 100
    for call in (node.shared.register(A, 3), node.shared.keep_alive("default", ["alive"])):
        with pytest.raises(Unavailable):
            await call
    await asyncio.sleep(3.5)  # the server ends what it held meanwhile: it does not know that nobody could renew
    assert node.worker_ids == ["alive", "dead", "lasting"]
    await world.server.start()
    await node.until_followed()
    assert node.worker_ids == ["alive", "dead", "lasting"]
    if await node.shared.keep_alive("default", ["alive"]):
        await node.shared.register(replace(A, worker_id="alive"), 60)
    node.skipped += 4
    await node.until(lambda: node.worker_ids == ["alive", "lasting"] or node.received[-1] == "-alive:lease")
    assert "-dead:lease" in node.received
    assert not [entry for entry in node.received if entry.startswith(("-alive", "-lasting"))]


async def test_a_nats_that_lost_its_store_is_filled_again(world: World) -> None:
    nodes = [await world.node(), await world.node()]
    await nodes[0].shared.register(replace(A, worker_id="lasting"), 0)
    await nodes[0].shared.register(replace(A, worker_id="leased"), 30)
    await nodes[1].until(lambda: len(nodes[1].worker_ids) == 2)
    await world.server.kill()
    await asyncio.to_thread(shutil.rmtree, world.server.store)
    await world.server.start()
    for node in nodes:
        await node.until_followed()
        assert node.worker_ids == ["lasting", "leased"]
    assert await nodes[1].shared.keep_alive("default", ["lasting", "leased"]) == ["leased"]
    await nodes[1].shared.register(replace(A, worker_id="leased"), 30)
    late = await world.node()
    assert late.worker_ids == ["lasting", "leased"]
    assert all(node.received == ["+lasting", "+leased"] for node in [*nodes, late])


async def test_a_bucket_that_is_deleted_is_made_again(world: World) -> None:
    nodes = [await world.node(), await world.node()]
    await nodes[0].shared.register(A, 0)
    js = (await nodes[0].link.require()).jetstream()
    await js.delete_key_value(nodes[0].link.names.workers_bucket)
    late = nodes[0]

    async def there_again() -> bool:
        return isinstance(await late.bucket.get(NAME), Stored)

    await eventually(there_again)
    for node in nodes:
        await node.until_followed()
    # A bucket that is new may have been followed before the worker was in it.
    await late.until(lambda: [node.received for node in nodes] == [["+a"], ["+a"]])
    assert not await nodes[1].shared.register(replace(A, total_kv_blocks=3), 0)
    await nodes[0].until(lambda: nodes[0].registry.get(*NAME).spec.total_kv_blocks == 3)


async def test_what_was_removed_while_a_follower_was_away_is_removed_there(world: World) -> None:
    one = await world.node()
    await one.shared.register(A, 0)
    await one.shared.register(B, 60)
    other = await world.node()
    await other.stop()
    await one.shared.remove(*NAME)
    await one.shared.remove("team x", "b:1")
    assert other.worker_ids == ["a", "b:1"]
    other.start()
    await other.until(lambda: other.worker_ids == [], "removals seen")


async def test_a_watch_that_broke_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_common.registry.nats.LAG_SECONDS", 1.0)
    one, other = await world.node(), await world.node()
    js = (await one.link.require()).jetstream()
    stream = f"KV_{one.link.names.workers_bucket}"
    for consumer in await js.consumers_info(stream):
        await js.delete_consumer(stream, consumer.name)
    # The client may have noticed by itself, by a heartbeat that did not come.
    with contextlib.suppress(Unavailable):
        await one.shared.register(A, 0)
    await other.until(lambda: other.worker_ids == ["a"])
    await one.until(lambda: one.worker_ids == ["a"])


async def test_a_worker_that_this_service_does_not_admit_is_told_and_skipped(world: World) -> None:
    node, other = await world.node(), await world.node()
    node.registry.admit = lambda spec: spec.require_allowed(())
    await other.shared.register(replace(A, event_endpoints=(EventEndpoint(0, "ipc:///run/kv"),)), 0)
    await other.shared.register(B, 0)
    await node.until(lambda: node.worker_ids == ["b:1"])
    assert node.shared.unreadable == 1
    assert any("--allow-event-endpoints ipc" in warning for warning in shown(node.shared.warnings()))
    await other.shared.register(A, 0)
    await node.until(lambda: node.worker_ids == ["a", "b:1"])
    assert shown(node.shared.warnings()) == []


async def test_values_that_cannot_be_read_are_told_and_harm_nobody_else(world: World) -> None:
    node = await world.node()
    await node.shared.register(A, 0)
    key = node.link.names.worker_key(*NAME)
    newer = workers_pb2.StoredWorker(version=2, worker=spec_to_proto(replace(A, total_kv_blocks=9)))
    misplaced = workers_pb2.StoredWorker(version=1, worker=spec_to_proto(B))
    for broken_key, value in (
        (key, newer.SerializeToString()),
        (node.link.names.worker_key("default", "junk"), b"\xff\xff"),
        (node.link.names.worker_key("default", "misplaced"), misplaced.SerializeToString()),
        (node.link.names.worker_key("default", "empty"), b""),
        ("what.is.this", b"x"),
    ):
        await node.raw(broken_key, value)
    await node.until(lambda: node.shared.unreadable == 5)
    assert node.worker_ids == ["a"]
    assert node.registry.get(*NAME).spec == A  # the last that could be read
    [warning] = shown(node.shared.warnings())
    assert warning.startswith("5 values") and "version" in warning
    assert await node.shared.keep_alive("default", ["junk"]) == ["junk"]
    late = await world.node()
    assert late.worker_ids == []
    await node.shared.register(A, 0)
    await node.shared.register(replace(A, worker_id="junk"), 0)
    await node.until(lambda: shown(node.shared.warnings())[0].startswith("3 values"))


async def test_a_file_wins_and_what_it_hid_comes_back(world: World) -> None:
    one, other = await world.node(), await world.node()
    of_file = replace(A, total_kv_blocks=1)
    one.registry.replace_source(Source.FILE, [of_file])
    await other.shared.register(A, 0)
    with pytest.raises(FailedPrecondition, match="file"):
        await one.shared.register(A, 0)
    for call in (one.shared.update(A), one.shared.remove(*NAME)):
        with pytest.raises(FailedPrecondition):
            await call
    await one.shared.set_draining(*NAME, True)
    assert one.registry.get(*NAME).spec == of_file.with_draining(True)
    assert not other.registry.get(*NAME).spec.draining
    one.registry.replace_source(Source.FILE, [])
    await one.until(lambda: one.worker_ids == ["a"])
    assert one.registry.get(*NAME).source is Source.NATS
    assert one.received == ["+a", "~a", "-a:file", "+a"]


async def test_where_the_server_keeps_no_time_followers_delete_what_ended(world: World) -> None:
    server_link = NatsLink(NatsConfig((world.server.url,), "test"), "operator")
    run = asyncio.create_task(server_link.run())
    try:
        await eventually(lambda: server_link.connected)
        bucket = server_link.names.workers_bucket
        await (
            (await server_link.require())
            .jetstream()
            .add_stream(
                StreamConfig(
                    name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1, allow_rollup_hdrs=True
                )
            )
        )
        node = await world.node()
        await node.shared.register(A, 2)
        await node.shared.register(replace(A, worker_id="lasting"), 0)

        async def ended() -> bool:
            try:
                return await node.bucket.get(NAME) is Gone.LOST
            except KvscoutError:
                return False

        await eventually(ended)
        assert node.received == ["+a", "+lasting", "-a:lease"]
        await node.shared.remove("default", "lasting")
        assert await node.bucket.get(WorkerName("default", "lasting")) is Gone.REMOVED
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await server_link.close()


async def test_a_server_that_stands_still_ends_no_lease(world: World) -> None:
    node = await world.node()
    await node.shared.register(A, 3)
    world.server.pause()
    try:
        await node.until(lambda: node.shared.problem)
        node.skipped += 100
        assert node.worker_ids == ["a"]
    finally:
        world.server.resume()
    await node.until(lambda: not node.shared.problem)
    assert node.received == ["+a"]


async def test_hundreds_of_workers_are_registered_renewed_and_read(world: World) -> None:
    one = await world.node()
    ids = [f"w{number}" for number in range(400)]
    for start in range(0, len(ids), 100):
        await asyncio.gather(
            *(one.shared.register(replace(A, worker_id=worker_id), 60) for worker_id in ids[start : start + 100])
        )
    other = await world.node()
    assert other.worker_ids == sorted(ids)
    assert await other.shared.keep_alive("default", ids) == []
