"""`kvscout bench index`: the block index against its goals, and beside a peer; `bench/README.md` has the workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kvscout_bench.harness import OURS, Bench, Case, Measure, Row, Sample, Say, measure_by, sample_value
from kvscout_bench.machine import usable_cores
from kvscout_bench.peer import Driver, dynamo_wheel_driver, native_driver, python_driver
from kvscout_bench.strangers import DriverFailed

SEED = 1
QUICK_PROMPTS = 20
PYTHON_SURCHARGE_US = 1.0
"""Largest cost of a call through Python beside its work."""
LOAD = "load"
"""A workload that is measured by loading the fixture."""
BESIDE = ("find_busy", "find_crowded", "remove_worker", "rank_")
"""Beginnings of the names of workloads in which a second thread works meanwhile, on another core."""


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


HASHES, PROMPT_TOKENS = "1,024 block hashes → overlaps", "16,384 tokens → overlaps"


def _wait_ms(sample: Sample) -> float:
    return float(max(sample["max_ns"], sample["wait_ns"])) / 1e6


def _rate_percent(sample: Sample) -> float:
    return 100.0 * float(sample["rate"]) / float(sample["idle_rate"])


def _bytes_a_membership(sample: Sample) -> float:
    return (float(sample["rss_after"]) - float(sample["rss_before"])) / float(sample["memberships"])


_median_us, _p99_us = sample_value("median_ns", 1e3), sample_value("p99_ns", 1e3)
_max_ms, _call_cpu_ms = sample_value("max_ns", 1e6), sample_value("call_cpu_ns", 1e6)


def _timed(workload: str, title: str, goal: float | None) -> Case:
    return _case(workload, title, goal, "µs", _median_us, p99=_p99_us)


def _case(
    workload: str,
    title: str,
    goal: float | None,
    unit: str,
    value: Callable[[Sample], float],
    *,
    suffix: str = "",
    **more: Any,
) -> Case:
    name = f"{workload}{suffix}"
    return Case(name=name, workload=workload, title=title, goal=goal, unit=unit, value=value, **more)


def _native_cases() -> Iterator[Case]:
    for size, fixture, goals in (
        ("hot", "native/hot", (0.8, 4.9, 0.6, 0.05, 0.09, 0.5, 0.4)),
        ("10 M", "native/large", (1.5, 6.0, 0.6, 0.07, 0.15, 0.9, 0.7)),
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
            yield _timed(f"{fixture}/{workload}", f"{title}, {size}", goal_us)
        for workload, busy in (
            ("find_busy", f"reads while a writer saturates a core, {size}"),
            ("find_crowded", f"reads while a writer has half of a busy core, {size}"),
        ):
            name = f"{fixture}/{workload}"
            yield _case(name, f"{busy}: rate", 70.0, "% of idle", _rate_percent, more_is_better=True)
            yield _case(name, f"{busy}: p99", 50.0, "µs", _p99_us, suffix="/p99")
            yield _case(name, f"{busy}: longest", None, "ms", _max_ms, suffix="/longest")
    longest = "longest read while 1,048,576 blocks of a worker go"
    yield _case("native/hot/remove_worker", longest, 5.0, "ms", _max_ms)
    for fixture, title, goal_us in (
        ("hot-unequal", "8 unequal holders, hot", 1.1),
        ("hot-unequal-64", "64 unequal holders, hot", 2.0),
        ("large-unequal", "8 unequal holders, 10 M", 3.0),
    ):
        yield _timed(f"native/{fixture}/find_hashes", f"{HASHES}, {title}", goal_us)
    for fixture, title, goal_bytes in (
        ("large", "8 holders a block", 28.0),
        ("large-one", "one holder", 56.0),
        ("large-one-4", "one holder, stored 4 blocks at a time", 56.0),
    ):
        memory = f"memory a membership at 10 M, {title}"
        yield _case(f"native/{fixture}/{LOAD}", memory, goal_bytes, "B", _bytes_a_membership)


def _python_cases() -> Iterator[Case]:
    for workload, title in (
        ("hot/find_hashes", f"{HASHES}, 8 equal holders, hot"),
        ("hot/find_tokens", f"{PROMPT_TOKENS}, 8 equal holders, hot"),
        ("hot/find_miss", f"{PROMPT_TOKENS}, nothing cached, hot"),
        ("hot-unequal/find_hashes", f"{HASHES}, 8 unequal holders, hot"),
        ("large/find_hashes", f"{HASHES}, 8 equal holders, 10 M"),
    ):
        # Its goal follows from the native row of the same run.
        yield _timed(f"python/{workload}", f"{title}, from Python", None)
    for workload, done in (
        ("rank_load", "loaded"),
        ("rank_demote", "demoted"),
        ("rank_expire", "expired"),
        ("rank_dump", "dumped"),
    ):
        name, title = f"python/rank/{workload}", f"while a rank of 1,048,576 blocks is {done}"
        yield _case(name, f"{title}: find p99", 1000.0, "µs", _p99_us)
        yield _case(name, f"{title}: longest call, CPU time", 2.0, "ms", _call_cpu_ms, suffix="/call")
        yield _case(name, f"{title}: longest find, or wait for the lock", 2.0, "ms", _wait_ms, suffix="/wait")
    replaced = "in an index bounded to 1,048,576 blocks that as many replace, 4 at a time: longest event, CPU time"
    yield _case("python/rank/rank_replace", replaced, 2.0, "ms", _call_cpu_ms, suffix="/call")


def is_beside(workload: str) -> bool:
    """Return whether a second thread works meanwhile, on another core."""
    return workload.rpartition("/")[2].startswith(BESIDE)


def _fixture_order(case: Case) -> tuple[int, int, bool]:
    layer, fixture, _ = case.workload.split("/")
    return list(Layer).index(Layer(layer)), list(FIXTURES).index(fixture), is_beside(case.workload)


@dataclass(frozen=True, slots=True)
class IndexBench(Bench):
    """The index benchmark. Errors as of `Bench`."""

    CASES = sorted([*_native_cases(), *_python_cases()], key=_fixture_order)
    PEERS = ("dynamo",)
    SECONDS = (0.5, 0.02)

    rounds: int = 5

    def selected(self) -> Iterator[Case]:
        """Yield the wanted cases that this machine has the cores for."""
        one_core = len(usable_cores()) < 2
        return (case for case in Bench.selected(self) if not (one_core and is_beside(case.workload)))

    def run(self, say: Say) -> Iterator[Row]:
        """Measure as `Bench.run` does; a row from Python has the native row of the same run for its goal."""
        native_us: dict[str, float] = {}
        for row in Bench.run(self, say):
            layer, _, workload = row.case.name.partition("/")
            if layer == Layer.NATIVE:
                native_us[workload] = row.ours.value
            elif row.case.goal is None and workload in native_us:
                row = replace(row, case=replace(row.case, goal=native_us[workload] + PYTHON_SURCHARGE_US))
            yield row

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; drivers start with each fixture."""
        if len(usable_cores()) < 2:
            say("one core: workloads with a second thread are left out")
        return _Drivers(self, running, say)


