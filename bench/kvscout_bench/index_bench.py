"""`kvscout bench index`: the block index against its goals and against a peer. `bench/README.md` defines the workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum

from kvscout_bench.harness import Goal, Row, Sample, Side, compare, in_turns
from kvscout_bench.machine import this_machine, usable_cores
from kvscout_bench.peer import Driver, DriverFailed, dynamo_wheel_driver, native_driver, python_driver
from kvscout_common.errors import InvalidArgument

OURS, PEER = "ours", "peer"
PEERS = ("dynamo",)
SEED = 1
QUICK_SECONDS = 0.02
QUICK_PROMPTS = 20
PYTHON_SURCHARGE_US = 1.0
"""What a call through Python may cost besides the work."""


class Layer(StrEnum):
    """Where an index is called from."""

    NATIVE = "native"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Fixture:
    """What an index holds while it is measured; 64 workers, prompts of 1,024 blocks."""

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
}


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured."""

    layer: Layer
    fixture: str
    workload: str
    title: str
    unit: str
    goal: Goal | None
    value: Callable[[Sample], float]
    p99: Callable[[Sample], float] | None = None
    share_of: str = ""
    """Another workload of the same fixture: the value is a share, in %, of that one's in the same round."""
    two_cores: bool = False
    """A second thread works meanwhile, on another core."""
    suffix: str = ""

    @property
    def name(self) -> str:
        """What `--only` knows it by."""
        return f"{self.layer}/{self.fixture}/{self.workload}{self.suffix}"


LOAD = "load"
"""A workload that is measured by loading the fixture."""


def _median_us(sample: Sample) -> float:
    return float(sample["median_ns"]) / 1e3


def _p99_us(sample: Sample) -> float:
    return float(sample["p99_ns"]) / 1e3


def _max_ms(sample: Sample) -> float:
    return float(sample["max_ns"]) / 1e6


def _rate(sample: Sample) -> float:
    return float(sample["rate"])


def _bytes_a_membership(sample: Sample) -> float:
    return (float(sample["rss_after"]) - float(sample["rss_before"])) / float(sample["memberships"])


def _timed(layer: Layer, fixture: str, workload: str, title: str, goal_us: float | None) -> Case:
    goal = None if goal_us is None else Goal(goal_us)
    return Case(layer, fixture, workload, title, "µs", goal, _median_us, _p99_us)


def _native_cases() -> Iterator[Case]:
    hashes, tokens, native = "1,024 block hashes → overlaps", "16,384 tokens → overlaps", Layer.NATIVE
    for size, fixture, goals in (
        ("hot", "hot", (0.8, 4.9, 0.6, 0.05, 0.10, 0.6, 0.6)),
        ("10 M", "large", (1.5, 6.0, 0.6, 0.07, 0.15, 0.9, 0.9)),
    ):
        yield _timed(native, fixture, "find_hashes", f"{hashes}, 8 equal holders, {size}", goals[0])
        yield _timed(native, fixture, "find_tokens", f"{tokens}, 8 equal holders, {size}", goals[1])
        yield _timed(native, fixture, "find_miss", f"{tokens}, nothing cached, {size}", goals[2])
        yield _timed(native, fixture, "store_prompt", f"store 1,024 blocks, a block, ready hashes, {size}", goals[3])
        yield _timed(native, fixture, "store_msgpack", f"store 1,024 blocks, a block, engine's bytes, {size}", goals[4])
        yield _timed(native, fixture, "store_4", f"store 4 blocks, one event, {size}", goals[5])
        yield _timed(native, fixture, "remove_4", f"remove 4 blocks, one event, {size}", goals[6])
        busy = f"reads while a writer saturates a core, {size}"
        goal = Goal(70.0, more_is_better=True)
        yield Case(
            native, fixture, "find_busy", f"{busy}: rate", "% of idle", goal, _rate,
            share_of="find_hashes", two_cores=True,
        )  # fmt: skip
        yield Case(
            native, fixture, "find_busy", f"{busy}: p99", "µs", Goal(50.0), _p99_us, two_cores=True, suffix="/p99"
        )
    yield Case(
        native, "hot", "remove_worker", "longest read while 1,048,576 blocks of a worker go", "ms", Goal(5.0), _max_ms,
        two_cores=True,
    )  # fmt: skip
    yield _timed(native, "hot-unequal", "find_hashes", f"{hashes}, 8 unequal holders, hot", 1.1)
    yield _timed(native, "large-unequal", "find_hashes", f"{hashes}, 8 unequal holders, 10 M", 3.0)
    yield _timed(native, "hot-unequal-64", "find_hashes", f"{hashes}, 64 unequal holders, hot", 2.0)
    for fixture, title, goal_bytes in (
        ("large", "8 holders a block", 28.0),
        ("large-one", "one holder", 56.0),
        ("large-one-4", "one holder, stored 4 blocks at a time", 56.0),
    ):
        title = f"memory a membership at 10 M, {title}"
        yield Case(native, fixture, LOAD, title, "B", Goal(goal_bytes), _bytes_a_membership)


