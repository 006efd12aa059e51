"""`kvscout bench gateway`: CPU that a request costs, all of our services together, and peers beside it in one run."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kvscout_bench.gateway_load import CompletionClient, GrpcClient, Send, at_rate
from kvscout_bench.gateway_stack import Stack, addresses_of, engines_process, envoy, our_stack, smg
from kvscout_bench.harness import Case, Goal, Row, Side, alternating, compare
from kvscout_bench.machine import Machine, this_machine
from kvscout_bench.selection import Selection
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_lab.statistics import percentile

SEED = 1
TOKENS = 4_096
SECONDS, QUICK_SECONDS = 8.0, 0.5
WARM_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""Between two looks at memory."""
CHUNKS = 64
FEW_CHUNKS = 8
STREAMS = 1_000
MANY_SECONDS = 5.0
MANY_CHUNKS, MANY_GAP_MS = 50, 200.0
"""Streams last twice as long as they begin: for five seconds all run at once."""
PEERS = ("grpcio", "smg", "envoy")
OURS = "kvscout"


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

    value: Callable[[Any], float]
    """Value of a cost, in `unit`."""
    loads: tuple[Load, ...]
    cost: Callable[[tuple[Cost, ...]], Cost]
    """Cost of a row, from one run of each load."""


def _microseconds(cost: Any) -> float:
    assert isinstance(cost, Cost)
    return cost.microseconds


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
    return Load(name=f"{name}/{per_second:g}", per_second=per_second, send=send, http=http)


def _case(
    name: str,
    title: str,
    goal: float,
    cost: Callable[[tuple[Cost, ...]], Cost],
    *loads: Load,
    unit: str = "µs",
    value: Callable[[Any], float] = _microseconds,
) -> GatewayCase:
    return GatewayCase(
        name=name, title=title, unit=unit, goal=Goal(goal), workload=name, value=value, loads=loads, cost=cost
    )


def _added_rows(kind: str, title: str, send: Callable[[Any], Send], *, http: bool) -> list[GatewayCase]:
    """Return the rows of the delay before the first output at 100/s, measured beside the engine alone."""
    direct = replace(load_of("direct", 100, lambda client: client.complete(FEW_CHUNKS), http=True), direct=True)
    loads, said = (
        (direct, load_of(f"first/{kind}", 100, send, http=http)),
        f"{title}, 100/s, added before its first output",
    )
    return [
        _case(f"first/{kind}/p50", f"{said}, median", 3.0, _added, *loads, unit="ms", value=lambda c: c.first_ms[0]),
        _case(f"first/{kind}/p99", f"{said}, p99", 8.0, _added, *loads, unit="ms", value=lambda c: c.first_ms[1]),
    ]


def _many_streams(kind: str, title: str, send: Callable[[Any], Send], *, http: bool) -> GatewayCase:
    """Return a thousand streams at once of five tokens a second each: any error ends the run."""
    load = replace(load_of(f"many/{kind}", STREAMS / MANY_SECONDS, send, http=http), seconds=MANY_SECONDS)
    said = f"{title}, {STREAMS:,} streams at once of {1e3 / MANY_GAP_MS:g} tokens/s, memory a stream"
    return _case(f"many/{kind}", said, 64.0, _memory, load, unit="KiB")


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


CASES = [
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
]


