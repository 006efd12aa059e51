"""`kvscout bench index`: the block index against its goals, and beside a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from kvscout_bench.harness import Goal, Row, Sample, Samples, Side, compare, in_turns, side_of
from kvscout_bench.index_bench_cases import CASES, FIXTURES, LOAD, Fixture, IndexCase, Layer
from kvscout_bench.machine import this_machine, usable_cores
from kvscout_bench.peer import Driver, DriverFailed, dynamo_wheel_driver, native_driver, python_driver
from kvscout_bench.selection import Selection
from kvscout_common.errors import InvalidArgument

OURS, PEER = "ours", "peer"
PEERS = ("dynamo",)
SEED = 1
QUICK_SECONDS = 0.02
QUICK_PROMPTS = 20
PYTHON_SURCHARGE_US = 1.0
"""Largest cost of a call through Python beside its work."""


@dataclass(frozen=True, slots=True)
class IndexBench(Selection):
    """The index benchmark. Errors as of `Selection`."""

    rounds: int = 5
    seconds: float = 0.5
    """Length of one run of one side."""

    def __post_init__(self) -> None:
        Selection.__post_init__(self)
        if not self.seconds > 0:
            raise InvalidArgument("must be above 0", field="seconds")

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return [case.name for case in CASES]

    @classmethod
    def known_peers(cls) -> Sequence[str]:
        """Return the names of the peers."""
        return PEERS

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measure case by case; blocks. Rows come when their fixture is done.

        Args:
            say: Reports progress, a line a call.

        Raises:
            DriverFailed: A driver cannot be built or started, fails, or the sides' answers differ.
        """
        machine, cores = this_machine(), usable_cores()
        cases = [case for case in CASES if self.wanted(case.name)]
        if len(cores) < 2 and any(case.two_cores for case in cases):
            say("one core: reads beside a writer are left out")
            cases = [case for case in cases if not case.two_cores]
        native_us: dict[str, float] = {}
        for layer in Layer:
            commands = self._commands(layer, say) if any(case.layer is layer for case in cases) else {}
            for name in FIXTURES:
                chosen = [case for case in cases if case.layer is layer and case.fixture == name]
                if not chosen:
                    continue
                say(f"{layer}/{name}")
                for case, ours, peer in self._measure(commands, name, chosen, cores):
                    if layer is Layer.NATIVE:
                        native_us[case.name] = ours.value
                    elif case.goal is None:
                        native = native_us.get(f"{Layer.NATIVE}/{name}/{case.workload}")
                        case = replace(case, goal=None if native is None else Goal(native + PYTHON_SURCHARGE_US))
                    yield compare(case, ours, peer, judge=not self.quick, machine=machine)

    def _commands(self, layer: Layer, say: Callable[[str], None]) -> dict[str, list[str]]:
        say(f"{layer}: building what is not up to date")
        commands = {OURS: native_driver("kvscout") if layer is Layer.NATIVE else python_driver()}
        if self.peer:
            commands[PEER] = native_driver(self.peer) if layer is Layer.NATIVE else dynamo_wheel_driver()
        return commands

    def _measure(
        self, commands: dict[str, list[str]], name: str, cases: Sequence[IndexCase], cores: Sequence[int]
    ) -> Iterator[tuple[IndexCase, Side, Side | None]]:
        with ExitStack() as stack:
            drivers = {side: stack.enter_context(Driver(command)) for side, command in commands.items()}
            loads = {side: [self._load(driver, FIXTURES[name])] for side, driver in drivers.items()}
            samples: Samples = {(side, LOAD): answers for side, answers in loads.items()}
            for two_cores in (False, True):
                chosen = [case for case in cases if case.two_cores is two_cores]
                workloads = list(dict.fromkeys(case.workload for case in chosen if case.workload != LOAD))
                self._check(drivers, workloads)
                for driver in drivers.values():
                    driver.pin(cores[0], cores[1] if two_cores else cores[0])
                seconds = QUICK_SECONDS if self.quick else self.seconds
                group = in_turns(drivers, workloads, rounds=self.rounds_to_run, seconds=seconds)
                for case in chosen:
                    taken = samples if case.workload == LOAD else group
                    ours = side_of(case, OURS, taken)
                    if ours is None:
                        raise DriverFailed(f"{case.name}: our driver does not have it")
                    yield case, ours, side_of(case, PEER, taken)

    def _load(self, driver: Driver, fixture: Fixture) -> Sample:
        prompts = min(fixture.prompts, QUICK_PROMPTS) if self.quick else fixture.prompts
        return driver.request(
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
    def _check(drivers: dict[str, Driver], workloads: Sequence[str]) -> None:
        for workload in workloads:
            answers = {side: driver.request("check", workload=workload) for side, driver in drivers.items()}
            sums = {side: answer["answers"] for side, answer in answers.items() if "answers" in answer}
            if len(set(sums.values())) > 1:
                raise DriverFailed(f"{workload}: the answers of the two sides differ: {sums}")
