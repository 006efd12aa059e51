"""Fair shares: who goes next, against a slow oracle; shares by weight, lower priorities, bounded accounts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random

import pytest
from support.scheduler_builders import ManualClock, key, request, scheduler, worker
from support.seeds import test_seed

from kvscout_common.errors import ConfigError, InvalidArgument, KvscoutError
from kvscout_scheduler.queue.fair_shares import MAX_NAMES, OTHERS, Accounts, FairShares, Flow
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.settings import QueueOrder

ROOM_FOR_ONE = 501
"""Prompt tokens: while a worker of `busy` computes them, it has no room."""


def busy(clock: ManualClock | None = None, **order: object) -> Scheduler:
    """A scheduler whose only worker computes one prompt at a time."""
    only = worker("a", max_num_batched_tokens=1000)
    return scheduler(only, clock=clock, queue_threshold=0.5, queue_limit=4096, queue_order=QueueOrder(**order))  # type: ignore[arg-type]


class Floor:
    """Requests at such a scheduler, and who was served, in order."""

    def __init__(self, made: Scheduler) -> None:
        self.made = made
        self.served: list[str] = []
        self.running: list[str] = []

    def ask(self, name: str, *, isl: int = ROOM_FOR_ONE, **fields: object) -> None:
        def answer(outcome: Decision | KvscoutError) -> None:
            if isinstance(outcome, Decision):
                self.served.append(name)
                self.running.append(name)

        self.made.reserve_or_wait(request(isl=isl, request_id=name, **fields), answer)  # type: ignore[arg-type]

    def finish(self) -> None:
        """End the request that runs, so that the next one begins."""
        self.made.free(key(self.running.pop(0)))


@dataclass
class Waiting:
    """A request, as the oracle has it."""

    name: str
    priority: int
    caller: str
    fairness_id: str
    seconds: float
    since: float


class Oracle:
    """Order of the queue, by looking at everybody each time."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.waiting: list[Waiting] = []
        self.accounts: dict[tuple[object, ...], float] = defaultdict(float)
        self.floors: dict[tuple[object, ...], float] = defaultdict(float)
        self.began: dict[tuple[object, ...], int] = {}
        self.arrivals = 0
        self.owed = 0.0

    def levels(self, one: Waiting) -> list[tuple[tuple[object, ...], tuple[object, ...], float]]:
        """(account, the accounts that it competes with, weight) of the caller, then of the fairness id."""
        weights, top = self.order.weights, (one.priority,)
        caller = (*top, one.caller)
        return [
            (caller, top, weights.get(one.caller, 1.0)),
            ((*caller, one.fairness_id), caller, weights.get(one.fairness_id, 1.0)),
        ]

    def join(self, one: Waiting) -> None:
        self.arrivals += 1
        if not self.waiting:
            self.owed = 0.0
        if all(other.priority != one.priority for other in self.waiting):
            for table in (self.accounts, self.floors):
                for name in [name for name in table if name[0] == one.priority]:
                    del table[name]
        for account, siblings, _ in self.levels(one):
            if not any(account in (level[0] for level in self.levels(other)) for other in self.waiting):
                self.accounts[account] = max(self.accounts[account], self.floors[siblings])
                self.began[account] = self.arrivals
        self.waiting.append(one)

    def leave(self, name: str) -> None:
        self.waiting = [one for one in self.waiting if one.name != name]

    def next(self, now: float) -> str:
        """Serve the one that goes next."""
        top = max(one.priority for one in self.waiting)
        aged = [one for one in self.waiting if now - one.since >= self.order.aged_seconds]
        if self.owed > 0 and (late := [one for one in aged if one.priority < top]):
            served = late[0]
            self.owed -= (1 - self.order.aged_share) * served.seconds
        else:
            first = [one for one in self.waiting if one.priority == top]
            for level in (0, 1):
                accounts = {
                    account: self.accounts[account] for one in first for account, *_ in [self.levels(one)[level]]
                }
                least = min(accounts, key=lambda account: (accounts[account], self.began[account]))
                first = [one for one in first if self.levels(one)[level][0] == least]
            served = first[0]
            if any(one.priority < top for one in aged):
                self.owed += self.order.aged_share * served.seconds
        self.leave(served.name)
        for account, siblings, weight in self.levels(served):
            self.floors[siblings] = max(self.floors[siblings], self.accounts[account])
            self.accounts[account] = self.floors[siblings] + served.seconds / weight
        return served.name


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_random_arrivals_and_cancellations_are_served_as_the_oracle_says(share: float) -> None:
    rng, clock = Random(test_seed()), ManualClock()
    weights = {"x": 2.0, "y": 0.5, "i": 3.0}
    made = busy(clock, weights=weights, aged_share=share, aged_seconds=3.0)
    oracle, floor = Oracle(made.settings.queue_order), Floor(made)
    floor.ask("first")
    for number in range(3000):
        clock.advance(rng.random())
        draw = rng.random()
        if draw < 0.5:
            name, isl = f"r{number}", rng.randint(ROOM_FOR_ONE, 9000)
            flow = {"caller": rng.choice("xyz"), "fairness_id": rng.choice("ij")}
            priority = rng.choice((-1, 0, 0, 0, 5))
            floor.ask(name, isl=isl, priority=priority, **flow)
            waiter = made.waiting.find(key(name), 0)
            if waiter is not None:
                oracle.join(Waiting(name, priority, **flow, seconds=waiter.seconds, since=clock.now))
        elif draw < 0.6 and oracle.waiting:
            gone = rng.choice(oracle.waiting).name
            made.free(key(gone))
            oracle.leave(gone)
        elif floor.running:
            expected = oracle.next(clock.now) if oracle.waiting else None
            floor.finish()
            assert (floor.served[-1] if floor.running else None) == expected, f"after {number} events"
    assert len(made.waiting) == len(oracle.waiting)
    assert len(floor.served) > 500