class _Drivers:
    """Drivers of all sides with one fixture at a time.

    Args:
        bench: The benchmark.
        running: Ends the drivers.
        say: Reports progress.
    """

    def __init__(self, bench: IndexBench, running: ExitStack, say: Say) -> None:
        self._bench, self._say = bench, say
        self._running = running.enter_context(ExitStack())
        self._commands: dict[str, dict[str, list[str]]] = {}
        """Layer → side → command."""
        self._drivers: dict[str, Driver] = {}
        self._loads: dict[str, Sample] = {}
        """Side → how its driver loaded the fixture."""
        self._fixture = self._checked = ""
        self._measure: Measure = measure_by({}, 0.0)

    def __call__(self, side: str, workload: str) -> Sample | None:
        """See `harness.Measure`; loading is measured once, whatever the rounds."""
        fixture, _, name = workload.rpartition("/")
        if fixture != self._fixture:
            self._start(fixture)
        if name == LOAD:
            return self._loads.pop(side, None)
        if workload != self._checked:
            self._check(workload, name)
        return self._measure(side, name)

    def _start(self, fixture: str) -> None:
        self._running.close()
        layer, _, contents = fixture.partition("/")
        commands = self._commands.get(layer) or self._build(layer)
        self._drivers = {side: self._running.enter_context(Driver(command)) for side, command in commands.items()}
        self._loads = {side: self._load(driver, FIXTURES[contents]) for side, driver in self._drivers.items()}
        self._measure = measure_by(self._drivers, self._bench.run_seconds)
        self._fixture = fixture

    def _build(self, layer: str) -> dict[str, list[str]]:
        self._say(f"{layer}: building what is not up to date")
        native = layer == Layer.NATIVE
        commands = {OURS: native_driver("kvscout") if native else python_driver()}
        for peer in self._bench.peers:
            commands[peer] = native_driver(peer) if native else dynamo_wheel_driver()
        self._commands[layer] = commands
        return commands

    def _load(self, driver: Driver, fixture: Fixture) -> Sample:
        if self._bench.quick:
            fixture = replace(fixture, prompts=min(fixture.prompts, QUICK_PROMPTS))
        return driver.request("load", **asdict(fixture), seed=SEED)

    def _check(self, workload: str, name: str) -> None:
        """Require the same answers of all sides, and bind their threads to cores."""
        answers = {side: driver.request("check", workload=name) for side, driver in self._drivers.items()}
        sums = {side: answer["answers"] for side, answer in answers.items() if "answers" in answer}
        if len(set(sums.values())) > 1:
            raise DriverFailed(f"{workload}: the answers of the sides differ: {sums}")
        main, *others = usable_cores()
        for driver in self._drivers.values():
            driver.pin(main, others[0] if is_beside(workload) else main)
        self._checked = workload
