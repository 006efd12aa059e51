"""Two minutes of `make soak-stack`, with fewer requests: the stack comes to rest and holds no more than before."""

from __future__ import annotations

from random import Random

import pytest
from soak_stack.figures import EARLY, LIMITS, Growth, Window, growths, slope, table
from soak_stack.run import run
from support.seeds import test_seed as seed

HELD = tuple(what for what in LIMITS if what not in EARLY)
"""What tells after minutes: memory takes longer to be what it will be, and so do the codes with which calls end."""
PAUSE_SECONDS = 1.5
"""Of a client between two requests: the tests beside this one are to get on."""


@pytest.mark.timeout(480)
async def test_a_stack_under_churn_comes_to_rest_and_holds_no_more_than_before() -> None:
    assert await run(60.0, seed(), windows_at_least=6, pause_seconds=PAUSE_SECONDS, judged=HELD) == []


def windows(**processes: list[float]) -> list[Window]:
    length = len(next(iter(processes.values())))
    return [Window(n, {name: {"RSS": values[n]} for name, values in processes.items()}) for n in range(length)]


def verdict(*values: float, process: str = "gateway-0", young: frozenset[str] = frozenset()) -> list[Growth]:
    return [each for each in growths(windows(**{process: list(values)}), young) if each.too_much]


def test_a_leak_is_told_from_noise_and_from_a_single_peak() -> None:
    mib = 2**20
    rng = Random(5)
    assert verdict(*(70 * mib + rng.uniform(-mib, mib) for _ in range(12))) == []
    assert verdict(*(70 * mib, 70 * mib, 95 * mib, 70 * mib, 70 * mib, 71 * mib)) == []
    (leak,) = verdict(*((70 + 0.5 * n) * mib + rng.uniform(-mib, mib) / 4 for n in range(12)))
    assert 4 * mib < leak.grown < 7 * mib
    assert str(leak).startswith("gateway-0: RSS ")
    assert "MiB may be" in str(leak)


def test_of_a_process_that_was_started_anew_memory_says_nothing() -> None:
    assert verdict(60e6, 70e6, 80e6, young=frozenset({"gateway-0"})) == []


def test_the_growth_of_a_window_is_the_median_of_all_pairs() -> None:
    assert slope([1.0]) == 0.0
    assert slope([1.0, 3.0, 5.0, 100.0, 9.0]) == 2.0


def test_the_table_has_a_line_a_window_and_a_dash_for_what_a_process_has_not() -> None:
    first = Window(1.0, {"a": {"series": 12.0}})
    second = Window(2.0, {"a": {"series": 13.0}, "b": {"series": 1_000.0}})
    head, *lines = table([first, second], "series")
    assert head.split() == ["series", "a", "b"]
    assert [line.split() for line in lines] == [["1.0", "min", "12", "–"], ["2.0", "min", "13", "1,000"]]