def test_callers_that_always_wait_get_seconds_by_weight() -> None:
    rng = Random(test_seed())
    floor = Floor(busy(weights={"heavy": 3.0}))
    floor.ask("0")
    seconds: defaultdict[str, float] = defaultdict(float)
    costs: dict[str, tuple[str, float]] = {}
    for number in range(1, 1200):
        caller = "heavy" if number % 2 else "light"
        floor.ask(f"{number}", isl=rng.randint(ROOM_FOR_ONE, 20_000), caller=caller)
        waiter = floor.made.waiting.find(key(f"{number}"), 0)
        assert waiter is not None
        costs[f"{number}"] = (caller, waiter.seconds)
    largest = max(cost for _, cost in costs.values())
    for _ in range(600):
        floor.finish()
        caller, cost = costs[floor.served[-1]]
        seconds[caller] += cost
        assert abs(seconds["heavy"] / 3 - seconds["light"]) <= largest * (1 + 1 / 3)
    assert seconds["light"] > 10 * largest


def test_a_flood_of_one_caller_does_not_hold_up_another() -> None:
    floor = Floor(busy())
    floor.ask("running")
    for number in range(100):
        floor.ask(f"flood{number}", caller="flood")
    for number in range(5):
        floor.ask(f"quiet{number}", caller="quiet")
    for _ in range(11):
        floor.finish()
    assert [name for name in floor.served if name.startswith("quiet")] == [f"quiet{number}" for number in range(5)]


def test_a_caller_that_invents_fairness_ids_divides_its_own_share() -> None:
    floor = Floor(busy())
    floor.ask("running")
    for number in range(100):
        floor.ask(f"many{number}", caller="many", fairness_id=f"id{number}")
        floor.ask(f"one{number}", caller="one")
    for _ in range(50):
        floor.finish()
    assert Counter(name.rstrip("0123456789") for name in floor.served[1:]) == {"many": 25, "one": 25}


def test_one_that_comes_again_and_again_gets_no_more_than_one_that_waits() -> None:
    floor = Floor(busy())
    floor.ask("running")
    for number in range(40):
        floor.ask(f"waits{number}", caller="waits")
    for number in range(20):
        floor.ask(f"again{number}", caller="again")
        while floor.served[-1] != f"again{number}":
            floor.finish()
    served = Counter(name.rstrip("0123456789") for name in floor.served[1:])
    assert served["again"] == 20
    assert abs(served["waits"] - 20) <= 1


def test_who_leaves_without_being_served_is_not_charged() -> None:
    floor = Floor(busy())
    floor.ask("running")
    for number in range(20):
        floor.ask(f"gone{number}", caller="a", isl=50_000)
    floor.ask("b0", caller="b")
    for number in range(20):
        floor.made.free(key(f"gone{number}"))
    floor.ask("a0", caller="a")
    floor.ask("b1", caller="b")
    floor.ask("a1", caller="a")
    for _ in range(4):
        floor.finish()
    assert floor.served[1:] == ["b0", "a0", "b1", "a1"]


