"""Loads that `kvscout bench gateway` puts on each side, and their costs: rates, saturation, starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from kvscout_bench.gateway_load import CompletionClient, GrpcClient, Send, Sent, at_rate
from kvscout_bench.gateway_prompts import LONG_TOKENS, TOKENS, long_prompts, short_prompts
from kvscout_bench.gateway_stack import Stack, addresses_of
from kvscout_bench.service_process import ReadyProcess
from kvscout_lab.statistics import percentile

WARM_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""Interval of looks at memory."""
SATURATION_MS = 20.0
"""Longest time added to 99 of 100 first outputs below saturation."""
RATES = [round(100 * 1.1**step) for step in range(40)]
"""Rates among which saturation is found."""


StartStack = Callable[[list[str], Sequence[str]], Stack]
"""Starts a side before engines, by their addresses, with flags of our gateway."""


class Target(Enum):
    """Side that requests go to."""

    GRPC = auto()
    HTTP = auto()
    PICKER = auto()
    """A proxy that lets our endpoint picker choose."""
    ENGINE = auto()
    """An engine, whatever the side."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one run, and how long its requests took."""

    parts: Mapping[str, float]
    """Microseconds a request, by process; without what the same processes take while idle."""
    p99: float | None = None
    """Milliseconds from when a request was due to its end; None = not of requests."""
    first_ms: Mapping[int, float] = field(default_factory=dict)
    """Percentiles of the milliseconds from then to its first output."""
    grown_kib: Mapping[str, float] = field(default_factory=dict)
    """Largest growth of each process since its start, a request."""
    figure: float = 0.0
    """Figure of a run that is no cost: a rate, seconds of a start."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Microseconds a request of the processes beside it: load generator and engines."""

    @property
    def microseconds(self) -> float:
        """Return the microseconds of all processes."""
        return sum(self.parts.values())


