"""`kvscout bench rpc`: what calls cost their servers and their client, how long they take, and how many get through.

Beside a peer in one run: our own services over grpcio, Dynamo's standalone ones over HTTP, or a process that only reads
and writes, which no service can undercut.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvscout_bench.harness import Case, Goal, Row, Samples, compare, in_turns, side_of
from kvscout_bench.machine import this_machine
from kvscout_bench.peer import Driver, DriverFailed
from kvscout_bench.rpc_fixture import TOKENS, WORKERS
from kvscout_bench.selection import Selection
from kvscout_common.hashing import native_available

PEERS = ("grpcio", "dynamo", "floor")
OURS = "native"
SECONDS, QUICK_SECONDS = 1.5, 0.2
SATURATED = "saturated"
FEW, MANY = WORKERS
KINDS = {
    "find": "FindMatches",
    "python": "a unary rpc with a Python handler",
    "message": "a message of StreamFindMatches",
    "route": "Route query",
    "life": "a life: FindMatches, SelectAndReserve, MarkPrefillComplete, Free",
    "stream": "the same life over two open streams",
}
GOALS = {
    "server/find/4096/8/300": 100.0,
    "server/find/4096/8/saturated": 15.0,
    "server/python/0/8/300": 140.0,
    "client/python/0/8/300": 77.0,
}
"""In microseconds."""


def _workloads() -> Iterator[str]:
    """Yield the workloads: call, tokens, workers, calls a second."""
    everywhere = [(tokens, workers) for tokens in TOKENS for workers in WORKERS]
    for kind in ("find", "message"):
        for tokens, workers in everywhere if kind == "find" else [(tokens, FEW) for tokens in TOKENS]:
            rates = ("40", "300", "2000", SATURATED) if (tokens, workers) == (4_096, FEW) else ("300", SATURATED)
            yield from (f"{kind}/{tokens}/{workers}/{rate}" for rate in rates)
    yield from (f"python/0/{FEW}/{rate}" for rate in ("40", "300", "2000", SATURATED))
    for kind, rate in (("route", "300"), ("life", "100"), ("stream", "100")):
        yield from (f"{kind}/{tokens}/{workers}/{r}" for tokens, workers in everywhere for r in (rate, SATURATED))


WORKLOADS = tuple(_workloads())


def _taken(sample: Any, field: str) -> float:
    return float(sample[field])


def _cases() -> Iterator[Case]:
    for workload in WORKLOADS:
        kind, tokens, workers, rate = workload.split("/")
        often = "as many as get through" if rate == SATURATED else f"{int(rate):,}/s"
        said = f"{KINDS[kind]}, {int(tokens):,} tokens, {workers} workers, {often}"

        def case(who: str, what: str, unit: str, value: Callable[[Any], float], **more: Any) -> Case:
            name = f"{who}/{workload}"  # noqa: B023  (called before the next one)
            title = f"{said}: {what}"  # noqa: B023
            goal = Goal(GOALS[name]) if name in GOALS else None
            return Case(name=name, title=title, unit=unit, goal=goal, workload=workload, value=value, **more)  # noqa: B023

        yield case("server", "its servers", "µs", partial(_taken, field="server_us"))
        yield case("client", "its client", "µs", partial(_taken, field="client_us"))
        if rate == SATURATED:
            yield case("through", "calls", "1/s", partial(_taken, field="per_second"), more_is_better=True)
        else:
            took = partial(_taken, field="p50_us"), partial(_taken, field="p99_us")
            yield case("took", "it takes", "µs", took[0], p99=took[1])


CASES = tuple(_cases())


@dataclass(frozen=True, slots=True)
class RpcBench(Selection):
    """Rows to run. Errors as of `Selection`."""

    seconds: float = SECONDS
    """Length of one run of one side."""

    @classmethod
    def known_peers(cls) -> Sequence[str]:
        """Return the names of the peers."""
        return PEERS

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return [case.name for case in CASES]

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measure all workloads, sides in turns; blocks.

        Args:
            say: Reports progress, a line a call.

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
            seconds = QUICK_SECONDS if self.quick else self.seconds
            samples = in_turns(drivers, workloads, rounds=self.rounds_to_run, seconds=seconds)
        for case in cases:
            ours = side_of(case, OURS, samples)
            if ours is None:
                raise DriverFailed(f"{case.name}: our side does not have it")
            peer, parts = side_of(case, self.peer, samples), _parts(case, samples)
            yield compare(case, ours, peer, judge=not self.quick, machine=machine, parts=parts)


def _parts(case: Case, samples: Samples) -> Mapping[str, float] | None:
    """Return the share of each process, in rows of what servers take."""
    if not case.name.startswith("server/"):
        return None
    taken: Sequence[Any] = samples[OURS, case.workload]
    return {part: statistics.median(sample["parts_us"][part] for sample in taken) for part in taken[0]["parts_us"]}