def _python_cases() -> Iterator[Case]:
    for fixture, workload, title in (
        ("hot", "find_hashes", "1,024 block hashes → overlaps, 8 equal holders, hot, from Python"),
        ("hot", "find_tokens", "16,384 tokens → overlaps, 8 equal holders, hot, from Python"),
        ("hot", "find_miss", "16,384 tokens → overlaps, nothing cached, hot, from Python"),
        ("hot-unequal", "find_hashes", "1,024 block hashes → overlaps, 8 unequal holders, hot, from Python"),
        ("large", "find_hashes", "1,024 block hashes → overlaps, 8 equal holders, 10 M, from Python"),
    ):
        yield _timed(Layer.PYTHON, fixture, workload, title, None)


CASES = (*_native_cases(), *_python_cases())


@dataclass(frozen=True, slots=True)
class IndexBench:
    """What to run.

    Raises:
        InvalidArgument: A value is out of range or names nothing.
    """

    peer: str = ""
    """"": ours alone."""
    rounds: int = 5
    seconds: float = 0.5
    """Length of one run of one side."""
    only: tuple[str, ...] = ()
    """Parts of names of cases; empty: all."""
    quick: bool = False
    """Tiny and short: shows that everything works, judges nothing."""

    def __post_init__(self) -> None:
        if self.peer not in ("", *PEERS):
            raise InvalidArgument(f"{self.peer!r} is none of {', '.join(PEERS)}", field="peer")
        if self.rounds < 1:
            raise InvalidArgument("must be at least 1", field="rounds")
        if not self.seconds > 0:
            raise InvalidArgument("must be above 0", field="seconds")
        for part in self.only:
            if not any(part in case.name for case in CASES):
                raise InvalidArgument(f"{part!r} is in no workload's name", field="only")

    def cases(self) -> list[Case]:
        """The cases chosen, in order."""
        return [case for case in CASES if not self.only or any(part in case.name for part in self.only)]

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measures case by case; blocks. Rows come when their fixture is done.

        Args:
            say: Is told what is going on.

        Raises:
            DriverFailed: A driver cannot be built or started, fails, or the sides' answers differ.
        """
        machine, cores = this_machine(), usable_cores()
        cases = self.cases()
        if len(cores) < 2 and any(case.two_cores for case in cases):
            say("one core: reads beside a writer are left out")
            cases = [case for case in cases if not case.two_cores]
        native_us: dict[tuple[str, str], float] = {}
        for layer in Layer:
            commands = self._commands(layer, say) if any(case.layer is layer for case in cases) else {}
            for name in FIXTURES:
                chosen = [case for case in cases if case.layer is layer and case.fixture == name]
                if not chosen:
                    continue
                say(f"{layer}/{name}")
                for case, ours, peer in self._measure(commands, name, chosen, cores):
                    if layer is Layer.NATIVE:
                        native_us[name, case.workload + case.suffix] = ours.value
                    elif (name, case.workload) in native_us:
                        case = replace(case, goal=Goal(native_us[name, case.workload] + PYTHON_SURCHARGE_US))
                    judge = not self.quick
                    yield compare(case.name, case.title, case.unit, case.goal, ours, peer, judge=judge, machine=machine)

    def _commands(self, layer: Layer, say: Callable[[str], None]) -> dict[str, list[str]]:
        say(f"{layer}: building what is not up to date")
        commands = {OURS: native_driver("kvscout") if layer is Layer.NATIVE else python_driver()}
        if self.peer:
            commands[PEER] = native_driver(self.peer) if layer is Layer.NATIVE else dynamo_wheel_driver()
        return commands

    def _measure(
        self, commands: dict[str, list[str]], name: str, cases: Sequence[Case], cores: Sequence[int]
    ) -> Iterator[tuple[Case, Side, Side | None]]:
        with ExitStack() as stack:
            drivers = {side: stack.enter_context(Driver(command)) for side, command in commands.items()}
            loads = {side: [self._load(driver, FIXTURES[name])] for side, driver in drivers.items()}
            samples = {(side, LOAD): answers for side, answers in loads.items()}
            for two_cores in (False, True):
                workloads = self._workloads(cases, two_cores)
                self._check(drivers, workloads)
                for driver in drivers.values():
                    driver.pin(cores[0], cores[1] if two_cores else cores[0])
                seconds = QUICK_SECONDS if self.quick else self.seconds
                rounds = 1 if self.quick else self.rounds
                group = in_turns(drivers, workloads, rounds=rounds, seconds=seconds)
                for case in cases:
                    if case.two_cores is two_cores:
                        taken = samples if case.workload == LOAD else group
                        ours = side_of(case, OURS, taken)
                        if ours is None:
                            raise DriverFailed(f"{case.name}: our driver does not have it")
                        yield case, ours, side_of(case, PEER, taken)

    def _load(self, driver: Driver, fixture: Fixture) -> Sample:
        prompts = min(fixture.prompts, QUICK_PROMPTS) if self.quick else fixture.prompts
        return driver.ask(
            "load",
            prompts=prompts,
            blocks=fixture.blocks,
            holders=fixture.holders,
            lengths=fixture.lengths,
            event_blocks=fixture.event_blocks,
            workers=fixture.workers,
            seed=SEED,
        )

    @staticmethod
    def _workloads(cases: Sequence[Case], two_cores: bool) -> list[str]:
        chosen: dict[str, None] = {}
        for case in cases:
            if case.workload != LOAD and case.two_cores is two_cores:
                if case.share_of:
                    chosen.setdefault(case.share_of)
                chosen.setdefault(case.workload)
        return list(chosen)

    @staticmethod
    def _check(drivers: dict[str, Driver], workloads: Sequence[str]) -> None:
        for workload in workloads:
            answers = {side: driver.ask("check", workload=workload) for side, driver in drivers.items()}
            sums = {side: answer["answers"] for side, answer in answers.items() if "answers" in answer}
            if len(set(sums.values())) > 1:
                raise DriverFailed(f"{workload}: the answers of the two sides differ: {sums}")


def side_of(case: Case, side: str, samples: dict[tuple[str, str], list[Sample]]) -> Side | None:
    """A side's values of a case, from its samples; None: it does not have the workload."""
    taken = samples.get((side, case.workload))
    if not taken:
        return None
    values = [case.value(sample) for sample in taken]
    if case.share_of:
        whole = [case.value(sample) for sample in samples[side, case.share_of]]
        values = [100.0 * part / all_ for part, all_ in zip(values, whole, strict=True)]
    return Side(tuple(values), tuple(case.p99(sample) for sample in taken) if case.p99 else ())
