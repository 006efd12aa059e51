"""`kvscout bench gateway`: CPU that a request costs, all of our services together, and peers beside it in one run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import uvloop

from kvscout_bench.gateway_engines import MODEL
from kvscout_bench.gateway_load import Send
from kvscout_bench.gateway_loads import (
    Cost,
    Idle,
    Load,
    Run,
    Saturation,
    Start,
    StartStack,
    Subject,
    Target,
    measure_idle,
)
from kvscout_bench.gateway_prompts import tokenizer_folder
from kvscout_bench.gateway_stack import ROUTERS, engines_process, envoy, our_stack, router
from kvscout_bench.harness import OURS, Bench, Case, Measure, Row, Sample, Say, interleave
from kvscout_common.hashing import native_available

CHUNKS = 65
FEW_CHUNKS = 8
STREAMS = 1_000
MANY_SECONDS = 5.0
MANY_CHUNKS, MANY_GAP_MS = 50, 200.0
"""Streams last twice as long as they begin: for five seconds all run at once."""
OUR_TRANSPORT = "native" if native_available() else "grpcio"
LONG_PER_SECOND = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCase(Case):
    """A row: of one load, or of the difference of two.

    What a chunk costs is the difference of a run with many and a run with one.
    """

    loads: tuple[Run, ...]
    cost: Callable[[tuple[Cost, ...]], Cost]
    """Cost of a row, from one run of each load."""


def _one(cost: tuple[Cost, ...]) -> Cost:
    return cost[0]


def _chunk(costs: tuple[Cost, ...]) -> Cost:
    one, many = costs
    return Cost({name: (many.parts[name] - one.parts[name]) / (CHUNKS - 1) for name in many.parts})


def _request(costs: tuple[Cost, ...]) -> Cost:
    one, _ = costs
    chunk = _chunk(costs)
    return Cost({name: one.parts[name] - chunk.parts[name] for name in one.parts}, one.p99)


def _added(costs: tuple[Cost, ...]) -> Cost:
    """Return the delay of the first output beside the engine's own time."""
    direct, through = costs
    added = {share: ms - direct.first_ms[share] for share, ms in through.first_ms.items()}
    return replace(through, first_ms=added, p99=added[99])


def _memory(costs: tuple[Cost, ...]) -> Cost:
    return Cost(costs[0].grown_kib, costs[0].p99)


def load_of(name: str, per_second: float, send: Callable[[Any], Send], target: Target = Target.HTTP) -> Load:
    """Return a load, named after its rate."""
    return Load(name=f"{name}/{per_second:g}", per_second=per_second, send=send, target=target)


def _case(
    name: str,
    title: str,
    goal: float,
    cost: Callable[[tuple[Cost, ...]], Cost],
    *loads: Run,
    unit: str = "µs",
    value: Callable[[Sample], float] = lambda cost: float(cost.microseconds),
    more_is_better: bool = False,
) -> GatewayCase:
    return GatewayCase(
        name=name,
        title=title,
        unit=unit,
        goal=goal,
        more_is_better=more_is_better,
        value=value,
        p99=lambda cost: cost.p99,
        parts=lambda cost: dict(cost.parts),
        beside=lambda cost: dict(cost.beside),
        loads=loads,
        cost=cost,
    )


def _added_rows(
    name: str,
    title: str,
    load: Load,
    goals_ms: Mapping[int, float],
) -> list[GatewayCase]:
    """Return the rows of the delay before the first output, measured beside the engine alone."""
    direct = replace(load, name=f"direct/{load.per_second:g}", target=Target.ENGINE, send=_completion(FEW_CHUNKS))

    def percentile_of(share: int) -> Callable[[Sample], float]:
        return lambda cost: float(cost.first_ms[share])

    return [
        _case(
            f"{name}/p{share}",
            f"{title}, added before its first output, p{share}",
            goal,
            _added,
            *(direct, load),
            unit="ms",
            value=percentile_of(share),
        )
        for share, goal in goals_ms.items()
    ]


def _many_streams(kind: str, title: str, send: Callable[[Any], Send], target: Target) -> GatewayCase:
    """Return a thousand streams at once of five tokens a second each: any error ends the run."""
    load = replace(load_of(f"many/{kind}", STREAMS / MANY_SECONDS, send, target), seconds=MANY_SECONDS)
    titled = f"{title}, {STREAMS:,} streams at once of {1e3 / MANY_GAP_MS:g} tokens/s, memory a stream"
    return _case(f"many/{kind}", titled, 64.0, _memory, load, unit="KiB")


def streams(
    kind: str,
    title: str,
    send: Callable[[int], Callable[[Any], Send]],
    target: Target = Target.HTTP,
    goals_us: tuple[float, float] = (750.0, 18.0),
) -> list[GatewayCase]:
    """Return rows of streams at 40/s: what a request costs, and what a chunk."""
    loads = tuple(load_of(f"{kind}/{chunks}", 40, send(chunks), target) for chunks in (1, CHUNKS))
    return [
        _case(f"{kind}/40/request", f"{title}, 40/s, a request", goals_us[0], _request, *loads),
        _case(f"{kind}/40/chunk", f"{title}, 40/s, a chunk of {CHUNKS}", goals_us[1], _chunk, *loads),
    ]


def _completion(chunks: int, gap_ms: float | None = None) -> Callable[[Any], Send]:
    return lambda client: client.complete(chunks, gap_ms)


def _generation(chunks: int, gap_ms: float | None = None) -> Callable[[Any], Send]:
    return lambda client: client.generate(chunks, gap_ms)


def _route(per_second: float) -> Load:
    return load_of("route", per_second, lambda client: client.route, Target.GRPC)


