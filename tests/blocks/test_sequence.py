"""The order of event batches: duplicates, gaps, restarts, replays, losses."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_blocks.source.decisions import (
    Apply,
    Decision,
    Demote,
    Drop,
    DropReason,
    RequestReplay,
    Reset,
    SequencedBatch,
)
from kvscout_blocks.source.held import HELD_BATCHES, HELD_BYTES, HeldBudget
from kvscout_blocks.source.publishers import MIXED, MIXED_AFTER, ONE_AGAIN_AFTER
from kvscout_blocks.source.replay import FIRST_RETRY_SECONDS, MAX_ATTEMPTS
from kvscout_blocks.source.sequence import (
    DIGESTS_KEPT,
    OUTDATED_AFTER,
    QUARANTINE_AFTER,
    QUARANTINE_SECONDS,
    SourceSequence,
)

Batch = SequencedBatch[str]


def at(event_id: int, life: str = "a", **fields: object) -> Batch:
    """Batch `event_id` of one life of an engine."""
    return SequencedBatch(event_id, hash((life, event_id)) % 2**64, life, **fields)  # type: ignore[arg-type]


class Driver:
    """A machine, and what it decided, in short words."""

    def __init__(self, *, can_replay: bool = True, budget: HeldBudget | None = None) -> None:
        self.machine: SourceSequence[str] = SourceSequence(can_replay=can_replay, budget=budget)
        self.now = 0.0

    def live(self, *batches: Batch) -> list[str]:
        return [word for batch in batches for word in _words(self.machine.on_batch(batch, self.now))]

    def replayed(self, *batches: Batch) -> list[str]:
        attempt = self.machine.attempt
        return [word for batch in batches for word in _words(self.machine.on_replay(attempt, batch, self.now))]

    def end(self) -> list[str]:
        return _words(self.machine.on_replay_end(self.machine.attempt, self.now))

    def fail(self) -> list[str]:
        return _words(self.machine.on_replay_failed(self.machine.attempt, self.now))

    def tick(self, now: float) -> list[str]:
        self.now = now
        return _words(self.machine.on_tick(now))

    def reconnect(self, *, new_publisher: bool = False) -> list[str]:
        return _words(self.machine.on_reconnect(new_publisher=new_publisher))


def _words(decisions: list[Decision[str]]) -> list[str]:
    words = []
    for decision in decisions:
        match decision:
            case Apply(batch):
                words.append(f"apply {batch.content}{batch.event_id}")
            case Drop(event_id, reason):
                words.append(f"{reason} {event_id}")
            case RequestReplay(first_id):
                words.append(f"replay {first_id}")
            case Reset():
                words.append("reset")
            case Demote(missing):
                words.append(f"demote {missing}")
    return words


@pytest.fixture
def driver() -> Driver:
    """A machine that has applied 0..5."""
    driver = Driver()
    assert driver.live(*(at(n) for n in range(6))) == [f"apply a{n}" for n in range(6)]
    return driver


@pytest.fixture
def mute() -> Driver:
    """The same for an engine without a replay socket."""
    driver = Driver(can_replay=False)
    driver.live(*(at(n) for n in range(6)))
    return driver


def test_a_gap_is_replayed_from_the_last_batch_and_applied_once(driver: Driver) -> None:
    assert driver.live(at(8)) == ["replay 5"]
    assert driver.replayed(at(5), at(6)) == ["apply a6"]
    assert driver.live(at(9)) == []
    assert driver.replayed(at(7), at(8)) == ["apply a7", "duplicate 8", "apply a8"]
    assert driver.end() == ["apply a9"]
    assert driver.live(at(10)) == ["apply a10"]
    assert not driver.machine.history_incomplete


def test_known_batches_are_dropped(driver: Driver) -> None:
    assert driver.live(at(5), at(2)) == ["duplicate 5", "duplicate 2"]


def test_old_ids_of_the_same_epoch_are_dropped_whatever_their_digest() -> None:
    driver = Driver()
    driver.live(at(0, epoch=7), at(1, epoch=7))
    assert driver.live(at(0, "b", epoch=7)) == ["duplicate 0"]
    assert driver.live(at(2, epoch=6)) == ["stale 2"]


def test_a_publisher_whose_clock_went_back_is_shown_until_it_is_right_again() -> None:
    driver = Driver()
    driver.live(at(0, epoch=7))
    driver.live(*(at(number, epoch=6) for number in range(OUTDATED_AFTER - 1)))
    assert driver.machine.misconfigured == "", "what a former life left behind"
    driver.live(at(1, epoch=7))
    driver.live(*(at(number, epoch=6) for number in range(OUTDATED_AFTER)))
    assert "epoch 6" in driver.machine.misconfigured
    assert driver.live(at(2, epoch=7)) == ["apply a2"]
    assert driver.machine.misconfigured == ""


def test_a_higher_epoch_is_a_restart() -> None:
    driver = Driver()
    driver.live(at(0, epoch=7), at(1, epoch=7))
    assert driver.live(at(0, "b", epoch=8)) == ["reset", "apply b0"]
    assert driver.live(at(2, epoch=7)) == ["stale 2"]
    assert driver.live(at(5, "c", epoch=9)) == ["reset", "replay 0"]
    assert driver.machine.epoch == 9


def test_first_contact_in_the_middle_is_replayed_from_the_start() -> None:
    driver = Driver()
    assert driver.live(at(7)) == ["replay 0"]
    assert driver.replayed(at(0)) == ["apply a0"]
    driver.replayed(*(at(n) for n in range(1, 7)))
    assert driver.end() == ["apply a7"]
    assert not driver.machine.history_incomplete


def test_an_old_id_with_an_unknown_digest_is_a_restart() -> None:
    driver = Driver()
    driver.live(*(at(n) for n in range(9)))
    assert driver.live(at(2, "b")) == ["reset", "replay 0"]
    assert driver.replayed(at(0, "b"), at(1, "b"), at(2, "b")) == [
        "apply b0",
        "apply b1",
        "duplicate 2",
        "apply b2",
    ]
    assert driver.end() == []
    assert driver.live(at(3, "b")) == ["apply b3"]


def test_a_restart_that_overtook_us_is_found_by_the_digest_at_last(driver: Driver) -> None:
    assert driver.reconnect() == ["replay 5"]
    assert driver.live(at(8, "b")) == []
    assert driver.replayed(at(5, "b")) == ["stale 8", "reset", "replay 0"]
    assert driver.replayed(*(at(n, "b") for n in range(9)))[-1] == "apply b8"
    assert driver.end() == []
    assert driver.live(at(9, "b")) == ["apply b9"]


def test_a_reconnect_to_the_same_engine_changes_nothing(driver: Driver) -> None:
    assert driver.reconnect() == ["replay 5"]
    assert driver.replayed(at(5)) == []
    assert driver.end() == []
    assert not driver.machine.replaying
    assert not driver.machine.history_incomplete


def test_an_engine_that_has_nothing_from_last_on_was_restarted(driver: Driver) -> None:
    driver.reconnect()
    assert driver.end() == ["reset", "replay 0"]
    assert driver.replayed(at(0, "b")) == ["apply b0"]
    assert driver.end() == []


def test_connecting_to_an_engine_asks_for_its_past() -> None:
    driver = Driver()
    assert driver.reconnect() == ["replay 0"]
    assert driver.end() == []
    assert driver.live(at(0)) == ["apply a0"]


def test_history_that_is_gone_demotes_and_goes_on_from_the_first_reply(driver: Driver) -> None:
    driver.live(at(30))
    assert driver.replayed(at(20), at(21)) == ["demote 6..19", "apply a20", "apply a21"]
    assert driver.machine.history_incomplete
    assert driver.machine.missing == "6..19"


def test_a_hole_in_the_replay_is_requested_again_from_the_last_batch_applied(driver: Driver) -> None:
    driver.live(at(12))
    assert driver.replayed(at(5), at(6), at(9)) == ["apply a6", "replay 6"]
    assert driver.replayed(at(6), at(7), at(10)) == ["apply a7", "replay 7"]
    assert driver.replayed(*(at(n) for n in range(7, 12))) == [f"apply a{n}" for n in range(8, 12)]
    assert driver.end() == ["apply a12"]
    assert (driver.machine.counters["demotions"], driver.machine.history_incomplete) == (0, False)


def test_a_hole_behind_history_that_is_gone_is_requested_again(driver: Driver) -> None:
    driver.live(at(30))
    assert driver.replayed(at(20), at(22)) == ["demote 6..19", "apply a20", "replay 20"]
    assert driver.replayed(at(20), *(at(n) for n in range(21, 30)))[-1] == "apply a29"
    assert driver.end() == ["apply a30"]
    assert driver.machine.missing == "6..19"


def test_history_that_is_gone_after_a_restart_is_lost_by_the_first_reply_of_the_new_life(driver: Driver) -> None:
    driver.live(at(8))
    assert driver.replayed(at(5, "b")) == ["stale 8", "reset", "replay 0"]
    assert driver.replayed(at(2, "b")) == ["apply b2"]
    assert driver.machine.missing == "0..1"


def test_what_came_live_fills_a_hole_of_the_replay(driver: Driver) -> None:
    driver.live(at(7), at(8))
    assert driver.replayed(at(5), at(6), at(9)) == ["apply a6", "apply a7", "apply a8", "apply a9"]
    assert driver.end() == []


def test_rounds_that_bring_nothing_wait_longer_each_time_and_end_as_a_loss(driver: Driver) -> None:
    driver.live(at(10))
    wait = FIRST_RETRY_SECONDS
    for _ in range(MAX_ATTEMPTS - 1):
        assert driver.replayed(at(5)) == []
        assert driver.fail() == []
        assert driver.machine.retry_at == driver.now + wait
        assert driver.tick(driver.now + wait) == ["replay 5"]
        wait *= 2
    driver.replayed(at(5))
    assert driver.fail() == ["demote 6..9", "apply a10"]
    assert not driver.machine.replaying


def test_what_an_engine_never_had_is_lost_with_the_first_round_that_leaves_it_out(driver: Driver) -> None:
    driver.live(at(8))
    assert driver.replayed(at(5), at(8), at(9)) == ["demote 6..7", "duplicate 8", "apply a8", "apply a9"]
    assert driver.end() == []
    assert (driver.machine.missing, driver.machine.replaying) == ("6..7", False)


def test_what_an_engine_never_had_behind_more_that_it_has_costs_one_more_round(driver: Driver) -> None:
    driver.reconnect()
    assert driver.replayed(at(5), at(6), at(9)) == ["apply a6", "replay 6"]
    assert driver.replayed(at(6), at(9), at(10), at(12)) == ["demote 7..8", "apply a9", "apply a10", "replay 10"]
    assert driver.replayed(at(10), at(12)) == ["demote 11..11", "apply a12"]
    assert driver.end() == []


def test_progress_begins_the_count_of_futile_rounds_anew(driver: Driver) -> None:
    driver.live(at(10))
    for _ in range(MAX_ATTEMPTS - 1):
        driver.fail()
        driver.tick(driver.machine.retry_at or 0.0)
    assert driver.replayed(at(5), at(6), at(8)) == ["apply a6", "replay 6"]
    assert driver.fail() == []
    assert driver.machine.retry_at == driver.now + FIRST_RETRY_SECONDS


def test_a_replay_without_its_end_is_over_when_it_reaches_what_came_live(driver: Driver) -> None:
    driver.live(at(8), at(9))
    driver.replayed(at(5), at(6), at(7))
    assert driver.fail() == ["apply a8", "apply a9"]
    assert not driver.machine.replaying
    assert driver.live(at(10)) == ["apply a10"]


def test_the_rest_of_a_replay_without_its_end_is_requested_immediately(driver: Driver) -> None:
    driver.reconnect()
    driver.replayed(at(5), at(6))
    assert driver.fail() == ["replay 6"]
    assert driver.replayed(at(6), at(7)) == ["apply a7"]
    assert driver.fail() == ["replay 7"]
    driver.replayed(at(7))
    assert driver.end() == []
    assert not driver.machine.history_incomplete


def test_a_reply_without_the_last_batch_cannot_be_verified(driver: Driver) -> None:
    driver.reconnect()
    assert driver.replayed(at(6)) == ["demote whatever came before 6", "apply a6"]
    assert driver.end() == []


def test_a_replay_that_ends_early_is_asked_again_while_it_brings_something(driver: Driver) -> None:
    driver.live(at(10))
    driver.replayed(at(5), at(6))
    assert driver.end() == ["replay 6"]
    driver.replayed(at(6))
    assert driver.end() == []
    assert driver.tick(FIRST_RETRY_SECONDS) == ["replay 6"]
    driver.replayed(*(at(n) for n in range(6, 10)))
    assert driver.end() == ["apply a10"]


def test_an_empty_replay_after_which_live_batches_go_on_is_requested_again() -> None:
    driver = Driver()
    driver.reconnect()
    driver.live(at(0), at(3))
    # It was answered before anything was published.
    assert driver.end() == ["apply a0", "replay 0"]
    assert driver.replayed(at(0), at(1), at(2)) == ["apply a1", "apply a2"]
    assert driver.end() == ["apply a3"]


def test_an_empty_replay_beside_newer_live_batches_is_a_loss(driver: Driver) -> None:
    driver.live(at(8), at(9))
    assert driver.end() == ["demote 6..7", "apply a8", "apply a9"]


def test_without_a_replay_socket_a_gap_demotes_at_once(mute: Driver) -> None:
    assert mute.live(at(8)) == ["demote 6..7", "apply a8"]
    assert mute.machine.history_incomplete
    assert mute.live(at(9)) == ["apply a9"]
    assert mute.live(at(10, cleared=True)) == ["apply a10"]
    assert not mute.machine.history_incomplete


def test_without_a_replay_socket_a_reconnect_demotes(mute: Driver) -> None:
    assert mute.reconnect() == ["demote whatever came after 5, before a reconnect"]
    assert mute.live(at(6)) == ["apply a6"]


def test_without_a_replay_socket_first_contact_is_incomplete() -> None:
    driver = Driver(can_replay=False)
    assert driver.reconnect() == []
    assert driver.live(at(7)) == ["apply a7"]
    assert driver.machine.missing == "0..6"
    assert driver.live(at(0, "b")) == ["reset", "apply b0"]
    assert not driver.machine.history_incomplete


def test_cleared_needs_no_history(driver: Driver) -> None:
    assert driver.live(at(9, cleared=True)) == ["apply a9"]
    assert Driver().live(at(9, cleared=True)) == ["apply a9"]


def test_cleared_during_a_replay_wins(driver: Driver) -> None:
    driver.live(at(8))
    assert driver.live(at(9, cleared=True)) == ["stale 8", "apply a9"]
    assert driver.replayed(at(5), at(6)) == []
    assert driver.end() == []
    assert not driver.machine.replaying
    assert driver.live(at(10)) == ["apply a10"]


def test_cleared_in_a_replay_makes_what_is_gone_irrelevant(driver: Driver) -> None:
    driver.live(at(30))
    assert driver.replayed(at(29, cleared=True)) == ["apply a29"]
    assert driver.end() == ["apply a30"]
    assert not driver.machine.history_incomplete


def test_replays_are_tried_eight_times_with_doubled_waits(driver: Driver) -> None:
    driver.live(at(8))
    wait = FIRST_RETRY_SECONDS
    for _ in range(MAX_ATTEMPTS - 1):
        assert driver.fail() == []
        assert driver.machine.retry_at == driver.now + wait
        assert driver.tick(driver.now + wait * 0.9) == []
        assert driver.tick(driver.now + wait) == ["replay 5"]
        wait *= 2
    assert driver.fail() == ["demote 6..7", "apply a8"]
    assert driver.machine.retry_at is None
    assert driver.live(at(9)) == ["apply a9"]


def test_failing_replays_without_live_batches_demote(driver: Driver) -> None:
    driver.reconnect()
    for _ in range(MAX_ATTEMPTS):
        words = driver.fail()
        if driver.machine.retry_at is not None:
            driver.tick(driver.machine.retry_at)
    assert words == ["demote whatever came after 5: 8 replays brought nothing"]


def test_answers_to_an_earlier_request_are_ignored(driver: Driver) -> None:
    driver.live(at(8))
    old = driver.machine.attempt
    driver.reconnect()
    assert driver.machine.on_replay(old, at(6), 0.0) == []
    assert driver.machine.on_replay_end(old, 0.0) == []
    assert driver.machine.on_replay_failed(old, 0.0) == []
    assert driver.machine.replaying


@pytest.mark.parametrize("limit", ["batches", "bytes"])
def test_held_batches_are_bounded(driver: Driver, limit: str) -> None:
    size = 0 if limit == "batches" else HELD_BYTES // 100
    number = HELD_BATCHES if limit == "batches" else 100
    driver.live(*(at(n, size_bytes=size) for n in range(7, 7 + number)))
    assert driver.machine.held == number
    words = driver.live(at(7 + number, size_bytes=size))
    assert words[0] == "demote 6..6"
    assert len(words) == number + 2
    assert driver.machine.held == 0
    assert not driver.machine.replaying


def test_sources_share_a_budget_and_whoever_holds_the_most_requests_it_again() -> None:
    budget = HeldBudget(most=100)
    small, large = (Driver(budget=budget) for _ in range(2))
    for each in (small, large):
        each.live(at(0))
    small.live(*(at(n, size_bytes=10) for n in range(2, 5)))
    assert large.live(*(at(n, size_bytes=10) for n in range(2, 9))) == ["replay 0"]
    assert (small.machine.held, large.machine.held, budget.used, budget.dropped) == (3, 7, 100, 0)
    small.live(at(5, size_bytes=10))
    assert (small.machine.held, large.machine.held, budget.used, budget.dropped) == (4, 0, 40, 7)
    assert (large.machine.replaying, budget.lacking) == (True, 1)
    # The answer was given before what was dropped: it is requested again, and nothing is lost.
    assert large.replayed(*(at(n) for n in range(3))) == ["apply a1", "apply a2"]
    assert large.end() == ["replay 2"]
    assert large.live(at(9)) == []
    assert large.replayed(*(at(n) for n in range(2, 9))) == [f"apply a{n}" for n in range(3, 9)]
    assert budget.lacking == 0
    assert large.end() == ["apply a9"]
    assert not large.machine.replaying
    assert not large.machine.history_incomplete


def test_what_was_dropped_for_want_of_room_and_cannot_be_replayed_is_reported_as_lost() -> None:
    budget = HeldBudget(most=10)
    driver = Driver(budget=budget)
    driver.live(at(0))
    driver.live(at(2, size_bytes=11))
    assert (driver.machine.held, budget.lacking) == (0, 1)
    words = driver.replayed(at(0), at(1)) + driver.end()
    while driver.machine.replaying:
        if driver.machine.retry_at is not None:
            words += driver.tick(driver.machine.retry_at)
        words += driver.fail()
    lost = f"demote whatever came after 1: {MAX_ATTEMPTS} replays brought nothing"
    assert [word for word in words if word.startswith("demote")] == [lost]
    assert (driver.machine.history_incomplete, budget.lacking) == (True, 0)


def test_what_a_closed_source_held_is_free_for_others() -> None:
    budget = HeldBudget(most=10)
    driver = Driver(budget=budget)
    driver.live(at(0), at(2, size_bytes=8))
    assert budget.used == 8
    driver.machine.drop_held()
    assert (budget.used, budget.lacking, budget.dropped) == (0, 0, 0)


def test_a_replay_far_ahead_of_the_live_channel_is_no_restart(driver: Driver) -> None:
    many = 4 * DIGESTS_KEPT
    driver.live(at(7))
    driver.replayed(*(at(n) for n in range(5, many)))
    driver.end()
    assert driver.live(*(at(n) for n in range(8, many))) == [f"duplicate {n}" for n in range(8, many)]
    assert driver.live(at(many)) == [f"apply a{many}"]
    assert len(driver.machine._digests) == DIGESTS_KEPT


def test_a_malformed_batch_keeps_its_place(driver: Driver) -> None:
    assert driver.live(at(6), at(7, malformed=True), at(8)) == ["apply a6", "apply a7", "apply a8"]
    assert driver.machine.counters["malformed"] == 1


def test_many_malformed_batches_in_a_row_are_quarantined(driver: Driver) -> None:
    driver.live(*(at(6 + n, malformed=True) for n in range(QUARANTINE_AFTER)))
    assert driver.machine.quarantined_until == QUARANTINE_SECONDS
    assert driver.live(at(106)) == ["quarantined 106"]
    driver.now = QUARANTINE_SECONDS
    assert driver.live(at(107)) == ["replay 105"]
    assert driver.machine.quarantined_until is None


def test_what_a_quarantine_dropped_is_requested_when_it_ends(driver: Driver) -> None:
    driver.live(*(at(6 + n, malformed=True) for n in range(QUARANTINE_AFTER)), at(106))
    assert driver.tick(QUARANTINE_SECONDS - 1) == []
    assert driver.tick(QUARANTINE_SECONDS) == ["replay 105"]
    assert driver.machine.quarantined_until is None
    assert driver.replayed(at(105, malformed=True), at(106)) == ["apply a106"]


def test_a_batch_of_another_rank_is_refused_and_shown_and_what_was_known_is_dropped(driver: Driver) -> None:
    assert driver.live(at(6, dp_rank=1), at(7, dp_rank=1)) == ["wrong_rank 6", "reset", "wrong_rank 7"]
    assert "rank 1" in driver.machine.misconfigured
    assert driver.live(at(6, dp_rank=0)) == ["replay 0"]
    assert driver.machine.misconfigured == ""


def test_a_replay_of_another_rank_is_not_applied_and_drops_what_was_held(driver: Driver) -> None:
    driver.live(at(8))
    assert driver.replayed(at(5), at(6, dp_rank=1), at(7, dp_rank=1)) == ["wrong_rank 6", "stale 8", "reset"]
    assert "rank 1" in driver.machine.misconfigured
    assert (driver.machine.replaying, driver.machine.held, driver.machine.last_id) == (False, 0, None)
    # Whoever is behind the address now is asked once more when the connection is a new one.
    assert driver.reconnect() == ["replay 0"]
    assert driver.replayed(at(0, "b", dp_rank=0)) == ["apply b0"]
    assert driver.machine.misconfigured == ""


def test_after_a_loaded_state_the_sequence_goes_on_behind_it(driver: Driver) -> None:
    driver.live(at(8))
    driver.machine.restore(epoch=0, last_id=20)
    assert not driver.machine.replaying
    assert driver.live(at(21)) == ["apply a21"]
    assert driver.live(at(23)) == ["replay 21"]


class Stateful(Driver):
    """A machine of a source with epochs, whose states are in words as well."""

    def __init__(self, *, can_replay: bool = True, epoch: int = 1) -> None:
        super().__init__(can_replay=can_replay)
        self.epoch = epoch
        self.live(*(at(n, epoch=epoch) for n in range(6)))

    def state(self, last_id: int | None, *, epoch: int = 1, live: bool = True, **fields: Any) -> list[str]:
        attempt = None if live else self.machine.attempt
        if not self.machine.wants_state(attempt, epoch=epoch, last_id=last_id):
            return ["unwanted"]
        return ["load", *_words(self.machine.on_state(attempt, epoch=epoch, last_id=last_id, **fields))]


def test_a_state_as_new_as_what_is_known_is_wanted_and_an_older_one_is_not() -> None:
    driver = Stateful()
    assert driver.state(4) == ["unwanted"]
    assert driver.state(5) == ["load"]
    assert driver.state(9) == ["load"]
    assert driver.machine.last_id == 9
    assert driver.state(99, epoch=0) == ["unwanted"]
    assert driver.state(0, epoch=2) == ["load"]
    assert (driver.machine.epoch, driver.machine.last_id) == (2, 0)
    assert driver.live(at(10, epoch=1)) == ["stale 10"]


def test_a_live_state_drops_what_is_held_below_it_and_applies_the_rest() -> None:
    driver = Stateful()
    driver.live(at(8, epoch=1), at(9, epoch=1), at(10, epoch=1))
    old = driver.machine.attempt
    assert driver.state(8) == ["load", "stale 8", "apply a9", "apply a10"]
    assert not driver.machine.replaying
    assert driver.machine.on_replay(old, at(6, epoch=1), 0.0) == []


def test_a_live_state_that_does_not_reach_what_is_held_asks_for_the_rest() -> None:
    driver = Stateful()
    driver.live(at(9, epoch=1))
    assert driver.state(7) == ["load", "replay 7"]
    assert driver.replayed(at(7, epoch=1), at(8, epoch=1)) == ["apply a8"]
    assert driver.end() == ["apply a9"]
    mute = Stateful(can_replay=False)
    mute.machine.expect_state()
    mute.live(at(9, epoch=1))
    assert mute.state(7) == ["load", "demote 8..8", "apply a9"]


def test_answers_of_a_replay_that_is_over_are_no_states_either() -> None:
    driver = Stateful()
    driver.live(at(8, epoch=1))
    driver.live(at(9, epoch=1, cleared=True))
    assert driver.state(20, live=False) == ["unwanted"]


def test_batches_of_a_lower_epoch_in_a_replay_are_old() -> None:
    driver = Stateful(epoch=3)
    driver.live(at(8, epoch=3))
    assert driver.replayed(at(6, epoch=2), at(7, epoch=2)) == ["stale 6", "stale 7"]
    assert driver.machine.epoch == 3


def test_a_replay_of_a_higher_epoch_drops_what_is_held_of_the_former_one() -> None:
    driver = Driver()
    assert driver.live(at(5, epoch=1)) == ["replay 0"]
    assert driver.replayed(at(0, "b", epoch=2)) == ["stale 5", "reset", "replay 0"]
    assert driver.replayed(at(0, "b", epoch=2), at(1, "b", epoch=2)) == ["apply b0", "apply b1"]
    assert driver.end() == []


def test_with_epochs_a_held_batch_that_comes_again_in_other_bytes_is_a_duplicate() -> None:
    driver = Stateful()
    driver.live(at(8, epoch=1, size_bytes=10))
    assert driver.live(at(8, "encoded anew", epoch=1, size_bytes=10)) == ["duplicate 8"]
    driver.replayed(at(6, epoch=1), at(7, epoch=1))
    assert driver.end() == ["apply a8"]
    assert driver.machine.held == 0


def test_a_state_that_comes_as_batches_is_complete_with_the_batch_that_says_so() -> None:
    driver = Driver(can_replay=False)
    assert driver.live(at(7)) == ["apply a7"]
    assert driver.machine.missing == "0..6"
    # It begins behind what was known, or before it.
    for first in (8, 3):
        chunks = (at(first, "b", cleared=True, missing="the rest"), at(first + 1, "b", missing="the rest"))
        driver.live(*chunks)
        assert (driver.machine.history_incomplete, driver.machine.missing) == (True, "the rest")
        driver.live(at(first + 2, "b", missing=""))
        assert (driver.machine.history_incomplete, driver.machine.missing) == (False, "")
    driver.live(at(6, "b"))
    assert not driver.machine.history_incomplete


def test_a_second_hand_state_is_confirmed_or_refuted_by_its_last_batch() -> None:
    for life, expected in (("a", []), ("b", ["reset", "replay 0"])):
        driver = Stateful(epoch=0)
        driver.machine.restore(epoch=0, last_id=None)
        driver.machine.expect_state()
        digest_of_a = at(9).digest
        assert driver.state(9, epoch=0, live=False, second_hand=True, last_digest=digest_of_a) == ["load"]
        assert driver.machine.last_digest == digest_of_a
        assert driver.replayed(at(9, life)) == expected
    # An engine that has not got that far any more is another one.
    driver = Stateful(epoch=0)
    driver.machine.restore(epoch=0, last_id=None)
    driver.machine.expect_state()
    driver.state(9, epoch=0, live=False, second_hand=True)
    assert driver.end() == ["reset", "replay 0"]


def test_a_source_without_history_is_asked_once(driver: Driver) -> None:
    driver.live(at(8))
    assert _words(driver.machine.on_no_history(driver.machine.attempt, "it keeps none")) == [
        "demote 6..7",
        "apply a8",
    ]
    assert not driver.machine.replaying
    fresh = Driver()
    fresh.reconnect()
    assert _words(fresh.machine.on_no_history(fresh.machine.attempt, "it keeps none")) == []
    assert not fresh.machine.history_incomplete
    assert fresh.live(at(0)) == ["apply a0"]
    assert _words(fresh.machine.on_no_history(fresh.machine.attempt, "late")) == []


def test_healing_asks_for_everything_and_a_failure_costs_nothing() -> None:
    driver = Stateful()
    assert _words(driver.machine.on_heal()) == []
    driver.live(at(8, epoch=1))
    driver.machine.on_no_history(driver.machine.attempt, "")
    assert driver.machine.history_incomplete
    assert _words(driver.machine.on_heal()) == ["replay 0"]
    assert driver.live(at(9, epoch=1)) == []
    assert driver.fail() == ["apply a9"]
    assert driver.machine.retry_at is None
    assert driver.machine.counters["demotions"] == 1
    assert _words(driver.machine.on_heal()) == ["replay 0"]
    # A gap that came meanwhile is a gap all the same.
    assert driver.live(at(11, epoch=1)) == []
    assert driver.fail() == ["replay 9"]
    assert driver.replayed(at(10, epoch=1)) == ["apply a10"]
    assert driver.end() == ["apply a11"]
    assert _words(driver.machine.on_heal()) == ["replay 0"]
    assert driver.state(12, live=False) == ["load"]
    assert driver.end() == []
    assert not driver.machine.history_incomplete


def test_healing_by_all_batches_begins_anew_and_goes_on_as_any_replay() -> None:
    driver = Stateful()
    driver.live(at(8, epoch=1))
    driver.machine.on_no_history(driver.machine.attempt, "")
    assert _words(driver.machine.on_heal()) == ["replay 0"]
    assert driver.live(at(9, epoch=1)) == []
    assert driver.replayed(at(0, epoch=1), at(1, epoch=1)) == ["reset", "apply a0", "apply a1"]
    assert not driver.machine.history_incomplete
    # What broke off is asked for from there on: nothing more is forgotten.
    assert driver.fail() == ["replay 1"]
    assert driver.replayed(*(at(number, epoch=1) for number in range(1, 9))) == [
        *(f"apply a{number}" for number in range(2, 9))
    ]
    assert driver.end() == ["apply a9"]
    assert not driver.machine.history_incomplete


def test_what_has_no_place_in_the_sequence_counts_for_the_quarantine(driver: Driver) -> None:
    until = []
    for _ in range(QUARANTINE_AFTER):
        driver.machine.on_malformed(0.0)
        until.append(driver.machine.quarantined_until)
    assert until == [None] * (QUARANTINE_AFTER - 1) + [QUARANTINE_SECONDS]
    driver.machine.on_malformed(1.0)
    assert driver.live(at(6)) == ["quarantined 6"]
    for _ in range(3):
        driver.machine.on_malformed(QUARANTINE_SECONDS + 1)
    assert driver.machine.quarantined_until == QUARANTINE_SECONDS


def test_every_drop_is_counted(driver: Driver) -> None:
    driver.live(at(5), at(4))
    assert driver.machine.counters[DropReason.DUPLICATE] == 2
    assert driver.machine.counters["applied"] == 6


def began_at_one(driver: Driver) -> Driver:
    """A first replay from 0 on that begins with 1, which may be because batch 0 is gone."""
    assert driver.reconnect() == ["replay 0"]
    assert driver.replayed(at(1), at(2)) == ["apply a1", "apply a2"]
    assert driver.end() == []
    assert driver.machine.missing == "0..0"
    return driver


def test_numbers_that_begin_at_1_are_complete_once_a_later_replay_begins_with_1_as_well() -> None:
    driver = began_at_one(Driver())
    # Only what was published since shows whether anything has to go for it.
    assert driver.live(at(3)) == ["apply a3", "replay 0"]
    assert driver.machine.missing == "0..0"
    assert driver.replayed(at(1), at(2), at(3), at(4)) == ["duplicate 1", "duplicate 2", "apply a4"]
    assert driver.end() == []
    assert not driver.machine.history_incomplete
    assert driver.live(at(4), at(5)) == ["duplicate 4", "apply a5"]
    assert driver.machine.quiet


def test_a_batch_0_that_left_the_replay_buffer_stays_missing() -> None:
    driver = began_at_one(Driver())
    assert driver.live(at(3)) == ["apply a3", "replay 0"]
    assert driver.replayed(at(2), at(3)) == ["duplicate 2"]
    assert driver.end() == []
    assert driver.machine.missing == "0..0"
    assert driver.live(at(4)) == ["apply a4"], "it is not asked for again"


def test_a_batch_0_that_the_later_replay_has_makes_it_whole() -> None:
    driver = began_at_one(Driver())
    driver.live(at(3))
    assert driver.replayed(at(0), at(1)) == ["reset", "apply a0", "apply a1"]
    assert driver.replayed(at(2), at(3)) == ["apply a2", "apply a3"]
    assert driver.end() == []
    assert not driver.machine.history_incomplete


def test_without_a_replay_a_publisher_that_is_new_may_begin_at_1() -> None:
    driver = Driver(can_replay=False)
    driver.reconnect(new_publisher=True)
    assert driver.live(at(1), at(2)) == ["apply a1", "apply a2"]
    assert not driver.machine.history_incomplete
    assert driver.machine.unproven_start
    driver.machine.on_missing_start()
    assert driver.machine.missing == "0..0"
    # Its next life, too, and one that clears its cache has nothing missing whatever it had.
    driver.reconnect(new_publisher=True)
    assert driver.live(at(1, "b")) == ["reset", "apply b1"]
    assert not driver.machine.history_incomplete
    assert driver.live(at(2, "b", cleared=True)) == ["apply b2"]
    assert not driver.machine.unproven_start


def test_without_a_replay_a_publisher_that_was_there_before_has_lost_its_batch_0() -> None:
    driver = Driver(can_replay=False)
    driver.reconnect()
    assert driver.live(at(1)) == ["apply a1"]
    assert driver.machine.missing == "0..0"
    new = Driver(can_replay=False)
    new.reconnect(new_publisher=True)
    assert new.live(at(2)) == ["apply a2"]
    assert new.machine.missing == "0..1"


@pytest.mark.parametrize("can_replay", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 700])
def test_two_publishers_at_one_endpoint_are_named_and_not_believed(can_replay: bool, ahead: int) -> None:
    driver = Driver(can_replay=can_replay)
    driver.reconnect()
    words = [word for n in range(1000) for word in driver.live(at(n, "a"), at(ahead + n, "b"))]
    assert driver.machine.misconfigured == MIXED
    assert driver.machine.missing == "whatever two publishers send"
    assert words.count("reset") <= MIXED_AFTER + 1
    assert len([word for word in words if word.startswith("replay")]) <= 2 * MIXED_AFTER + 2
    assert driver.machine.counters["mixed"] > 1900
    # One of them goes.
    rest = [driver.live(at(1000 + n, "a")) for n in range(ONE_AGAIN_AFTER + 1)]
    assert rest[0] == ["mixed 1000"]
    assert driver.machine.misconfigured == ""
    if can_replay:
        assert rest[-1] == [] or rest[-1] == ["replay 0"]
        driver.replayed(*(at(n, "a") for n in range(1000 + ONE_AGAIN_AFTER + 1)))
        driver.end()
        assert not driver.machine.history_incomplete
        assert driver.machine.last_id == 1000 + ONE_AGAIN_AFTER


def test_an_engine_that_restarts_again_and_again_is_not_taken_for_two() -> None:
    driver = Driver(can_replay=False)
    for life in range(3 * MIXED_AFTER):
        driver.reconnect()
        driver.live(at(0, str(life)), at(1, str(life)))
    assert driver.machine.misconfigured == ""
    assert driver.machine.last_id == 1


def fenced(driver: Driver, event_id: int | None) -> list[str]:
    return _words(driver.machine.on_fence(event_id))


def test_after_a_fence_only_later_batches_count_and_they_come_again(driver: Driver) -> None:
    words = fenced(driver, 2)
    assert (words, driver.machine.last_id, driver.machine.replaying) == (["reset", "replay 2"], 2, True)
    assert driver.replayed(at(2), at(3), at(4), at(5)) == ["apply a3", "apply a4", "apply a5"]
    driver.end()
    driver.live(at(6))
    machine = driver.machine
    assert (machine.last_id, machine.replaying, machine.history_incomplete, machine.fenced) == (6, False, True, True)
    assert "up to 2" in machine.missing
    machine.end_fence()
    assert (machine.history_incomplete, machine.fenced, machine.missing) == (False, False, "")


@pytest.mark.parametrize("event_id", [None, 5, 9])
def test_a_fence_at_an_unknown_or_the_last_batch_counts_from_now_on(driver: Driver, event_id: int | None) -> None:
    assert fenced(driver, event_id) == ["reset"]
    assert (driver.machine.last_id, driver.machine.replaying) == (5, False)
    assert driver.live(at(6)) == ["apply a6"]


def test_without_a_replay_a_fence_counts_from_now_on(mute: Driver) -> None:
    assert fenced(mute, 2) == ["reset"]
    assert (mute.live(at(6)), mute.machine.fenced) == (["apply a6"], True)


def test_a_cleared_cache_ends_a_fence(driver: Driver) -> None:
    fenced(driver, None)
    driver.live(at(6, cleared=True))
    assert (driver.machine.history_incomplete, driver.machine.fenced) == (False, False)


def test_a_fenced_source_is_not_healed_by_its_whole_history(driver: Driver) -> None:
    fenced(driver, None)
    assert driver.machine.on_heal() == []


def test_a_loss_after_a_fence_is_not_ended_with_it(mute: Driver) -> None:
    fenced(mute, None)
    mute.live(at(9))
    mute.machine.end_fence()
    assert (mute.machine.history_incomplete, mute.machine.fenced) == (True, False)
