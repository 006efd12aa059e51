"""When a worker that fails is left out, and when it comes back."""

import random

import pytest
from support.seeds import test_seed

from kvscout_common.rpc.service_info import TenantWarning, text_of
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.health import BUSY_SECONDS, MAX_BUSY_SECONDS, MISSED_CHECKS, WorkerHealth

TENANT = "default"


def worker(name: str, ranks: int = 1) -> WorkerSpec:
    return WorkerSpec(worker_id=name, model="m", block_size=16, dp_size=ranks)


def key(name: str, rank: int = 0) -> tuple[str, WorkerRank]:
    return TENANT, WorkerRank(name, rank)


class World:
    """Workers a, b, c, … and a clock."""

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self.drawn = 0.0
        self.health = WorkerHealth(lambda: self.now, lambda: self.drawn)
        self.workers = [worker(chr(ord("a") + index)) for index in range(workers)]

    def fail(self, name: str, times: int = 1, *, is_gone: bool = False) -> list[float]:
        return [self.health.failed(key(name), self.workers, is_gone=is_gone) for _ in range(times)]

    def start_slowly(self, name: str) -> None:
        """It was out, is back, and gets none of the next requests."""
        self.fail(name, 3)
        self.now = 10
        self.health.ran(key(name))
        self.drawn = 0.99

    def miss_checks(self, name: str) -> None:
        for _ in range(MISSED_CHECKS):
            self.health.checked(TENANT, name, "no answer")

    def ejected(self, *tried: str) -> set[str]:
        return self.health.ejected(TENANT, lambda: self.workers, tried)


def test_a_worker_is_left_out_at_its_third_failure_in_a_row() -> None:
    world = World(4)
    assert world.fail("a", 3) == [0, 0, 10]
    assert world.ejected() == {"a"}
    assert world.fail("a") == [0]  # of what was under way


def test_who_is_left_out_is_told_to_its_tenant() -> None:
    world = World(4)
    world.fail("a", 2)
    assert not world.health.warnings()
    world.fail("a")
    world.now = 4
    assert world.health.warnings() == [TenantWarning(TENANT, "worker a/0 fails what others run: no requests for 6 s")]
    world.now = 10
    [warning] = world.health.warnings()
    assert text_of(warning).endswith("one request at a time")
    world.health.ran(key("a"))
    assert not world.health.warnings()


def test_who_is_back_gets_a_growing_share_of_requests() -> None:
    world = World(4)
    world.fail("a", 3)
    world.now = 10
    world.health.ran(key("a"))
    for now, share in ((10, 0.1), (13, 0.3), (19, 0.9)):
        world.now = now
        for world.drawn, ejected in ((share - 0.01, set()), (share, {"a"})):
            assert world.ejected() == ejected
    world.now, world.drawn = 20, 0.99
    assert not world.ejected()


def test_slow_starts_never_keep_those_in_who_are_out() -> None:
    world = World(2)
    world.start_slowly("a")
    world.miss_checks("b")
    assert world.ejected() == {"b"}


def test_who_misses_health_checks_gets_nothing_until_one_is_answered() -> None:
    world = World(4)
    told = [world.health.checked(TENANT, "a", "no answer") for _ in range(MISSED_CHECKS + 1)]
    assert told == [False] * (MISSED_CHECKS - 1) + [True, False]
    assert world.ejected() == {"a"}
    assert "health checks" in text_of(world.health.warnings()[0])
    assert world.health.checked(TENANT, "a")
    assert not world.ejected()
    assert not world.health.warnings()


def test_a_worker_that_was_gone_gets_requests_once_it_answers_a_health_check() -> None:
    world = World(4)
    world.fail("a", 2)
    world.fail("a", is_gone=True)
    assert world.ejected() == {"a"}
    world.health.checked(TENANT, "a", "no connection")
    assert world.ejected() == {"a"}
    assert world.health.checked(TENANT, "a")
    assert not world.ejected()
    assert not world.health.warnings()
    world.drawn = 0.99
    assert world.ejected() == {"a"}, "its caches are cold: it starts slowly"


def test_a_worker_that_fails_requests_or_comes_and_goes_waits_whatever_its_health_checks_say() -> None:
    world = World(4)
    world.fail("a", 3)
    world.fail("b", 3, is_gone=True)
    assert not world.health.checked(TENANT, "a")
    assert world.health.checked(TENANT, "b")
    assert world.ejected() == {"a"}
    world.now = 15
    assert world.fail("b", 3, is_gone=True)[-1] == 20
    assert not world.health.checked(TENANT, "b")
    assert "b" in world.ejected()


def test_checks_leave_half_of_the_workers_in_whatever_they_find() -> None:
    world = World(4)
    for name in "abcd" * MISSED_CHECKS:
        world.health.checked(TENANT, name, "no answer")
    assert len(world.ejected()) == 2
    world.health.forget(TENANT, "a")
    assert "a" not in world.ejected()


def test_failures_among_many_successes_or_far_apart_are_borne() -> None:
    world = World(4)
    for _ in range(20):
        assert world.fail("a") == [0]
        world.health.ran(key("a"))
        world.health.ran(key("a"))
    for _ in range(20):
        world.now += 16
        assert world.fail("b") == [0]
    assert not world.ejected()


