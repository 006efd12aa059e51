"""`kvscout bench rpc`: CPU that a call costs its server and its client, and grpcio's beside it in one run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvscout_bench.harness import Case, Goal, Row, compare, in_turns, side_of
from kvscout_bench.machine import this_machine
from kvscout_bench.peer import Driver, DriverFailed
from kvscout_bench.selection import Selection
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available

PEERS = ("grpcio",)
OURS = "native"
SECONDS, QUICK_SECONDS = 2.0, 0.2
RATES = ("40", "300", "2000", "saturated")
TITLES = {
    "find": "FindMatches, {tokens:,} tokens",
    "python": "a unary rpc with a Python handler",
    "message": "a message of StreamFindMatches, {tokens:,} tokens",
}
GOALS = {
    "server/find/4096/300": 100.0,
    "server/find/4096/saturated": 15.0,
    "server/python/0/300": 140.0,
    "client/python/0/300": 77.0,
}
"""In microseconds."""


def _taken(sample: Any, field: str) -> float:
    return float(sample[field])


def _cases() -> Iterator[Case]:
    workloads: list[tuple[str, int, tuple[str, ...]]] = [
        ("find", 4096, RATES),
        ("python", 0, RATES),
        ("message", 4096, RATES),
    ]
    workloads += [("find", tokens, ("300", "saturated")) for tokens in (512, 16_384)]
    for kind, tokens, rates in workloads:
        for rate in rates:
            for who in ("server", "client"):
                workload = f"{kind}/{tokens}/{rate}"
                name = f"{who}/{workload}"
                often = "as many as get through" if rate == "saturated" else f"{int(rate):,}/s"
                yield Case(
                    name=name,
                    title=f"{TITLES[kind].format(tokens=tokens)}, {often}: its {who}",
                    unit="µs",
                    goal=Goal(GOALS[name]) if name in GOALS else None,
                    workload=workload,
                    value=partial(_taken, field=f"{who}_us"),
                    p99=partial(_taken, field="p99_us") if who == "client" else None,
                )


CASES = tuple(_cases())


@dataclass(frozen=True, slots=True)
class RpcBench(Selection):
    """What of the rows to run. Errors as of `Selection`."""

    peer: str = ""
    """"": ours alone."""

    def __post_init__(self) -> None:
        Selection.__post_init__(self)
        if self.peer not in ("", *PEERS):
            raise InvalidArgument(f"{self.peer!r} is none of {', '.join(PEERS)}", field="peer")

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return [case.name for case in CASES]

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measures all workloads, sides in turns; blocks.

        Args:
            say: Is told what is going on.

        Raises:
            DriverFailed: A process cannot be started, or a call fails.
        """
        if not native_available():
            raise DriverFailed("the extension kvscout_native is not built: there is nothing to compare")
        machine = this_machine()
        cases = [case for case in CASES if self.wanted(case.name)]
        workloads = list(dict.fromkeys(case.workload for case in cases))
        with ExitStack() as running:
            drivers = {}
            for side in filter(None, (OURS, self.peer)):
                say(f"starting {side}")
                command = [sys.executable, "-m", "kvscout_bench.rpc_driver", side]
                drivers[side] = running.enter_context(Driver(command))
            say(f"{len(workloads)} workloads, {self.rounds_to_run} rounds")
            seconds = QUICK_SECONDS if self.quick else SECONDS
            samples = in_turns(drivers, workloads, rounds=self.rounds_to_run, seconds=seconds)
        for case in cases:
            ours = side_of(case, OURS, samples)
            assert ours is not None
            yield compare(case, ours, side_of(case, self.peer, samples), judge=not self.quick, machine=machine)
