"""`kvscout bench gateway`: CPU that a request costs, all of our services together, and peers beside it in one run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from kvscout_bench.gateway_load import CompletionClient, GrpcClient, Send, at_rate
from kvscout_bench.gateway_stack import Stack, addresses_of, engines_process, envoy, our_stack, smg
from kvscout_bench.harness import OURS, Bench, Case, Measure, Row, Sample, Say, interleave
from kvscout_common.hashing import native_available
from kvscout_lab.statistics import percentile

SEED = 1
TOKENS = 4_096
WARM_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""Interval of looks at memory."""
CHUNKS = 64
FEW_CHUNKS = 8
STREAMS = 1_000
MANY_SECONDS = 5.0
MANY_CHUNKS, MANY_GAP_MS = 50, 200.0
"""Streams last twice as long as they begin: for five seconds all run at once."""
OUR_TRANSPORT = "native" if native_available() else "grpcio"

StartStack = Callable[[list[str]], Stack]
"""Starts a side before engines, by their addresses."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one run, and how long its requests took."""

    parts: Mapping[str, float]
    """Microseconds a request, by process; without what the same processes take while idle."""
    p99: float = 0.0
    """Milliseconds from when a request was due to its end."""
    first_ms: tuple[float, float] = (0.0, 0.0)
    """Median and 99th percentile of the milliseconds from then to its first output."""
    grown_kib: Mapping[str, float] = field(default_factory=dict)
    """Largest growth of each process since its start, a request."""

    @property
    def microseconds(self) -> float:
        """Return the microseconds of all processes."""
        return sum(self.parts.values())