def _completions(per_second: float, goal: float) -> GatewayCase:
    load = load_of("completion/1", per_second, _completion(1))
    return _case(f"completion/{per_second:g}", f"OpenAI completion, {per_second:g}/s, a chunk", goal, _one, load)


_LONG = replace(load_of("long", LONG_PER_SECOND, _completion(FEW_CHUNKS)), long=True)
_LIFE = load_of("life", 40, lambda client: client.life, Target.GRPC)

GATEWAY_CASES = (
    *streams("completion", "OpenAI completion", _completion),
    _completions(300, 550.0),
    _completions(900, 450.0),
    _case(
        "saturation",
        "OpenAI completions of a chunk with at most 20 ms added to p99 of first outputs",
        2_500.0,
        _one,
        Saturation(name="saturation", per_second=100, send=_completion(1), seconds=1.0),
        unit="1/s",
        value=lambda cost: cost.figure,
        more_is_better=True,
    ),
    _case("route/40", "Route query, 40/s", 500.0, _one, _route(40)),
    _case("route/300", "Route query, 300/s", 250.0, _one, _route(300)),
    _case(
        "route/300/p99",
        "Route query, 300/s, p99",
        5.0,
        _one,
        _route(300),
        unit="ms",
        value=lambda cost: cost.p99 or 0.0,
    ),
    _case("life/40", "Route, prefill complete, free, 40/s", 1_000.0, _one, _LIFE),
    *_added_rows(
        "first/completion",
        "OpenAI completion, 100/s",
        load_of("first/completion", 100, _completion(FEW_CHUNKS)),
        {50: 1.0, 99: 2.5},
    ),
    *_added_rows(
        "first/generate",
        "Generate, 100/s",
        load_of("first/generate", 100, _generation(FEW_CHUNKS), Target.GRPC),
        {50: 1.0, 99: 2.5},
    ),
    *streams("picker", "Envoy with our endpoint picker, its own CPU aside", _completion, Target.PICKER, (800.0, 10.0)),
    *_added_rows("long", f"Completion of 100,000 tokens of text, {LONG_PER_SECOND}/s", _LONG, {50: 2.5, 95: 5.0}),
    _case(
        "long/cores",
        f"Completion of 100,000 tokens of text, {LONG_PER_SECOND}/s",
        1.0,
        _one,
        _LONG,
        unit="cores",
        value=lambda cost: cost.microseconds * LONG_PER_SECOND / 1e6,
    ),
    _case("start", "Start to first completion", 0.7, _one, Start("start"), unit="s", value=lambda cost: cost.figure),
    _case("idle", "While nothing is to be done, a second", 1_000.0, _one, Idle("idle")),
    *streams("generate", "Generate", _generation, Target.GRPC),
    _many_streams("completion", "OpenAI completion", _completion(MANY_CHUNKS, MANY_GAP_MS), Target.HTTP),
    _many_streams("generate", "Generate", _generation(MANY_CHUNKS, MANY_GAP_MS), Target.GRPC),
)


@dataclass(frozen=True, slots=True)
class GatewayBench(Bench):
    """The gateway benchmark. Errors as of `Bench`."""

    CASES: ClassVar[Sequence[Case]] = GATEWAY_CASES
    PEERS: ClassVar[Collection[str]] = ("services", "grpcio", *ROUTERS, "envoy")
    SECONDS = (8.0, 0.5)
    STACKS: ClassVar[Mapping[str, StartStack]] = {
        OURS: partial(our_stack, transport=OUR_TRANSPORT, embedded=True),
        "services": partial(our_stack, transport=OUR_TRANSPORT, embedded=False),
        "grpcio": partial(our_stack, transport="grpcio", embedded=True),
        **{name: partial(router, name=name) for name in ROUTERS},
        "envoy": envoy,
    }
    """Side → what starts it before engines."""

    def run(self, say: Say) -> Iterator[Row]:
        """Measure every load of all rows, then yield the rows. Arguments and errors as of `Bench.run`."""
        cases = self._gateway_cases()
        loads = dict.fromkeys(load.name for case in cases for load in case.loads)
        with ExitStack() as running:
            costs = interleave(self.sides, list(loads), self.start(running, say), rounds=self.rounds_to_run)
        samples = {
            (side, case.name): [
                case.cost(runs) for runs in zip(*(costs.get((side, load.name), ()) for load in case.loads), strict=True)
            ]
            for side in self.sides
            for case in cases
        }
        yield from self.rows(cases, samples)

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; a workload is a load of some rows."""
        loads = {load.name: load for case in self._gateway_cases() for load in case.loads}
        engines, flags = running.enter_context(engines_process()), self._flags(loads.values())
        subjects: dict[str, Subject] = {}
        for side in self.sides:
            say(f"starting {side}")
            subjects[side] = Subject(self.STACKS[side], engines, flags)
            running.enter_context(subjects[side].stack)
        say("idle")
        measure_idle(list(subjects.values()), self.run_seconds)

        def measure(side: str, workload: str) -> Cost | None:
            load = loads[workload]
            say(f"{workload}, {side}")
            seconds = self.run_seconds if self.quick or load.seconds is None else load.seconds
            return uvloop.run(load.run(subjects[side], seconds))

        return measure

    def _gateway_cases(self) -> list[GatewayCase]:
        return [case for case in self.selected() if isinstance(case, GatewayCase)]

    def _flags(self, loads: Collection[Run]) -> list[str]:
        """Return the flags of our gateway that some loads need: others are to be measured without."""
        flags = []
        if any(isinstance(load, Load) and load.target is Target.PICKER for load in loads):
            flags += ["--endpoint-picker-port", "0", "--endpoint-picker-plaintext"]
        if any(isinstance(load, Load) and load.long for load in loads):
            flags += ["--tokenizer", f"{MODEL}={tokenizer_folder()}"]
        return flags
