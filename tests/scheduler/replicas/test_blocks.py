"""Hashes of blocks between replicas: told once, found again, and asked for by whoever does not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.replica_world import Node, World
from support.scheduler_builders import key, owner, reservation
from support.seeds import test_seed

from kvscout.v1 import replication_pb2
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_scheduler.replicas.blocks import KEPT_SECONDS, MAX_KEPT_BYTES, KnownBlocks, RecentBlocks, UnknownBlocks
from kvscout_scheduler.replicas.claim import claim_from_proto, claim_to_proto
from kvscout_scheduler.replicas.replication import OutgoingMessage
from kvscout_scheduler.replicas.view import CHANGE_WORK, SILENT_SECONDS, SLICE_WORK
from kvscout_scheduler.values.request import pack_hashes
from kvscout_scheduler.values.reservation import RequestKey

BLOCKS = 256
"""2 KiB of hashes a request."""


class Counting(World):
    """Counts bytes by sender; replicas in `older` are of a release that does not read claims without hashes."""

    def __init__(self, *names: str, older: str = "", seed: int = 0) -> None:
        self.bytes = dict.fromkeys(names, 0)
        self.older = older
        super().__init__(*names, seed=seed)
        # Whoever is there has shown by now.
        self.run(SILENT_SECONDS + 1)

    def outgoing(self, node: Node) -> list[OutgoingMessage]:
        sent = super().outgoing(node)
        self.bytes[node.name] = self.bytes.get(node.name, 0) + sum(len(each.payload) for each in sent)
        if node.name in self.older:
            sent = [each._replace(payload=as_of_an_older_release(each.payload)) for each in sent]
        return sent

    def start(self, name: str, *, clock_behind_seconds: float = 0.0) -> Node:
        node = super().start(name, clock_behind_seconds=clock_behind_seconds)

        def unreadable(key: RequestKey, attempt_id: int, known: KnownBlocks) -> bytes:
            raise AssertionError(f"{name} does not read such claims")

        if name in self.older:
            node.replication.ownership.blocks_of = unreadable  # type: ignore[method-assign]
        return node

    def sent(self, name: str) -> int:
        """Bytes that a replica sent since this was asked last."""
        sent, self.bytes[name] = self.bytes[name], 0
        return sent


def as_of_an_older_release(payload: bytes) -> bytes:
    message = replication_pb2.ReplicaMessage.FromString(payload)
    if message.HasField("heartbeat"):
        message.heartbeat.ClearField("reads_known_blocks")
    if message.HasField("snapshot_request"):
        message.snapshot_request.ClearField("known_sequence")
    return message.SerializeToString()


def book_many(world: World, at: str, number: int = 100) -> list[str]:
    """Long prompts of one gateway."""
    names = [f"r{each}" for each in range(number)]
    world[at].core.connect_owner(owner("g"), [])
    for name in names:
        world.book(at, name, blocks=BLOCKS, shared=8, owner=owner("g"))
    return names


def move(world: World, to: str, names: list[str]) -> None:
    """Their gateway goes to another replica."""
    _, unknown = world[to].core.connect_owner(owner("g"), [(key(name), 1) for name in names])
    assert unknown == []


def test_a_takeover_and_what_follows_it_leave_out_the_hashes_that_everyone_has() -> None:
    world = Counting("a", "b", "c")
    world.run(0.1)
    world.sent("a")
    names = book_many(world, "a")
    world.run(0.1)
    hashes = 8 * BLOCKS * len(names)
    assert world.sent("a") > hashes
    world.sent("b")
    move(world, "b", names)
    world.settled()
    move(world, "c", names)
    world.settled()
    move(world, "c", names)
    world.settled()
    assert world.sent("a") + world.sent("b") + world.sent("c") < 0.3 * hashes
    assert all(booking.reservation.block_hashes for node in world.nodes.values() for booking in node.core.bookings)


def test_a_joiner_gets_all_hashes_and_who_missed_something_only_what_it_missed() -> None:
    world = Counting("a", "b")
    names = book_many(world, "a")
    world.run(1)
    world.sent("a")
    world.start("c")
    world.settled()
    assert world.sent("a") > 8 * BLOCKS * len(names)
    world["c"].cut_off = True
    world.book("a", "missed", blocks=BLOCKS)
    world.run(0.1)
    world.sent("a")
    world.settled()
    assert world["c"].replication.status()[1].snapshots == 2
    assert 8 * BLOCKS < world.sent("a") < 0.3 * 8 * BLOCKS * len(names)


def test_who_does_not_have_the_hashes_of_a_request_that_is_taken_over_gets_them_with_a_snapshot() -> None:
    world = Counting("a", "b", "c")
    world.run(0.1)
    world["c"].cut_off = True
    names = book_many(world, "a", 20)
    world.run(0.05)
    world.kill("a")
    world["c"].cut_off = False
    move(world, "b", names)
    world.run(0.005)
    assert world["c"].state() == {}, "it waits for them"
    world.settled()
    assert set(world["c"].state()) == set(names)
    assert [view.snapshots for view in world["c"].replication.views.values() if view.of.replica_id == "b"] == [1]


def test_who_hears_of_the_end_before_the_takeover_has_kept_the_hashes() -> None:
    world = Counting("a", "b", "c")
    world.run(0.1)
    names = book_many(world, "a", 20)
    world.run(0.1)
    view = world["c"].replication.views[world["a"].replication.me]
    batch = replication_pb2.EventBatch(first_sequence=view.sequence + 1)
    for name in names:
        claim = view.claims[key(name)]
        batch.events.add().free.request.CopyFrom(claim_to_proto(claim).request)
    world["c"].replication.receive(world["a"].replication.message(events=batch))
    assert world["c"].state() == {}
    move(world, "b", names)
    world.run(0.005)
    assert set(world["c"].state()) == set(names)
    assert all(view.snapshots == 0 for view in world["c"].replication.views.values() if view.of.replica_id == "b")


def test_hashes_of_the_same_attempt_elsewhere_are_not_taken_for_its_own() -> None:
    world = Counting("a", "b")
    world.book("a", "r", blocks=4)
    world.run(0.1)
    claim = world["a"].replication.ownership.log.claims[key("r")]
    message = claim_to_proto(claim, known=True)
    find = world["b"].replication.ownership.blocks_of
    assert claim_from_proto(message, find) == claim
    message.known_blocks_crc ^= 1
    with pytest.raises(UnknownBlocks):
        claim_from_proto(message, find)
    message.block_hashes = claim.reservation.block_hashes
    with pytest.raises(InvalidArgument, match="block_hashes"):
        claim_from_proto(message, find)


def test_a_replica_of_an_older_release_is_told_all_hashes() -> None:
    world = Counting("a", "b", "c", older="c")
    world.run(0.1)
    names = book_many(world, "a", 20)
    world.run(0.1)
    move(world, "b", names)
    world.settled()
    # It has them, and tells them on.
    world.kill("a")
    world.kill("b")
    move(world, "c", names)
    world.start("d")
    world.settled()
    assert all(len(booking.reservation.block_hashes) == 8 * BLOCKS for booking in world["d"].core.bookings)


def test_a_large_snapshot_takes_effect_in_slices_and_events_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Counting("a", "b")
    for number in range(700):
        world.book("a", f"r{number}", worker_id=f"w{number % 3}")
    world.run(0.5)
    core, replication = world.start("c").core, world["c"].replication
    steps: list[int] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            before = len(core.bookings)
            result = call(*args)
            if len(core.bookings) > before:
                steps.append(len(core.bookings) - before)
            return result

        return called

    monkeypatch.setattr(replication, "receive", counted(replication.receive))
    monkeypatch.setattr(replication, "take", counted(replication.take))
    meanwhile = False
    for _ in range(300):
        world.step(0.001)
        view = replication.views.get(world["a"].replication.me)
        if view is not None and view.replacing and not meanwhile:
            meanwhile = True
            assert 0 < len(core.bookings) < 700
            world.free("a", "r0")
            world.book("a", "s")
            asked = replication_pb2.ReplicaSnapshotRequest(request_id=7, of_replica_id="a", of_epoch=view.of.epoch)
            replication._reply("b", asked)
            assert not replication._replies, "its claims are those of no one event"
    assert meanwhile
    assert sum(steps) == 700
    assert max(steps) <= SLICE_WORK // CHANGE_WORK
    world.settled()
    assert {"s"} <= set(world["c"].state())
    assert "r0" not in world["c"].state()


def test_what_was_missed_and_comes_while_a_snapshot_takes_effect_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvscout_scheduler.replicas.view.SLICE_WORK", 40)
    world = World("a", "b")
    for number in range(600):
        world.book("a", f"r{number}", worker_id=f"w{number % 3}")
    world.run(0.5)
    view = world["b"].replication.views[world["a"].replication.me]
    world.book("a", "late")
    (late,) = world["a"].replication.take()
    world.book("a", "s")
    while not view.replacing:
        world.step(0.001)
    world["b"].replication.receive(late.payload)
    world.free("a", "late")
    world.step(0.001)
    assert view.replacing
    world.settled()
    assert view.snapshots == 1
    assert "late" not in world["b"].state()


def test_what_diverged_is_repaired_though_events_never_stop() -> None:
    world = World("a", "b")
    for number in range(600):
        world.book("a", f"r{number}", worker_id=f"w{number % 3}")
    world.run(0.5)
    view = world["b"].replication.views[world["a"].replication.me]
    view._put(view.claims[key("r0")]._replace(output_blocks=9), late=False)
    world["b"].replication.ownership.settle()
    view.diverged = True
    for number in range(500):
        world.book("a", f"s{number}")
        world.step(0.001)
    assert view.snapshots == 1
    assert not view.diverged
    world.settled()


@pytest.mark.parametrize("older", ["", "c"])
@pytest.mark.parametrize("run", range(2))
def test_s8_replicas_agree_whatever_is_lost_of_requests_that_move_to_and_fro(
    run: int, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_scheduler.replicas.view.SLICE_WORK", 40)
    world = Counting("a", "b", "c", older=older, seed=test_seed() + run)
    rng = world.rng
    world.faults(loss=0.15, repeats=0.1, delay_seconds=0.01)
    names: list[str] = []
    for step in range(600):
        at = rng.choice("abc")
        match rng.randrange(5):
            case 0 | 1:
                names.append(f"r{step}")
                world.book(at, names[-1], worker_id=rng.choice(world.workers), blocks=rng.randint(2, 9), shared=2)
            case 2 if names:
                name = names.pop(rng.randrange(len(names)))
                world.free(at, name)
            case 3:
                world[at].core.connect_owner(
                    owner("g"), [(key(name), 1) for name in rng.sample(names, len(names) // 2)]
                )
            case 4 if names:
                try:
                    world[at].core.mark_prefill_complete(key(rng.choice(names)), 1)
                except NotFound:
                    pass
        if rng.random() < 0.02:
            node = world[rng.choice("abc")]
            node.cut_off = not node.cut_off
            if not node.cut_off:
                node.replication.query()
        if rng.random() < 0.005:
            world.kill(name := rng.choice("abc"))
            world.start(name)
        world.run(rng.choice((0.001, 0.005, 0.02)))
    world.settled()


def test_kept_hashes_are_bounded_in_time_and_bytes() -> None:
    recent, megabyte = RecentBlocks(), pack_hashes([7] * 131_072)
    for number in range(100):
        recent.keep(key(f"r{number}"), 1, megabyte, now=number / 100)
    held = [number for number in range(100) if recent.get(key(f"r{number}"), 1)]
    assert held == list(range(100 - MAX_KEPT_BYTES // len(megabyte), 100))
    recent.expire(0.5 + KEPT_SECONDS)
    assert [number for number in held if recent.get(key(f"r{number}"), 1)] == list(range(51, 100))
    assert KnownBlocks(0, 0).fit(recent.get(key("r99"), 2))


def test_a_reservation_of_another_attempt_tells_its_own_hashes() -> None:
    world = Counting("a", "b")
    world.book("a", "r", attempt=1, blocks=5)
    world.run(0.1)
    world.free("b", "r", attempt=1)
    world["b"].core.reserve(reservation("r", "w1", 100, pack_hashes([1, 2, 3]), 2))
    world.settled()
    booking = world["a"].core.bookings.find(key("r"))
    assert booking is not None
    assert booking.reservation.block_hashes == pack_hashes([1, 2, 3])