class Client(Protocol):
    """Sends requests to a side, as a context manager."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *ended: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to a side, and their rate."""

    name: str
    per_second: float
    http: bool = False
    direct: bool = False
    """Requests go to an engine, whatever the side."""
    seconds: float | None = None
    """For how long requests begin; None = as all."""
    send: Callable[[Any], Send]
    """Makes the request from the client of that side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCase(Case):
    """A row: of one load, or of the difference of two.

    What a chunk costs is the difference of a run with many and a run with one.
    """

    loads: tuple[Load, ...]
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
    median, p99 = (ours - engines for ours, engines in zip(through.first_ms, direct.first_ms, strict=True))
    return replace(through, first_ms=(median, p99), p99=p99)


def _memory(costs: tuple[Cost, ...]) -> Cost:
    return Cost(costs[0].grown_kib, costs[0].p99)


def load_of(name: str, per_second: float, send: Callable[[Any], Send], *, http: bool = False) -> Load:
    """Return a load, named after its rate."""
    return Load(name=f"{name}/{per_second:g}", per_second=per_second, send=send, http=http)


def _case(
    name: str,
    title: str,
    goal: float,
    cost: Callable[[tuple[Cost, ...]], Cost],
    *loads: Load,
    unit: str = "µs",
    value: Callable[[Sample], float] = lambda cost: float(cost.microseconds),
) -> GatewayCase:
    return GatewayCase(
        name=name,
        title=title,
        unit=unit,
        goal=goal,
        value=value,
        p99=lambda cost: float(cost.p99),
        parts=lambda cost: dict(cost.parts),
        loads=loads,
        cost=cost,
    )


def _added_rows(kind: str, title: str, send: Callable[[Any], Send], *, http: bool) -> list[GatewayCase]:
    """Return the rows of the delay before the first output at 100/s, measured beside the engine alone."""
    direct = replace(load_of("direct", 100, lambda client: client.complete(FEW_CHUNKS), http=True), direct=True)
    loads = direct, load_of(f"first/{kind}", 100, send, http=http)
    titled = f"{title}, 100/s, added before its first output"
    return [
        _case(f"first/{kind}/p50", f"{titled}, median", 3.0, _added, *loads, unit="ms", value=lambda c: c.first_ms[0]),
        _case(f"first/{kind}/p99", f"{titled}, p99", 8.0, _added, *loads, unit="ms", value=lambda c: c.first_ms[1]),
    ]


def _many_streams(kind: str, title: str, send: Callable[[Any], Send], *, http: bool) -> GatewayCase:
    """Return a thousand streams at once of five tokens a second each: any error ends the run."""
    load = replace(load_of(f"many/{kind}", STREAMS / MANY_SECONDS, send, http=http), seconds=MANY_SECONDS)
    titled = f"{title}, {STREAMS:,} streams at once of {1e3 / MANY_GAP_MS:g} tokens/s, memory a stream"
    return _case(f"many/{kind}", titled, 64.0, _memory, load, unit="KiB")


def streams(
    kind: str,
    title: str,
    send: Callable[[int], Callable[[Any], Send]],
    *,
    http: bool,
    goals_us: tuple[float, float] = (1_200.0, 30.0),
) -> list[GatewayCase]:
    """Return rows of streams at 40/s: what a request costs, and what a chunk."""
    loads = tuple(load_of(f"{kind}/{chunks}", 40, send(chunks), http=http) for chunks in (1, CHUNKS))
    return [
        _case(f"{kind}/40/request", f"{title}, 40/s, a request", goals_us[0], _request, *loads),
        _case(f"{kind}/40/chunk", f"{title}, 40/s, a chunk of {CHUNKS}", goals_us[1], _chunk, *loads),
    ]


GATEWAY_CASES = (
    _case("route/40", "Route query, 40/s", 600.0, _one, load_of("route", 40, lambda client: client.route)),
    _case("route/300", "Route query, 300/s", 400.0, _one, load_of("route", 300, lambda client: client.route)),
    _case("life/40", "Route, prefill complete, free, 40/s", 1_000.0, _one, load_of("life", 40, lambda c: c.life)),
    _case(
        "route/300/p99",
        "Route query, 300/s, p99",
        5.0,
        _one,
        load_of("route", 300, lambda client: client.route),
        unit="ms",
        value=lambda cost: cost.p99,
    ),
    *_added_rows("generate", "Generate", lambda client: client.generate(FEW_CHUNKS), http=False),
    *_added_rows("completion", "OpenAI completion", lambda client: client.complete(FEW_CHUNKS), http=True),
    _many_streams("generate", "Generate", lambda client: client.generate(MANY_CHUNKS, MANY_GAP_MS), http=False),
    _many_streams("completion", "OpenAI completion", lambda c: c.complete(MANY_CHUNKS, MANY_GAP_MS), http=True),
    *streams("generate", "Generate", lambda chunks: lambda client: client.generate(chunks), http=False),
    *streams("completion", "OpenAI completion", lambda chunks: lambda client: client.complete(chunks), http=True),
)


@dataclass(frozen=True, slots=True)
class GatewayBench(Bench):
    """The gateway benchmark. Errors as of `Bench`."""

    CASES: ClassVar[Sequence[Case]] = GATEWAY_CASES
    PEERS: ClassVar[Collection[str]] = ("grpcio", "smg", "envoy")
    SECONDS = (8.0, 0.5)
    STACKS: ClassVar[Mapping[str, StartStack]] = {
        OURS: partial(our_stack, transport=OUR_TRANSPORT),
        "grpcio": partial(our_stack, transport="grpcio"),
        "smg": smg,
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
        engines = addresses_of(running.enter_context(engines_process()))
        stacks: dict[str, Stack] = {}
        for side in self.sides:
            say(f"starting {side}")
            stacks[side] = running.enter_context(self.STACKS[side](engines))
        loads = {load.name: load for case in self._gateway_cases() for load in case.loads}
        say("idle")
        idle = _idle_shares(stacks, self.run_seconds)
        at_rest = {side: stack.rss_bytes() for side, stack in stacks.items()}

        async def measure(side: str, workload: str) -> Cost | None:
            load, stack = loads[workload], stacks[side]
            client = _client(side, stack, load, engines[0])
            if client is None:
                return None
            say(f"{workload}, {side}")
            seconds = self.run_seconds if self.quick or load.seconds is None else load.seconds
            return await _cost(stack, load, client, seconds, idle[side], at_rest[side])

        return lambda side, workload: asyncio.run(measure(side, workload))

    def _gateway_cases(self) -> list[GatewayCase]:
        return [case for case in self.selected() if isinstance(case, GatewayCase)]


def _idle_shares(stacks: Mapping[str, Stack], seconds: float) -> dict[str, Mapping[str, float]]:
    """Return the CPU seconds a second of each idle process, by side."""
    before = {side: stack.cpu_seconds() for side, stack in stacks.items()}
    time.sleep(seconds)
    return {
        side: {name: (used - before[side][name]) / seconds for name, used in stack.cpu_seconds().items()}
        for side, stack in stacks.items()
    }


async def _cost(
    stack: Stack, load: Load, client: Client, seconds: float, idle: Mapping[str, float], at_rest: Mapping[str, int]
) -> Cost:
    async with client:
        send = load.send(client)
        warm = await at_rate(send, per_second=load.per_second, seconds=min(seconds, WARM_SECONDS))
        before, begun = stack.cpu_seconds(), time.monotonic()
        async with _growth(stack, at_rest) as grown:
            sent = await at_rate(send, per_second=load.per_second, seconds=seconds, first=warm.requests)
        lasted = time.monotonic() - begun
        after = stack.cpu_seconds()
    return Cost(
        {name: (after[name] - before[name] - idle[name] * lasted) / sent.requests * 1e6 for name in after},
        _ms(sent.seconds, 99),
        (_ms(sent.first_seconds, 50), _ms(sent.first_seconds, 99)),
        {name: most / 1024 / sent.requests for name, most in grown.items()},
    )


def _ms(seconds: list[float], share: int) -> float:
    return (percentile(sorted(seconds), share) or 0.0) * 1e3


@asynccontextmanager
async def _growth(stack: Stack, at_rest: Mapping[str, int]) -> AsyncIterator[dict[str, int]]:
    """Follow the largest growth of each process in bytes, while the context is entered."""
    grown = dict.fromkeys(at_rest, 0)

    async def look() -> None:
        while True:
            for name, now in stack.rss_bytes().items():
                grown[name] = max(grown[name], now - at_rest[name])
            await asyncio.sleep(LOOK_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield grown
    finally:
        looking.cancel()
        await asyncio.wait([looking])


def _client(side: str, stack: Stack, load: Load, engine: str) -> Client | None:
    """Return the client of a load; None: the side does not speak its protocol."""
    if load.direct:
        return CompletionClient(engine, tokens=TOKENS, seed=SEED, as_text=False)
    if load.http:
        if not stack.http_address:
            return None
        return CompletionClient(stack.http_address, tokens=TOKENS, seed=SEED, as_text=side == "smg")
    return GrpcClient(stack.grpc_address, tokens=TOKENS, seed=SEED) if stack.grpc_address else None
