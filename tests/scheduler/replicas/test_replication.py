"""Replicas of the scheduler, in simulated time: who owns what, what others see of it, and what survives faults."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from google.protobuf.message import DecodeError
from support.hostile_messages import HostileMessages
from support.replica_world import Node, World, decoding
from support.scheduler_builders import BLOCK, MODEL, key, owner
from support.scheduler_builders import request as selection_request
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout.v1 import replication_pb2, types_pb2
from kvscout_common.errors import AlreadyExists, Cancelled, NotFound
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.replicas.forwarding import Forwarding
from kvscout_scheduler.replicas.ownership import END_WORK, SECOND_TO_END_SECONDS
from kvscout_scheduler.replicas.ownership import SLICE_WORK as OVERDUE_WORK
from kvscout_scheduler.replicas.replication import FORGET_SECONDS, IDLE_HEARTBEAT_SECONDS, TICK_SECONDS, VERSION
from kvscout_scheduler.replicas.view import SILENT_SECONDS
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.rpc.operations import Operations
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import AddOutput, CompletePrefill, Free, Operation, Outcome, Select
from kvscout_scheduler.values.reservation import FreeOutcome
from kvscout_scheduler.values.settings import SchedulerSettings

IDLE = (0, 0, 0)


def test_what_one_replica_books_weighs_on_all_until_it_is_freed() -> None:
    world = World("a", "b", "c")
    world.book("a", "r", blocks=2)
    world.run(0.005)
    assert world["b"].loads() == world["a"].loads() == world["c"].loads()
    assert world["b"].loads()["w0"] == (1, 2 * BLOCK + 3, 3)
    world["a"].core.mark_prefill_complete(key("r"), 1)
    world["a"].core.add_output(key("r"), 4, 1)
    world.run(0.005)
    assert decoding(world, "c", "r")
    assert world["c"].loads()["w0"] == (1, 0, 7)
    assert world.free("a", "r") is FreeOutcome.FREED
    world.settled()
    assert set(world["b"].loads().values()) == {IDLE}


def test_shared_blocks_of_requests_at_different_replicas_count_once() -> None:
    world = World("a", "b")
    world.book("a", "r", blocks=4, shared=3)
    world.book("b", "s", blocks=4, shared=3)
    world.settled()
    # Three shared, one each, and a partial one each.
    assert world["a"].loads()["w0"][2] == 3 + 2 + 2


def test_a_call_at_another_replica_takes_the_request_over_and_the_owner_yields() -> None:
    world = World("a", "b")
    world.book("a", "r")
    world.run(0.005)
    assert world["b"].replication.ownership.remote_owner(key("r")) == world["a"].replication.me
    assert world["b"].core.mark_prefill_complete(key("r"), 1)
    world.settled()
    assert world["a"].replication.ownership.remote_owner(key("r")) == world["b"].replication.me
    assert decoding(world, "a", "r")
    assert world["b"].replication.ownership.taken_over_count == 1
    assert world.free("b", "r") is FreeOutcome.FREED
    world.settled()
    assert world["a"].state() == {}


def test_a_request_that_two_replicas_take_over_at_once_has_one_owner_in_the_end() -> None:
    world = World("a", "b", "c")
    world.book("a", "r")
    world.run(0.005)
    world["b"].core.mark_prefill_complete(key("r"), 1)
    world["c"].core.mark_prefill_complete(key("r"), 1)
    world.settled()
    owners = {name: world[name].replication.ownership.remote_owner(key("r")) for name in "abc"}
    # Same term: the higher replica id.
    assert owners == {"a": world["c"].replication.me, "b": world["c"].replication.me, "c": None}


def test_a_request_booked_at_two_replicas_at_once_is_booked_once() -> None:
    world = World("a", "b")
    world.book("a", "r", worker_id="w0", attempt=1)
    world.book("b", "r", worker_id="w1", attempt=2)
    world.settled()
    assert world["a"].loads()["w0"] == IDLE
    assert world["a"].loads()["w1"][0] == 1
    assert world["a"].core.stats.ended == {"superseded": 1}


def test_a_repeated_booking_call_at_another_replica_gets_the_first_answer_and_books_nothing_more() -> None:
    world = World("a", "b")
    world.book("a", "r", worker_id="w2")
    world.run(0.005)
    world.book("b", "r", worker_id="w2")
    with pytest.raises(AlreadyExists):
        world.book("b", "r", worker_id="w2", attempt=2)
    world.settled()
    assert world["a"].loads()["w2"][0] == 1
    assert world["a"].replication.ownership.remote_owner(key("r")) == world["b"].replication.me


def test_a_repeated_booking_call_whose_answer_is_lost_ends_nothing_that_runs() -> None:
    world = World("a", "b")
    world.book("a", "r")
    world.run(1)
    # As of a scheduler that hung: what its caller asked it before it went to the other one.
    world.book("b", "r")
    assert not world["b"].core.undelivered(key("r"), 1)
    world.settled()
    assert set(world["a"].state()) == {"r"}


def test_a_free_at_another_replica_before_the_booking_arrives_there_cancels_it() -> None:
    world = World("a", "b", "c")
    world.book("a", "r")
    assert world.free("b", "r") is FreeOutcome.UNKNOWN
    world.settled()
    assert world["a"].state() == {}
    with pytest.raises(Cancelled):
        world.book("c", "r")
    world.book("c", "r", attempt=2)
    world.settled()
    assert list(world["a"].state()) == ["r"]


def test_a_free_that_comes_before_the_booking_call_cancels_it_at_every_replica() -> None:
    world = World("a", "b")
    world.free("b", "r", attempt=7)
    world.run(0.005)
    with pytest.raises(Cancelled):
        world.book("a", "r", attempt=7)
    world.run(SETTINGS_TOMBSTONE + 2)
    assert world["a"].replication.ownership.log.claims == {}
    assert world["b"].replication.ownership.log.claims == {}, "a tombstone is not kept for ever"


SETTINGS_TOMBSTONE = SchedulerSettings().tombstone_seconds


def test_a_joiner_learns_what_everyone_owns() -> None:
    world = World("a", "b")
    for number in range(700):
        world.book("ab"[number % 2], f"r{number}", worker_id=f"w{number % 3}")
    world.run(0.5)
    world.start("c")
    world.settled()
    assert len(world["c"].state()) == 700
    snapshots = [status.snapshots for status in world["c"].replication.status()]
    assert snapshots == [0, 1, 1]


def test_lost_events_show_as_a_gap_and_come_with_a_snapshot() -> None:
    world = World("a", "b")
    world.run(1)
    world.faults(loss=1)
    world.book("a", "r")
    world.run(0.01)
    world.faults()
    world.book("a", "s")
    world.run(0.01)
    assert world["b"].state() == {}
    assert world["b"].replication.status()[1].lag_events == 2
    assert world["b"].replication.status()[1].lag_seconds > 0
    world.run(0.1)
    assert set(world["b"].state()) == {"r", "s"}
    assert world["b"].replication.status()[1].gaps == 1


def test_the_last_event_before_silence_is_missed_by_heartbeats_only_and_comes_all_the_same() -> None:
    world = World("a", "b")
    world.run(1)
    world.faults(loss=1)
    world.book("a", "r")
    world.run(0.01)
    world.settled()
    assert set(world["b"].state()) == {"r"}


def test_another_digest_at_the_same_sequence_is_a_divergence_and_is_repaired() -> None:
    world = World("a", "b")
    world.book("a", "r")
    world.run(0.01)
    view = world["b"].replication.views[world["a"].replication.me]
    claim = view.claims[key("r")]
    view._put(claim._replace(output_blocks=99), late=False)
    world["b"].replication.ownership.settle()
    assert world["b"].state() != world["a"].state()
    world.settled()
    assert world["b"].replication.status()[1].divergences == 1
    assert world["b"].state() == world["a"].state()


def test_a_lease_that_is_a_whole_number_is_the_same_at_every_replica() -> None:
    # As the messages of callers, and settings that were written without a point, give them.
    world = World("a", "b", settings=SchedulerSettings(lease_seconds=300))
    world.book("a", "r", lease_seconds=60)
    world.book("a", "s")
    world.run(1)
    world["a"].core.renew(key("r"), 1, lease_seconds=90)
    world.run(1)
    assert [status.divergences for status in world["b"].replication.status()] == [0, 0]
    # And a snapshot of them is as good as their events.
    world.start("c")
    world.settled()
    assert all(status.divergences == 0 for status in world["c"].replication.status())


def test_what_only_one_survivor_heard_of_a_killed_replica_the_others_learn_from_it() -> None:
    world = World("a", "b", "c")
    world.run(1)
    world["c"].cut_off = True
    world.book("a", "r")
    world.run(0.01)
    world["c"].cut_off = False
    world.kill("a")
    world.settled()
    assert set(world["c"].state()) == set(world["b"].state()) == {"r"}


def test_the_requests_of_a_killed_replica_stay_until_their_leases_end_and_end_everywhere_at_once() -> None:
    world = World("a", "b", "c", settings=SchedulerSettings(lease_seconds=30))
    world.book("a", "r")
    world.book("a", "s")
    world.run(1)
    world.kill("a")
    world.run(29)
    assert set(world["b"].state()) == {"r", "s"}
    world.run(3)
    world.agree()
    assert set(world["b"].loads().values()) == {IDLE}
    assert world["b"].core.stats.ended == {"lease": 2}, "one of them ends it"
    assert world["c"].core.stats.ended == {}
    world.run(30 + 2 * FORGET_SECONDS + 5)
    assert world["b"].replication.views.keys() == {world["c"].replication.me}, "the dead are forgotten"
    assert world["b"].replication.ownership.log.claims == {}
    world.agree()


@pytest.mark.parametrize("gateway_first", [True, False])
@pytest.mark.parametrize("run", range(3))
def test_the_requests_of_a_gateway_that_dies_with_its_scheduler_end_everywhere_within_the_owner_timeout(
    gateway_first: bool, run: int
) -> None:
    world = World("a", "b", "c", seed=test_seed() + run)
    world.faults(loss=0.1, repeats=0.1, delay_seconds=0.01)
    session, _ = world["a"].core.connect_owner(owner("g"), [])
    for name in ("r", "s", "t"):
        world.book("a", name, owner=owner("g"), lease_seconds=300)
    world.run(1)
    if gateway_first:
        world["a"].core.disconnect_owner(owner("g"), session)
        world.run(world.rng.uniform(0, 7))
    world.faults()
    world.run(IDLE_HEARTBEAT_SECONDS)
    assert set(world["b"].state()) == set(world["c"].state()) == {"r", "s", "t"}
    world.kill("a")
    grace = world.settings.owner_grace_seconds
    world.run(grace - IDLE_HEARTBEAT_SECONDS - 0.5)
    assert set(world["b"].state()) == {"r", "s", "t"}, "the gateway may still come back"
    world.run(IDLE_HEARTBEAT_SECONDS + SECOND_TO_END_SECONDS + 1)
    world.agree()
    assert set(world["b"].loads().values()) == set(world["c"].loads().values()) == {IDLE}
    assert world["b"].core.stats.ended == {"owner_gone": 3}, "one of them ends it"


@pytest.mark.slow
def test_what_a_dead_replica_leaves_behind_ends_some_at_a_time() -> None:
    world = World("a", "b", "c", settings=SchedulerSettings(lease_seconds=30))
    for number in range(1_000):
        world.book("a", f"r{number}", worker_id=f"w{number % 3}")
    world.run(1)
    world.kill("a")
    world.run(29)
    left = [1_000]
    while left[-1]:
        world.step(TICK_SECONDS)
        left.append(len(world["b"].core.bookings))
        world["b"].check()
    assert max(before - after for before, after in pairwise(left)) <= OVERDUE_WORK // END_WORK + 1
    assert world["b"].core.stats.ended == {"lease": 1_000}
    world.settled()


def test_what_a_replica_takes_over_of_an_owner_that_is_nowhere_ends_with_the_owners_timeout() -> None:
    world = World("a", "b", "c")
    world["a"].core.connect_owner(owner("g"), [])
    world.book("a", "r", owner=owner("g"), lease_seconds=300)
    world.run(1)
    world.kill("a")
    # Of a call that its gateway made before it died.
    world["b"].core.mark_prefill_complete(key("r"), 1)
    world.run(1)
    assert world["b"].replication.ownership.remote_owner(key("r")) is None
    world.run(world.settings.owner_grace_seconds + 1)
    world.agree()
    assert set(world["b"].loads().values()) == set(world["c"].loads().values()) == {IDLE}
    assert world["b"].core.stats.ended == {"owner_gone": 1}


def test_what_is_taken_over_of_an_owner_that_is_connected_elsewhere_goes_on_there() -> None:
    world = World("a", "b", "c")
    world["a"].core.connect_owner(owner("g"), [])
    world.book("a", "r", owner=owner("g"))
    world.run(1)
    world["a"].cut_off = True
    world["b"].core.mark_prefill_complete(key("r"), 1)
    world.run(world.settings.owner_grace_seconds + SILENT_SECONDS + 5)
    assert world["c"].state() == {}, "nothing has been heard of its owner for long"
    world.settled()
    assert set(world["c"].state()) == {"r"}
    assert world["c"].replication.ownership.remote_owner(key("r")) == world["a"].replication.me


def test_a_gateway_that_fails_over_takes_what_it_lists_along_and_what_it_does_not_list_ends() -> None:
    world = World("a", "b", "c")
    world["a"].core.connect_owner(owner("g"), [])
    for name in ("r", "s", "t"):
        world.book("a", name, owner=owner("g"))
    world.run(1)
    world.kill("a")
    world.run(0.1)
    session, unknown = world["b"].core.connect_owner(owner("g"), [(key("r"), 1), (key("s"), 1), (key("never"), 1)])
    assert unknown == [(key("never"), 1)]
    world.settled()
    assert world["b"].replication.ownership.remote_owner(key("r")) is None
    assert set(world["c"].state()) == {"r", "s", "t"}
    world.run(SILENT_SECONDS + 11)
    world.agree()
    assert set(world["c"].state()) == {"r", "s"}
    assert world["b"].core.stats.ended == {"owner_forgot": 1}
    world["b"].core.disconnect_owner(owner("g"), session)
    world.run(10.1)
    world.settled()
    assert set(world["c"].loads().values()) == {IDLE}
    assert world["b"].core.stats.ended == {"owner_forgot": 1, "owner_gone": 2}


@pytest.mark.parametrize("freed", [True, False])
def test_a_replica_that_comes_back_after_a_partition_yields_what_was_taken_from_it(freed: bool) -> None:
    world = World("a", "b", "c")
    session, _ = world["a"].core.connect_owner(owner("g"), [])
    world.book("a", "r", owner=owner("g"))
    world.book("a", "s", owner=owner("g"))
    world.run(1)
    world["a"].away = True
    world.run(6)
    world["b"].core.connect_owner(owner("g"), [(key("r"), 1), (key("s"), 1)])
    if freed:
        world.free("b", "s")
    world.run(90)
    # It wakes, and its own clock and the end of its stream come before any message.
    world["a"].away = False
    world["a"].core.disconnect_owner(owner("g"), session)
    world["a"].core.expire()
    world.settled()
    assert set(world["a"].state()) == ({"r"} if freed else {"r", "s"})
    world.run(11)
    world.settled()
    assert set(world["c"].state()) == ({"r"} if freed else {"r", "s"}), "its owner_gone frees nothing of another's"
    assert world["a"].core.stats.ended == {}
    for name in list(world["c"].state()):
        world.free("b", name)
    world.settled()
    assert set(world["a"].loads().values()) == {IDLE}


def test_a_request_stays_where_its_owner_is_though_an_older_claim_has_the_higher_term() -> None:
    world = World("a", "b", "c")
    world["c"].core.connect_owner(owner("g"), [])
    world.book("c", "r", owner=owner("g"))
    world.run(0.1)
    session, _ = world["a"].core.connect_owner(owner("g"), [(key("r"), 1)])
    world.run(0.1)
    # At b nothing of it has arrived: the owner books it again.
    world.kill("b")
    world.faults(loss=1)
    world.start("b")
    _, unknown = world["b"].core.connect_owner(owner("g"), [(key("r"), 1)])
    assert unknown == [(key("r"), 1)]
    world.book("b", "r", owner=owner("g"))
    world["a"].core.disconnect_owner(owner("g"), session)
    world.run(1)
    world.settled()
    assert world["b"].replication.ownership.remote_owner(key("r")) is None
    world.run(11)
    world.settled()
    assert set(world["a"].state()) == {"r"}
    assert world["a"].core.stats.ended == world["c"].core.stats.ended == {}


def test_a_hello_that_a_stopped_replica_reads_late_takes_nothing_from_where_the_owner_went() -> None:
    world = World("a", "b")
    first, _ = world["a"].core.connect_owner(owner("g"), [], opened_at=1)
    world.book("a", "r", owner=owner("g"))
    world.run(0.1)
    world["a"].core.disconnect_owner(owner("g"), first)
    # b is stopped: the owner waits for it in vain, and comes back to a.
    world["a"].core.connect_owner(owner("g"), [(key("r"), 1)], opened_at=3)
    world.run(1)
    session, unknown = world["b"].core.connect_owner(owner("g"), [(key("r"), 1)], opened_at=2)
    assert unknown == []
    world["b"].core.disconnect_owner(owner("g"), session)
    world.settled()
    assert world["a"].replication.ownership.remote_owner(key("r")) is None
    world.kill("b")
    world.run(11)
    assert set(world["a"].state()) == {"r"}
    assert world["a"].core.stats.ended == {}


def test_what_another_ends_by_itself_goes_on_where_its_owner_is() -> None:
    world = World("a", "b")
    session, _ = world["a"].core.connect_owner(owner("g"), [])
    world.book("a", "r", owner=owner("g"))
    world.faults(loss=1)
    world["b"].core.connect_owner(owner("g"), [])
    world.book("b", "r", owner=owner("g"))
    world["a"].core.disconnect_owner(owner("g"), session)
    world.run(10.1)
    assert world["a"].core.stats.ended == {"owner_gone": 1}
    world.settled()
    assert set(world["a"].state()) == {"r"}
    world.free("b", "r")
    world.settled()
    assert set(world["a"].loads().values()) == {IDLE}


def test_a_replica_that_is_started_again_gets_its_former_requests_from_the_others() -> None:
    world = World("a", "b")
    world.book("a", "r")
    world.run(1)
    world.kill("a")
    world.clock.advance(0.1)
    world.start("a")
    world.settled()
    assert set(world["a"].state()) == {"r"}
    assert world.free("a", "r") is FreeOutcome.FREED
    world.settled()
    assert set(world["b"].loads().values()) == {IDLE}


def test_a_replica_that_starts_again_with_its_clock_set_back_is_seen_within_seconds() -> None:
    world = World("a", "b", "c")
    world.book("a", "before")
    world.run(1)
    world.kill("a")
    world.run(0.1)
    world.start("a", clock_behind_seconds=500)
    world.run(SILENT_SECONDS + 3)
    world.book("a", "after")
    world.book("b", "elsewhere")
    world.run(1)
    assert world["b"].replication.live("a")
    for name in "abc":
        assert set(world[name].state()) == {"before", "after", "elsewhere"}, name
    assert world["a"].replication.conflict == ""
    # What it had before it was started again is its own when it is called for.
    assert world.free("a", "before") is FreeOutcome.FREED
    world.free("b", "after")
    world.free("a", "elsewhere")
    world.run(1)
    for name in "abc":
        assert world[name].state() == {}
    world.settled()


def test_two_that_have_one_name_are_told_for_as_long_as_both_are_heard() -> None:
    world = World("a", "b")
    earlier = world["a"].replication
    later = replication_pb2.ReplicaMessage(version=VERSION, replica_id="a", epoch=earlier.me.epoch + 1)
    later.heartbeat.SetInParent()
    for _ in range(3):
        for node in ("a", "b"):
            world[node].replication.receive(later.SerializeToString())
        world.run(2)
        assert "'a'" in earlier.conflict
        assert [status.epoch for status in world["b"].replication.status() if status.live and not status.self] == [
            earlier.me.epoch + 1
        ]
    world.run(SILENT_SECONDS + 3)
    assert earlier.conflict == ""
    assert [
        (status.replica_id, status.epoch)
        for status in world["b"].replication.status()
        if status.live and not status.self
    ] == [earlier.me]


def test_a_lease_above_what_callers_may_ask_for_is_read_all_the_same() -> None:
    world = World("a", "b")
    world.book("a", "r")
    booking = world["a"].core.bookings.find(key("r"))
    assert booking is not None
    # As the settings of another release may have it.
    booking.lease_seconds = 200_000.0
    world["a"].replication.ownership.changed(booking)
    world.run(1)
    world.start("c")
    world.run(1)
    for name in "bc":
        assert world[name].state()["r"][-1] == 200_000.0
        assert world[name].replication.refused == 0


@pytest.mark.parametrize("run", range(2))
def test_no_message_of_another_replica_raises(run: int) -> None:
    seed = test_seed() + run
    rng = Random(seed)
    world = World("a", "b", seed=seed)
    world.book("a", "r0")
    world.book("b", "r1", owner=owner("g"))
    world.run(0.5)
    names = {
        "replica_id": ["a", "b", "c"],
        "of_replica_id": ["a", "b"],
        "request_id": ["r0", "r1", "r2"],
        "model": [MODEL],
        "tenant": ["", "default"],
        "worker_id": world.workers,
        "owner_id": ["g", ""],
    }
    hostile = HostileMessages(lambda field: names.get(field, ["x", ""]), rng)
    node = world["a"]
    forwarding = Forwarding(node.core, node.replication.ownership, node.replication.live, never)
    for _ in range(500):
        raw = hostile.serialised(replication_pb2.ReplicaMessage.DESCRIPTOR)
        try:
            message = replication_pb2.ReplicaMessage.FromString(raw)
        except DecodeError:
            node.replication.receive(raw)
            continue
        if message.replica_id:
            message.version, message.epoch = VERSION, rng.choice([message.epoch, world["b"].replication.me.epoch])
        node.replication.receive(message.SerializeToString())
        forwarding.answer(message.forward)
        if rng.random() < 0.1:
            world.run(0.02)
    check_scheduler(node.core)


async def test_what_an_owner_did_whose_answer_comes_too_late_is_done_once_and_told_as_done_now() -> None:
    world = World("a", "b")
    world.book("b", "r")
    world.settled()
    here, owning = world["a"], world["b"]
    answers = Forwarding(owning.core, owning.replication.ownership, owning.replication.live, never)

    async def late(to: str, asked: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
        assert to == "b"
        assert answers.answer(asked).owner
        world.settled()
        raise TimeoutError

    forwarding = Forwarding(here.core, here.replication.ownership, here.replication.live, late)

    async def asked(operation: Operation) -> Outcome:
        assert forwarding.concerns(operation)
        return await forwarding.carry_out(operation)

    assert await asked(AddOutput(key("r"), 1, 3)) == 3
    assert await asked(AddOutput(key("r"), 1, 2)) == 5
    assert await asked(CompletePrefill(key("r"), 1)) is True
    # It took the request over, and gives it back.
    world.settled()
    owning.core.renew(key("r"), 1)
    world.settled()
    assert await asked(CompletePrefill(key("r"), 1)) is False
    world.settled()
    owning.core.renew(key("r"), 1)
    world.settled()
    assert await asked(Free(key("r"), 1)) is FreeOutcome.FREED
    assert forwarding.unanswered == 5
    # One that the caller repeats is told apart all the same.
    assert await forwarding.carry_out(Free(key("r"), 1)) is FreeOutcome.ALREADY_FREED
    assert owning.state() == here.state() == {}


@pytest.mark.parametrize("answers_in_time", [True, False])
async def test_the_next_attempt_of_a_request_waits_for_the_free_of_the_one_that_another_replica_owns(
    answers_in_time: bool,
) -> None:
    world = World("a", "b")
    world.book("b", "r")
    world.settled()
    here, owning = world["a"], world["b"]
    answers = Forwarding(owning.core, owning.replication.ownership, owning.replication.live, never)
    answered = asyncio.Event()

    async def post(to: str, forwarded: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
        await answered.wait()
        if not answers_in_time:
            raise TimeoutError
        # The event of what the owner did is not here yet.
        return answers.answer(forwarded).SerializeToString()

    forwarding = Forwarding(here.core, here.replication.ownership, here.replication.live, post)
    outcomes: dict[int, Outcome] = {}
    operations = Operations(
        here.core, None, lambda number, operation, outcome: outcomes.__setitem__(number, outcome), forwarding
    )
    assert operations.carry_out(1, Free(key("r"), 1)) is None
    second = Select(selection_request([1, 2], request_id="r", attempt_id=2), books=True)
    assert operations.carry_out(2, second) is None
    assert operations.carry_out(3, Free(key("other"), 1)) is FreeOutcome.UNKNOWN
    answered.set()
    await operations.answered()
    assert outcomes[1] is FreeOutcome.FREED
    assert isinstance(outcomes[2], Decision)
    world.settled()
    assert here.state() == owning.state()
    booked = here.core.bookings.find(key("r"))
    assert booked is not None
    assert booked.reservation.attempt_id == 2
    # Of a caller that has gone nothing is booked any more.
    world.book("b", "s")
    world.settled()
    assert operations.carry_out(4, Free(key("s"), 1)) is None
    assert operations.carry_out(5, Select(selection_request([1, 2], request_id="s", attempt_id=2), books=True)) is None
    operations.close()
    await operations.answered()
    assert 5 not in outcomes
    world.settled()
    assert len(here.state()) == len(owning.state()) == 1


async def test_what_a_silent_owner_did_not_do_is_done_here() -> None:
    world = World("a", "b")
    world.book("b", "r")
    world.settled()

    async def silent(to: str, asked: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
        raise TimeoutError

    forwarding = Forwarding(world["a"].core, world["a"].replication.ownership, world["a"].replication.live, silent)
    assert await forwarding.carry_out(AddOutput(key("r"), 1, 3)) == 3
    world.settled()
    assert await forwarding.carry_out(CompletePrefill(key("r"), 1)) is True
    assert await forwarding.carry_out(CompletePrefill(key("r"), 1)) is False
    assert await forwarding.carry_out(Free(key("r"), 1)) is FreeOutcome.FREED
    assert await forwarding.carry_out(Free(key("r"), 1)) is FreeOutcome.ALREADY_FREED
    assert forwarding.unanswered == 1
    world.settled()
    assert world["a"].state() == world["b"].state() == {}


async def never(to: str, operation: replication_pb2.ForwardedOperation, seconds: float) -> bytes:
    raise AssertionError("nobody is asked")


def test_a_worker_that_comes_later_here_gets_the_load_it_has_elsewhere() -> None:
    world = World("a", "b")
    world["b"].remove_worker("w0")
    world.book("a", "r")
    world.book("a", "s")
    world.run(0.01)
    assert world["b"].state() == {}
    assert world["b"].replication.ownership.remote_owner(key("r")) == world["a"].replication.me
    assert world.free("b", "s") is FreeOutcome.UNKNOWN, "nothing of it is here"
    world["b"].add_worker("w0")
    world.settled()
    assert set(world["a"].state()) == set(world["b"].state()) == {"r"}


def test_a_worker_that_goes_takes_its_bookings_along_at_every_replica() -> None:
    world = World("a", "b")
    world.book("a", "r")
    world.book("b", "s")
    world.run(0.01)
    world["b"].remove_worker("w0")
    world.run(0.01)
    assert set(world["a"].state()) == {"r"}
    world["a"].remove_worker("w0")
    world.settled()
    assert world["a"].state() == {}
    world["a"].add_worker("w0")
    world["b"].add_worker("w0")
    world.settled()
    assert set(world["a"].loads().values()) == {IDLE}


def test_thresholds_of_the_last_writer_and_the_later_end_of_a_cool_down_hold_everywhere() -> None:
    world = World("a", "b")
    world["a"].core.thresholds.change("default", "m", active_prefill_tokens_threshold=5)
    world["b"].core.thresholds.change("default", "m", active_prefill_tokens_threshold=7)
    world["a"].core.cool_downs.report("default", WorkerRank("w0", 0), 30)
    world["b"].core.cool_downs.report("default", WorkerRank("w0", 0), 5)
    world.settled()
    assert world["a"].core.thresholds.get("default", "m").active_prefill_tokens_threshold == 7
    world["a"].core.thresholds.change("default", "m", active_prefill_tokens_threshold=None)
    world.start("c")
    world.settled()
    assert world["c"].core.thresholds.get("default", "m").off
    for name in "abc":
        load = potential_loads(world[name].core, key("any").pool)[0]
        assert 27 < load.cooldown_seconds < 30


def test_cleared_cool_downs_are_cleared_everywhere_and_later_reports_count_again() -> None:
    world = World("a", "b")
    world["a"].core.cool_downs.report("default", WorkerRank("w0", 0), 30)
    world.settled()
    assert world["b"].core.cool_downs.clear("default") == [("w0", 0)]
    world.start("c")
    world.settled()

    def cooling(name: str) -> float:
        return potential_loads(world[name].core, key("any").pool)[0].cooldown_seconds

    assert [cooling(name) for name in "abc"] == [0, 0, 0]
    world["c"].core.cool_downs.report("default", WorkerRank("w0", 0), 20)
    world.settled()
    assert all(15 < cooling(name) < 20 for name in "abc")


@pytest.mark.parametrize("fields", [{"until": 86_400}, {"until": 10, "cleared_at": 86_400}])
def test_a_cool_down_or_a_clear_from_far_ahead_is_not_taken(fields: dict[str, int]) -> None:
    world = World("a")
    node = world["a"]
    now = int(node.core.wall_clock())
    times = {name: (now + seconds) * 1_000_000 for name, seconds in fields.items()}
    worker = types_pb2.WorkerRank(worker_id="w0")
    registers = node.replication.ownership.registers
    registers.merge_cool_down(replication_pb2.CoolDownEvent(tenant="default", worker=worker, **times))
    assert registers.cool_downs == {}


def test_messages_that_are_no_messages_are_counted_and_change_nothing() -> None:
    world = World("a", "b")
    node = world["a"].replication
    node.receive(b"\xff\xff")
    node.receive(replication_pb2.ReplicaMessage(version=VERSION + 1, replica_id="b", epoch=1).SerializeToString())
    node.receive(replication_pb2.ReplicaMessage(version=VERSION, replica_id="z", epoch=1).SerializeToString())
    bad = replication_pb2.EventBatch(first_sequence=1, events=[replication_pb2.ReplicaEvent()])
    bad.events[0].add_request.term = 1
    node.receive(
        replication_pb2.ReplicaMessage(version=VERSION, replica_id="z", epoch=1, events=bad).SerializeToString()
    )
    assert node.refused == 4
    duplicate = replication_pb2.ReplicaMessage(version=VERSION, replica_id="a", epoch=node.me.epoch + 1)
    node.receive(duplicate.SerializeToString())
    assert "'a'" in node.conflict


def test_a_replica_that_says_goodbye_is_not_asked_any_more() -> None:
    world = World("a", "b")
    world.run(0.1)
    assert world["b"].replication.live("a")
    world["a"].replication.leave()
    world.book("a", "r")
    world.run(3)
    assert not world["b"].replication.live("a")
    assert set(world["b"].state()) == {"r"}, "what it tells to its end counts"


@pytest.mark.parametrize("run", range(3))
def test_s8_replicas_agree_exactly_one_quiet_second_after_losses_repeats_partitions_and_a_kill(run: int) -> None:
    world = World("a", "b", "c", seed=test_seed() + run)
    rng = world.rng
    active: dict[str, int] = {}
    """Requests that somebody booked and nobody freed, and their attempt."""
    doomed = rng.choice("abc")
    unsure: set[str] = set()
    """What was last done at the replica that is killed: it may be gone with it."""
    numbers = iter(range(10**9))
    world.faults(loss=0.1, repeats=0.1, delay_seconds=0.01)
    for step in range(1500):
        names = [name for name, node in world.nodes.items() if not node.away] or world.wake()
        at = rng.choice(names)
        name = rng.choice(list(active)) if active else ""
        try:
            match rng.randrange(10):
                case 0 | 1 | 2 | 3:
                    name = f"r{next(numbers)}"
                    world.book(at, name, worker_id=rng.choice(world.workers), blocks=rng.randint(2, 6), shared=2)
                    active[name] = 1
                case 4 | 5 | 6 if active:
                    world.free(at, name, active.pop(name))
                case 7 if active:
                    world[at].core.mark_prefill_complete(key(name), active[name])
                case 8 if active:
                    world[at].core.add_output(key(name), 1, active[name])
                case 9:
                    world[at].core.thresholds.change("default", "m", active_prefill_tokens_threshold=step)
        except NotFound:
            # It has not got there yet.
            pass
        if at == doomed:
            unsure.add(name)
        if rng.random() < 0.01:
            node = world[rng.choice(list(world.nodes))]
            node.cut_off = not node.cut_off
            if not node.cut_off:
                node.replication.query()
        if rng.random() < 0.01:
            node = world[rng.choice(list(world.nodes))]
            node.away = not node.away
        if step == 1000:
            world.kill(doomed)
        world.run(rng.choice((0.0, 0.001, 0.01)))
    world.settled()
    left = world[next(iter(world.nodes))].state()
    assert set(left) - unsure == set(active) - unsure
    for name in left:
        world.free(rng.choice(list(world.nodes)), name)
    world.settled()
    for node in world.nodes.values():
        assert node.state() == {}
        assert set(node.loads().values()) == {IDLE}


class Gateway:
    """A gateway in simulated time: its stream to one replica, and what it has in flight."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.in_flight: dict[str, str] = {}
        """Workers by request."""
        self.owed: list[str] = []
        """Freed at a replica that did not answer."""
        self.at = ""
        self.node: Node | None = None
        self._world = world
        self._session = 0
        self._numbers = iter(range(10**9))

    def move(self, name: str) -> None:
        """Opens its stream at another replica; the former one notices when it can."""
        world = self._world
        if self.node is not None:
            self.node.on_wake.append(partial(self.node.core.disconnect_owner, owner(self.name), self._session))
        self.at, self.node = name, world[name]
        core = self.node.core
        listed = [(key(request_id), 1) for request_id in self.in_flight]
        takeover = core.begin_takeover(owner(self.name), listed)
        self._session = takeover.session
        while not takeover.advance(core.clock(), 3):
            if world.rng.random() < 0.3:
                world.step(0.001)
        for lost, _ in takeover.unknown:
            world.book(name, lost.request_id, worker_id=self.in_flight[lost.request_id], owner=owner(self.name))
        for request_id in self.owed:
            world.free(name, request_id)
        self.owed.clear()

    def work(self) -> None:
        """One call."""
        world, rng = self._world, self._world.rng
        if rng.random() < 0.5:
            request_id, worker_id = f"{self.name}-{next(self._numbers)}", rng.choice(world.workers)
            world.book(self.at, request_id, worker_id=worker_id, owner=owner(self.name), shared=2)
            self.in_flight[request_id] = worker_id
        elif self.in_flight:
            request_id = rng.choice(list(self.in_flight))
            if rng.random() < 0.5:
                world[self.at].core.mark_prefill_complete(key(request_id), 1)
            else:
                del self.in_flight[request_id]
                world.free(self.at, request_id)

    def leave(self) -> None:
        """Ends its stream."""
        self._world[self.at].core.disconnect_owner(owner(self.name), self._session)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(3))