def test_a_lower_priority_gets_its_share_once_it_has_waited_for_long() -> None:
    clock = ManualClock()
    floor = Floor(busy(clock, aged_share=0.2, aged_seconds=10.0))
    floor.ask("running", priority=1)
    for number in range(50):
        floor.ask(f"batch{number}", priority=-1)
        floor.ask(f"chat{number}", priority=1)
    for _ in range(10):
        floor.finish()
    assert all(name.startswith("chat") for name in floor.served[1:]), "before that, priorities are strict"
    clock.advance(10.0)
    for _ in range(20):
        floor.finish()
    late = floor.served[11:]
    assert Counter(name.rstrip("0123456789") for name in late) == {"batch": 4, "chat": 16}
    assert [name for name in late if name.startswith("batch")] == [f"batch{number}" for number in range(4)]


def test_without_a_share_priorities_are_strict_however_long_a_request_waits() -> None:
    clock = ManualClock()
    floor = Floor(busy(clock, aged_share=0.0, aged_seconds=0.0))
    floor.ask("running")
    floor.ask("batch", priority=-1)
    for number in range(20):
        floor.ask(f"chat{number}")
    clock.advance(1e6)
    for _ in range(20):
        floor.finish()
    assert "batch" not in floor.served
    floor.finish()
    assert floor.served[-1] == "batch"


def test_accounts_are_bounded_and_further_names_share_one() -> None:
    accounts = Accounts()
    names = [accounts.enter(f"n{number}") for number in range(2 * MAX_NAMES)]
    assert names == [*(f"n{number}" for number in range(MAX_NAMES)), *[OTHERS] * MAX_NAMES]
    for name in names:
        accounts.charge(name, 1.0)
        accounts.leave(name)
    assert not accounts.waiting
    assert accounts.enter("new") == "new"
    assert len(accounts.had) <= MAX_NAMES + 1


def test_random_names_leave_bounded_accounts_and_no_request() -> None:
    rng = Random(test_seed())
    shares, waiting = FairShares({}), list[tuple[Flow, float]]()
    for _ in range(20_000):
        if rng.random() < 0.5:
            wanted = Flow(f"c{rng.randrange(1000)}", f"i{rng.randrange(1000)}")
            seconds = rng.random()
            waiting.append((shares.enter(wanted, seconds), seconds))
        elif waiting:
            flow, seconds = waiting.pop(rng.randrange(len(waiting)))
            shares.leave(flow, seconds)
            if rng.random() < 0.8:
                shares.charge(flow, seconds)
        assert shares.waiting == len(waiting)
        assert len(shares._callers.had) <= MAX_NAMES + 1
    while waiting:
        shares.leave(*waiting.pop())
    assert shares.seconds == 0.0
    assert shares.report() == []


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (QueueOrder(weights={"a": 0.0}), "fairness_weight"),
        (QueueOrder(weights={"": 1.0}), "fairness_weight"),
        (QueueOrder(weights={"a": float("inf")}), "fairness_weight"),
        (QueueOrder(aged_share=1.0), "queue_aged_share"),
        (QueueOrder(aged_seconds=-1.0), "queue_aged_seconds"),
    ],
)
def test_settings_out_of_range_are_named(order: QueueOrder, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        order.validate()
    assert refused.value.field == field


@pytest.mark.parametrize("field", ["caller", "fairness_id"])
def test_names_are_of_bounded_length(field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Floor(busy()).ask("r", isl=1, **{field: "x" * 257})
    assert refused.value.field == field


def test_the_largest_lead_of_a_caller_is_that_of_those_who_wait() -> None:
    shares = FairShares({})
    assert shares.ahead_seconds == 0.0
    for caller in ("a", "a", "b"):
        shares.enter(Flow(caller), 1.0)
    shares.leave(Flow("a"), 1.0)
    shares.charge(Flow("a"), 3.0)
    assert shares.ahead_seconds == 3.0 == max(share.ahead_seconds for share in shares.report())
    shares.leave(Flow("b"), 1.0)
    assert shares.ahead_seconds == 0.0, "nobody else waits"