class Client(Protocol):
    """Sends requests to a side, as a context manager."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *ended: Any) -> None: ...


class Subject:
    """A side under measurement.

    Args:
        start: Starts it before engines, by their addresses, with flags of our gateway.
        engines: Stand-ins for engines.
        flags: Those of this run.
    """

    def __init__(self, start: StartStack, engines: ReadyProcess, flags: Sequence[str]) -> None:
        self._start = start
        self.stack = start(addresses_of(engines), flags)
        self.engines = engines
        self.idle: Mapping[str, float] = {}
        """CPU seconds a second of each idle process."""
        self._at_rest = self.stack.rss_bytes()
        self._requests = 0

    def start(self) -> Stack:
        """Return another stack of this side, without further flags."""
        return self._start(addresses_of(self.engines), ())

    def client(self, target: Target, *, long: bool) -> Client | None:
        """Return a client; None: the side does not speak its protocol."""
        if target is Target.GRPC:
            return GrpcClient(self.stack.grpc_address) if self.stack.grpc_address else None
        address = {
            Target.HTTP: self.stack.http_address,
            Target.PICKER: self.stack.picker_address,
            Target.ENGINE: addresses_of(self.engines)[0],
        }[target]
        if not address:
            return None
        prompts = long_prompts() if long else short_prompts(as_text=self.stack.text_only)
        return CompletionClient(address, prompts, prompt_tokens=LONG_TOKENS if long else TOKENS)

    async def run(self, send: Send, per_second: float, seconds: float, *, give_up: float = float("inf")) -> Sent:
        """Send requests at a rate, numbered on from the last run. Arguments and errors as of `at_rate`."""
        sent = await at_rate(send, per_second=per_second, seconds=seconds, first=self._requests, give_up=give_up)
        self._requests += sent.requests
        return sent

    async def cost(self, send: Send, per_second: float, seconds: float) -> Cost:
        """Return what requests at a rate cost."""
        await self.run(send, per_second, min(seconds, WARM_SECONDS))
        before, begun = self.stack.cpu_seconds(), time.monotonic()
        ours, theirs = time.process_time(), self.engines.cpu_ns()
        async with self._growth() as grown:
            sent = await self.run(send, per_second, seconds)
        lasted, after = time.monotonic() - begun, self.stack.cpu_seconds()
        beside = {"load": time.process_time() - ours, "engines": (self.engines.cpu_ns() - theirs) / 1e9}
        return Cost(
            {name: (after[name] - before[name] - self.idle[name] * lasted) / sent.requests * 1e6 for name in after},
            _ms(sent.seconds, 99),
            {share: _ms(sent.first_seconds, share) for share in (50, 95, 99)},
            {name: most / 1024 / sent.requests for name, most in grown.items()},
            beside={name: used / sent.requests * 1e6 for name, used in beside.items()},
        )

    @asynccontextmanager
    async def _growth(self) -> AsyncIterator[dict[str, int]]:
        """Follow the largest growth of each process in bytes, while the context is entered."""
        grown = dict.fromkeys(self._at_rest, 0)

        async def look() -> None:
            while True:
                for name, now in self.stack.rss_bytes().items():
                    grown[name] = max(grown[name], now - self._at_rest[name])
                await asyncio.sleep(LOOK_SECONDS)

        looking = asyncio.create_task(look())
        try:
            yield grown
        finally:
            looking.cancel()
            await asyncio.wait([looking])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests at a rate."""

    name: str
    per_second: float
    target: Target = Target.HTTP
    long: bool = False
    """Prompts are conversations of 100,000 tokens."""
    seconds: float | None = None
    """For how long requests begin; None = as all."""
    send: Callable[[Any], Send]
    """Makes the request from the client of that side."""

    async def run(self, subject: Subject, seconds: float) -> Cost | None:
        """Return what it costs a side; None: it does not speak the protocol."""
        client = subject.client(self.target, long=self.long)
        if client is None:
            return None
        async with client:
            return await subject.cost(self.send(client), self.per_second, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation(Load):
    """The highest rate at which first outputs are not late."""

    async def run(self, subject: Subject, seconds: float) -> Cost | None:
        """Return the rate. See `Load.run`."""
        engine, client = (subject.client(target, long=self.long) for target in (Target.ENGINE, self.target))
        if engine is None or client is None:
            return None
        async with engine, client:
            direct = await subject.run(self.send(engine), self.per_second, WARM_SECONDS)
            limit = (SATURATION_MS + _ms(direct.first_seconds, 99)) / 1e3
            send = self.send(client)
            await subject.run(send, self.per_second, WARM_SECONDS)

            async def holds(rate: float) -> bool:
                sent = await subject.run(send, rate, seconds, give_up=limit)
                return sent.late * 100 <= rate * seconds

            least, most = 0, len(RATES)
            while least < most:
                middle = (least + most) // 2
                # Another process may have delayed the first run.
                if await holds(RATES[middle]) or await holds(RATES[middle]):
                    least = middle + 1
                else:
                    most = middle
        return Cost({}, figure=RATES[max(least - 1, 0)])


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the side, up to its first completion."""

    name: str
    seconds: float | None = None

    async def run(self, subject: Subject, seconds: float) -> Cost | None:
        """Return the seconds that it takes."""
        begun = time.monotonic()
        with subject.start():
            return Cost({}, figure=time.monotonic() - begun)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing: what the processes take while they wait."""

    name: str
    seconds: float | None = None

    async def run(self, subject: Subject, seconds: float) -> Cost | None:
        """Return the microseconds a second of each process."""
        return Cost({name: used * 1e6 for name, used in subject.idle.items()})


Run = Load | Start | Idle


def measure_idle(subjects: Sequence[Subject], seconds: float) -> None:
    """Measure what all sides take while none has anything to do."""
    before = [subject.stack.cpu_seconds() for subject in subjects]
    time.sleep(seconds)
    for subject, used in zip(subjects, before, strict=True):
        now = subject.stack.cpu_seconds()
        subject.idle = {name: (now[name] - used[name]) / seconds for name in now}


def _ms(seconds: list[float], share: int) -> float:
    return (percentile(sorted(seconds), share) or 0.0) * 1e3