def test_s8_gateways_that_fail_over_lose_nothing_and_leave_nothing(run: int) -> None:
    world = World("a", "b", "c", seed=test_seed() + run)
    rng = world.rng
    world.faults(loss=0.1, repeats=0.1, delay_seconds=0.01)
    gateways = [Gateway(f"g{number}", world) for number in range(3)]
    for number, gateway in enumerate(gateways):
        gateway.move("abc"[number % 2])
    for _ in range(900):
        for gateway in gateways:
            node = world[gateway.at]
            if node is not gateway.node or node.away or rng.random() < 0.002:
                others = [name for name, each in world.nodes.items() if not each.away and each is not gateway.node]
                if not others:
                    world.wake()
                    continue
                gateway.move(rng.choice(others))
            gateway.work()
        if rng.random() < 0.01:
            node = world[rng.choice("abc")]
            node.cut_off = not node.cut_off
            if not node.cut_off:
                node.replication.query()
        if rng.random() < 0.01:
            node = world[rng.choice("abc")]
            node.away = not node.away
        if rng.random() < 0.003:
            world.kill(name := rng.choice("abc"))
            world.start(name)
        world.run(rng.choice((0.001, 0.005, 0.02)))
    world.wake()
    world.settled()
    in_flight = {request_id for gateway in gateways for request_id in gateway.in_flight}
    assert in_flight <= set(world["a"].state())
    # What a killed replica knew alone to be freed ends when its owner, which is connected, does not have it.
    world.run(SILENT_SECONDS + 11 + 11)
    world.settled()
    assert set(world["a"].state()) == in_flight
    for gateway in gateways:
        gateway.leave()
    world.run(11)
    world.settled()
    for node in world.nodes.values():
        assert node.state() == {}
        assert set(node.loads().values()) == {IDLE}
