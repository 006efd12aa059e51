"""The rows of `kvscout bench index`. `bench/README.md` defines the workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from kvscout_bench.harness import Case, Goal, Sample


class Layer(StrEnum):
    """Language from which an index is called."""

    NATIVE = "native"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Fixture:
    """Contents of an index under measurement; 64 workers, prompts of 1,024 blocks."""

    prompts: int
    holders: int
    lengths: str = "equal"
    event_blocks: int = 1024
    blocks: int = 1024
    workers: int = 64


FIXTURES = {
    "hot": Fixture(10, 8),
    "hot-unequal": Fixture(10, 8, "unequal"),
    "hot-unequal-64": Fixture(10, 64, "unequal"),
    "large": Fixture(1_221, 8),
    "large-unequal": Fixture(2_170, 8, "unequal"),
    "large-one": Fixture(9_766, 1),
    "large-one-4": Fixture(19_512, 1, "random", event_blocks=4),
    "rank": Fixture(1_024, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCase(Case):
    """One row of the index benchmark."""

    layer: Layer
    fixture: str
    two_cores: bool = False
    """A second thread works meanwhile, on another core."""


LOAD = "load"
"""A workload that is measured by loading the fixture."""

HASHES, PROMPT_TOKENS = "1,024 block hashes → overlaps", "16,384 tokens → overlaps"


def _median_us(sample: Sample) -> float:
    return float(sample["median_ns"]) / 1e3


def _p99_us(sample: Sample) -> float:
    return float(sample["p99_ns"]) / 1e3


def _max_ms(sample: Sample) -> float:
    return float(sample["max_ns"]) / 1e6


def _call_cpu_ms(sample: Sample) -> float:
    return float(sample["call_cpu_ns"]) / 1e6


def _wait_ms(sample: Sample) -> float:
    return float(max(sample["max_ns"], sample["wait_ns"])) / 1e6


def _rate_percent(sample: Sample) -> float:
    return 100.0 * float(sample["rate"]) / float(sample["idle_rate"])


def _bytes_a_membership(sample: Sample) -> float:
    return (float(sample["rss_after"]) - float(sample["rss_before"])) / float(sample["memberships"])


class _Named(NamedTuple):
    layer: Layer
    fixture: str
    workload: str
    title: str


def _timed(named: _Named, goal: Goal | None) -> IndexCase:
    return _case(named, goal, "µs", _median_us, p99=_p99_us)


def _case(
    named: _Named, goal: Goal | None, unit: str, value: Callable[[Sample], float], *, suffix: str = "", **more: Any
) -> IndexCase:
    name = f"{named.layer}/{named.fixture}/{named.workload}{suffix}"
    return IndexCase(name=name, goal=goal, unit=unit, value=value, **named._asdict(), **more)


def _native_cases() -> Iterator[IndexCase]:
    def native(fixture: str, workload: str, title: str) -> _Named:
        return _Named(Layer.NATIVE, fixture, workload, title)

    for size, fixture, goals in (
        ("hot", "hot", (0.8, 4.9, 0.6, 0.05, 0.09, 0.5, 0.4)),
        ("10 M", "large", (1.5, 6.0, 0.6, 0.07, 0.15, 0.9, 0.7)),
    ):
        timed = (
            ("find_hashes", f"{HASHES}, 8 equal holders"),
            ("find_tokens", f"{PROMPT_TOKENS}, 8 equal holders"),
            ("find_miss", f"{PROMPT_TOKENS}, nothing cached"),
            ("store_prompt", "store 1,024 blocks, a block, ready hashes"),
            ("store_msgpack", "store 1,024 blocks, a block, engine's bytes"),
            ("store_4", "store 4 blocks, one event"),
            ("remove_4", "remove 4 blocks, one event"),
        )
        for (workload, title), goal_us in zip(timed, goals, strict=True):
            yield _timed(native(fixture, workload, f"{title}, {size}"), Goal(goal_us))
        for workload, busy in (
            ("find_busy", f"reads while a writer saturates a core, {size}"),
            ("find_crowded", f"reads while a writer has half of a busy core, {size}"),
        ):
            named, share = native(fixture, workload, f"{busy}: rate"), Goal(70.0, more_is_better=True)
            yield _case(named, share, "% of idle", _rate_percent, two_cores=True)
            named = named._replace(title=f"{busy}: p99")
            yield _case(named, Goal(50.0), "µs", _p99_us, suffix="/p99", two_cores=True)
            named = named._replace(title=f"{busy}: longest")
            yield _case(named, None, "ms", _max_ms, suffix="/longest", two_cores=True)
    longest = "longest read while 1,048,576 blocks of a worker go"
    yield _case(native("hot", "remove_worker", longest), Goal(5.0), "ms", _max_ms, two_cores=True)
    for fixture, title, goal_us in (
        ("hot-unequal", "8 unequal holders, hot", 1.1),
        ("hot-unequal-64", "64 unequal holders, hot", 2.0),
        ("large-unequal", "8 unequal holders, 10 M", 3.0),
    ):
        yield _timed(native(fixture, "find_hashes", f"{HASHES}, {title}"), Goal(goal_us))
    for fixture, title, goal_bytes in (
        ("large", "8 holders a block", 28.0),
        ("large-one", "one holder", 56.0),
        ("large-one-4", "one holder, stored 4 blocks at a time", 56.0),
    ):
        named = native(fixture, LOAD, f"memory a membership at 10 M, {title}")
        yield _case(named, Goal(goal_bytes), "B", _bytes_a_membership)


def _python_cases() -> Iterator[IndexCase]:
    for fixture, workload, title in (
        ("hot", "find_hashes", f"{HASHES}, 8 equal holders, hot"),
        ("hot", "find_tokens", f"{PROMPT_TOKENS}, 8 equal holders, hot"),
        ("hot", "find_miss", f"{PROMPT_TOKENS}, nothing cached, hot"),
        ("hot-unequal", "find_hashes", f"{HASHES}, 8 unequal holders, hot"),
        ("large", "find_hashes", f"{HASHES}, 8 equal holders, 10 M"),
    ):
        yield _timed(_Named(Layer.PYTHON, fixture, workload, f"{title}, from Python"), None)
    for workload, done in (
        ("rank_load", "loaded"),
        ("rank_demote", "demoted"),
        ("rank_expire", "expired"),
        ("rank_dump", "dumped"),
    ):
        named = _Named(Layer.PYTHON, "rank", workload, f"while a rank of 1,048,576 blocks is {done}")
        for suffix, what, goal, unit, value in (
            ("", "find p99", 1000.0, "µs", _p99_us),
            ("/call", "longest call, CPU time", 2.0, "ms", _call_cpu_ms),
            ("/wait", "longest find, or wait for the lock", 2.0, "ms", _wait_ms),
        ):
            titled = named._replace(title=f"{named.title}: {what}")
            yield _case(titled, Goal(goal), unit, value, suffix=suffix, two_cores=True)
    replaced = "in an index bounded to 1,048,576 blocks that as many replace, 4 at a time: longest event, CPU time"
    named = _Named(Layer.PYTHON, "rank", "rank_replace", replaced)
    yield _case(named, Goal(2.0), "ms", _call_cpu_ms, suffix="/call", two_cores=True)


CASES = (*_native_cases(), *_python_cases())
"""All rows; the goal of a Python one that has none follows from the native one in the same run."""
