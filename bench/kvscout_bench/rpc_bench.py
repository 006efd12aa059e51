"""`kvscout bench rpc`: what calls cost their servers and their client, how long they take, and how many get through.

Beside a peer in one run: our own services over grpcio, Dynamo's standalone ones over HTTP, or a process that only reads
and writes, which no service can undercut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvscout_bench.harness import Bench, Case, Measure, Say, measure_by, sample_value
from kvscout_bench.peer import Driver
from kvscout_bench.rpc_fixture import TOKENS, WORKERS
from kvscout_bench.strangers import DriverFailed
from kvscout_common.hashing import native_available

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


def _cases() -> Iterator[Case]:
    for workload in WORKLOADS:
        kind, tokens, workers, rate = workload.split("/")
        often = "as many as get through" if rate == SATURATED else f"{int(rate):,}/s"
        title = f"{KINDS[kind]}, {int(tokens):,} tokens, {workers} workers, {often}"
        server, client = f"server/{workload}", f"client/{workload}"
        yield Case(
            name=server,
            title=f"{title}: its servers",
            unit="µs",
            goal=GOALS.get(server),
            workload=workload,
            value=sample_value("server_us"),
            parts=lambda sample: dict(sample["parts_us"]),
        )
        yield Case(
            name=client,
            title=f"{title}: its client",
            unit="µs",
            goal=GOALS.get(client),
            workload=workload,
            value=sample_value("client_us"),
        )
        if rate == SATURATED:
            yield Case(
                name=f"through/{workload}",
                title=f"{title}: calls",
                unit="1/s",
                workload=workload,
                value=sample_value("per_second"),
                more_is_better=True,
            )
        else:
            yield Case(
                name=f"took/{workload}",
                title=f"{title}: it takes",
                unit="µs",
                workload=workload,
                value=sample_value("p50_us"),
                p99=sample_value("p99_us"),
            )


@dataclass(frozen=True, slots=True)
class RpcBench(Bench):
    """The benchmark of calls. Errors as of `Bench`."""

    CASES = tuple(_cases())
    PEERS = ("grpcio", "dynamo", "floor")
    SECONDS = (1.5, 0.2)

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; each side is a process that starts services and calls them."""
        if not native_available():
            raise DriverFailed("the extension kvscout_native is not built: there is nothing to compare")
        drivers = {}
        for side in self.sides:
            say(f"starting {side}")
            drivers[side] = running.enter_context(Driver([sys.executable, "-m", "kvscout_bench.rpc_driver", side]))
        return measure_by(drivers, self.run_seconds)