@dataclass(frozen=True, slots=True)
class GatewayBench(Selection):
    """Rows to run. Errors as of `Selection`."""

    peers: tuple[str, ...] = ()
    seconds: float = SECONDS
    """For how long requests of a load begin."""

    def __post_init__(self) -> None:
        Selection.__post_init__(self)
        known = self.peer_stacks()
        for peer in self.peers:
            if peer not in known:
                raise InvalidArgument(f"{peer!r} is none of {', '.join(known)}", field="peer")

    @classmethod
    def cases(cls) -> Sequence[GatewayCase]:
        """Return all rows."""
        return CASES

    @classmethod
    def our_stack(cls, engines: list[str]) -> Any:
        """Start our stack before engines."""
        return our_stack(engines, "native" if native_available() else "grpcio")

    @classmethod
    def peer_stacks(cls) -> Mapping[str, Callable[[list[str]], Any]]:
        """Return what starts each peer, by name."""
        return _PEERS

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return [case.name for case in cls.cases()]

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measure every side of every workload in turns, then yield the rows; blocks.

        Args:
            say: Reports progress, a line a call.

        Raises:
            DriverFailed: A process cannot be started, or a request fails.
        """
        machine = this_machine()
        cases = [case for case in self.cases() if self.wanted(case.name)]
        with ExitStack() as running:
            engines = addresses_of(running.enter_context(engines_process()))
            sides: dict[str, Any] = {OURS: partial(self.our_stack, engines)}
            sides.update({peer: partial(self.peer_stacks()[peer], engines) for peer in self.peers})
            stacks: dict[str, Stack] = {}
            for name, make in sides.items():
                say(f"starting {name}")
                stacks[name] = running.enter_context(make())
            loads = {load.name: load for case in cases for load in case.loads}
            costs = asyncio.run(self._measure(stacks, loads, engines[0], say))
        for case in cases:
            taken = {
                side: [case.cost(runs) for runs in zip(*(costs[side, load.name] for load in case.loads), strict=True)]
                for side in stacks
                if all((side, load.name) in costs for load in case.loads)
            }
            ours = taken.pop(OURS, None)
            if ours is None:
                continue
            for name, others in taken.items():
                yield self._row(case, ours, others, name, machine)
            if not taken:
                yield self._row(case, ours, None, "", machine)

    async def _measure(
        self, stacks: Mapping[str, Stack], loads: Mapping[str, Load], engine: str, say: Callable[[str], None]
    ) -> dict[tuple[str, str], list[Cost]]:
        """Return costs by side and load, one a round."""
        costs: dict[tuple[str, str], list[Cost]] = {}
        idle = await self._idle(stacks, say)
        at_rest = {side: stack.rss_bytes() for side, stack in stacks.items()}
        for number, order in enumerate(alternating(list(stacks), self.rounds_to_run)):
            for load in loads.values():
                for side in order:
                    client = _client(side, stacks[side], load, engine)
                    if client is not None:
                        say(f"{load.name}, {side}, round {number + 1} of {self.rounds_to_run}")
                        costs.setdefault((side, load.name), []).append(
                            await self._cost(stacks[side], load, client, idle[side], at_rest[side])
                        )
        return costs

    async def _idle(self, stacks: Mapping[str, Stack], say: Callable[[str], None]) -> dict[str, Mapping[str, float]]:
        """Return the CPU seconds a second of each idle process."""
        say("idle")
        seconds = QUICK_SECONDS if self.quick else self.seconds
        before = {side: stack.cpu_seconds() for side, stack in stacks.items()}
        await asyncio.sleep(seconds)
        return {
            side: {name: (used - before[side][name]) / seconds for name, used in stack.cpu_seconds().items()}
            for side, stack in stacks.items()
        }

    async def _cost(
        self, stack: Stack, load: Load, client: Client, idle: Mapping[str, float], at_rest: Mapping[str, int]
    ) -> Cost:
        seconds = QUICK_SECONDS if self.quick else load.seconds or self.seconds
        async with client:
            send = load.send(client)
            warm = await at_rate(send, per_second=load.per_second, seconds=min(seconds, WARM_SECONDS))
            before, begun = stack.cpu_seconds(), asyncio.get_running_loop().time()
            async with _growth(stack, at_rest) as grown:
                sent = await at_rate(send, per_second=load.per_second, seconds=seconds, first=warm.requests)
            lasted = asyncio.get_running_loop().time() - begun
            after = stack.cpu_seconds()
        return Cost(
            {name: (after[name] - before[name] - idle[name] * lasted) / sent.requests * 1e6 for name in after},
            _ms(sent.seconds, 99),
            (_ms(sent.first_seconds, 50), _ms(sent.first_seconds, 99)),
            {name: most / 1024 / sent.requests for name, most in grown.items()},
        )

    def _row(self, case: GatewayCase, ours: list[Cost], peer: list[Cost] | None, name: str, machine: Machine) -> Row:
        parts = {part: statistics.median(cost.parts[part] for cost in ours) for part in ours[0].parts}
        sides = _side(case, ours), _side(case, peer) if peer else None
        row = compare(case, *sides, judge=not self.quick, machine=machine, parts=parts)
        return replace(row, title=f"{row.title}; peer {name}") if name else row


def _side(case: GatewayCase, costs: list[Cost]) -> Side:
    return Side(tuple(case.value(cost) for cost in costs), tuple(cost.p99 for cost in costs))


def _ms(seconds: list[float], share: int) -> float:
    return (percentile(sorted(seconds), share) or 0.0) * 1e3


@asynccontextmanager
async def _growth(stack: Stack, at_rest: Mapping[str, int]) -> AsyncIterator[dict[str, int]]:
    """Follow the largest growth of each process in bytes, while this is entered."""
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
    """None: the side does not speak that."""
    if load.direct:
        return CompletionClient(engine, tokens=TOKENS, seed=SEED, as_text=False)
    if load.http:
        if not stack.http_address:
            return None
        return CompletionClient(stack.http_address, tokens=TOKENS, seed=SEED, as_text=side == "smg")
    return GrpcClient(stack.grpc_address, tokens=TOKENS, seed=SEED) if stack.grpc_address else None


_PEERS: Mapping[str, Callable[[list[str]], Any]] = {
    "grpcio": partial(our_stack, transport="grpcio"),
    "smg": smg,
    "envoy": envoy,
}