def test_one_request_shows_whether_it_is_well_again() -> None:
    world = World(4)
    world.fail("a", 3)
    world.now = 9.9
    assert world.ejected() == {"a"}
    world.now = 10
    assert not world.ejected()
    world.health.sent(key("a"))
    assert world.ejected() == {"a"}
    world.health.withdrawn(key("a"))  # its client went away
    assert not world.ejected()
    world.health.sent(key("a"))
    world.health.ran(key("a"))
    assert not world.ejected()
    assert world.fail("a", 2) == [0, 0]


def test_a_worker_that_does_not_recover_is_left_out_for_longer_each_time() -> None:
    world, seconds = World(4), (10, 20, 40, 60, 60)
    world.fail("a", 2)
    for expected in seconds:
        world.health.sent(key("a"))
        assert world.fail("a") == [expected]
        world.now += expected
    world.health.sent(key("a"))
    world.health.ran(key("a"))
    assert world.fail("a", 3)[-1] == 60  # it flaps
    world.now += 60
    world.health.ran(key("a"))
    world.now += 60
    assert world.fail("a", 3)[-1] == 10  # it lasted


@pytest.mark.parametrize(("workers", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_never_more_than_half_are_left_out(workers: int, most: int) -> None:
    world = World(workers)
    out = [world.fail(spec.worker_id, 5) for spec in world.workers]
    assert sum(any(seconds) for seconds in out) == most
    assert len(world.ejected()) == most
    for spec in world.workers:
        world.health.overloaded(key(spec.worker_id), 5)
    assert len(world.ejected()) == most


def test_a_request_that_failed_at_all_others_gets_those_that_are_out() -> None:
    world = World(4)
    world.fail("a", 3)
    world.miss_checks("b")
    assert world.ejected("c") == {"a", "b"}  # there is still d
    assert world.ejected("c", "d") == set()
    assert world.ejected("gone", "d", "c", "a") == set()


def test_a_request_that_failed_at_all_others_gets_those_that_start_slowly() -> None:
    world = World(2)
    world.start_slowly("a")
    assert world.ejected() == {"a"}
    assert world.ejected("b") == set()


def test_who_is_busy_is_left_alone_also_by_a_request_that_failed_at_all_others() -> None:
    world = World(4)
    world.fail("a", 3)
    world.health.overloaded(key("b"), 5)
    assert world.ejected("c", "d") == {"b"}


def test_who_runs_a_request_that_had_nobody_else_is_back_in() -> None:
    world = World(2)
    world.fail("a", 3)
    world.now = 1
    world.health.ran(key("a"))  # what was sent there before
    assert world.ejected() == {"a"}
    world.health.sent(key("a"))
    assert world.fail("a") == [0]  # it is out for no longer than it was
    world.health.sent(key("a"))
    world.health.ran(key("a"))
    assert not world.health.failing()
    assert not world.ejected()
    assert world.fail("b", 3) == [0, 0, 10]  # the other one can be left out now
    assert world.ejected() == {"b"}


def test_the_ranks_of_a_worker_are_left_out_one_by_one() -> None:
    world = World(0)
    world.workers = [worker("a", 2), worker("b", 2)]
    assert [world.health.failed(key("a", 1), world.workers) for _ in range(3)][-1] == 10
    assert not world.ejected()  # its other rank is well
    assert [world.health.failed(key("a", 0), world.workers) for _ in range(3)][-1] == 10
    assert world.ejected() == {"a"}
    assert not any(world.health.failed(key("b", 0), world.workers) for _ in range(9))


def test_an_overloaded_worker_is_left_alone_for_a_moment_and_has_not_failed() -> None:
    world = World(2)
    for _ in range(50):
        world.health.overloaded(key("a"), None)
    assert world.ejected() == {"a"}
    world.now = BUSY_SECONDS
    assert not world.ejected()
    world.health.overloaded(key("a"), 1e9)
    world.now += MAX_BUSY_SECONDS
    assert not world.ejected()


def test_what_was_known_of_a_worker_that_is_gone_is_forgotten() -> None:
    world = World(4)
    world.fail("a", 3)
    world.health.forget(TENANT, "a")
    assert not world.ejected()
    assert world.fail("gone", 5) == [0] * 5
    assert not world.ejected()


def test_whatever_happens_half_stay_in_and_everyone_who_works_comes_back() -> None:
    seed = test_seed()
    rng, world = random.Random(seed), World(6)
    for _ in range(5000):
        world.now += rng.expovariate(1.0)
        name = rng.choice(world.workers).worker_id
        match rng.randrange(6):
            case 0:
                world.health.sent(key(name))
            case 1:
                world.health.ran(key(name))
            case 2:
                world.health.withdrawn(key(name))
            case 3:
                world.health.overloaded(key(name), rng.choice([None, 0.0, 3.0, 1e6]))
            case _:
                world.fail(name, rng.randrange(1, 5))
        assert len(world.ejected()) <= 3
    for _ in range(3):
        world.now += 100
        for spec in world.workers:
            world.health.sent(key(spec.worker_id))
            world.health.ran(key(spec.worker_id))
    world.health.failed(key("a"), world.workers)
    assert not world.ejected()
    assert len(world.health._records) == 1
