"""The waiting queue, and what an engine makes of priorities."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import pytest

from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.request import Request
from kvscout_mocker.engine.waiting import WaitingQueue
from kvscout_mocker.tokens.sequence import Sequence


@dataclass(eq=False)
class Waiting:
    priority: int
    arrival: int


@pytest.mark.parametrize(("by_priority", "order"), [(False, [1, 2, 3, 4]), (True, [4, 2, 1, 3])])
def test_lower_priorities_go_first_and_equal_ones_as_they_came(by_priority: bool, order: list[int]) -> None:
    queue: WaitingQueue[Waiting] = WaitingQueue(by_priority=by_priority)
    for arrival, priority in enumerate((5, 0, 5, -1), start=1):
        queue.add(Waiting(priority, arrival))
    assert [queue.take().arrival for _ in range(len(queue))] == order


@pytest.mark.parametrize(("by_priority", "first"), [(False, 3), (True, 1)])
def test_a_request_that_was_out_goes_to_the_front_or_to_its_place(by_priority: bool, first: int) -> None:
    queue: WaitingQueue[Waiting] = WaitingQueue(by_priority=by_priority)
    queue.add(Waiting(0, 1))
    queue.put_back(late := Waiting(2, 3))
    assert queue.first.arrival == first
    queue.remove(late)
    assert (queue.first.arrival, len(queue)) == (1, 1)


def request(name: str, tokens: int, priority: int) -> Request:
    prompt = array("I", range(100, 100 + tokens))
    prompt[0] = hash(name) % 1000 + 10
    return Request(name, Sequence(prompt, block_size=16, hash_seed=1), 64, priority=priority)


def finished(engine: Engine) -> list[str]:
    names = []
    while (step := engine.begin_step()) is not None:
        names += [output.request.request_id for output in engine.finish_step(step) if output.finish is not None]
    return names


@pytest.mark.parametrize(("by_priority", "order"), [(False, ["a", "b", "c"]), (True, ["a", "c", "b"])])
def test_a_later_request_of_a_lower_number_is_served_first(
    config: MockerConfig, by_priority: bool, order: list[str]
) -> None:
    engine = Engine(replace(config.engine, max_num_seqs=1, by_priority=by_priority))
    engine.submit(request("a", 20, 0))
    assert engine.begin_step() is not None
    engine.submit(request("b", 20, 4))
    engine.submit(request("c", 20, 2))
    assert finished(engine) == order


@pytest.mark.parametrize(("by_priority", "order"), [(False, ["first", "last"]), (True, ["last", "first"])])
def test_the_request_of_the_highest_number_is_preempted(
    config: MockerConfig, by_priority: bool, order: list[str]
) -> None:
    engine = Engine(replace(config.engine, num_gpu_blocks=14, by_priority=by_priority))
    engine.submit(request("first", 80, 9))
    engine.submit(request("last", 80, 1))
    assert finished(engine) == order
    assert engine.counters.preemptions >= 1
