"""`kvscout bench ingest`: cost of ingesting events in a real indexer process, by event transport."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvscout_bench import ingest_bridge, ingest_jetstream, ingest_zmq
from kvscout_bench.harness import Bench, Case, Measure, Sample, Say, sample_value

ZMQ = {
    "zmq/messages": ingest_zmq.Load(100_000, 20_000, 4),
    "zmq/batches": ingest_zmq.Load(2_000, 1_000, 1024),
    "zmq/flood": ingest_zmq.Load(1_500, 0, 1024, probed=True),
    "zmq/modest": ingest_zmq.Load(10_000, 1_000, 4, probed=True),
}
IDLE = "zmq/idle"
JETSTREAM = {
    "jetstream/message": ingest_jetstream.Load(40_000, 4),
    "jetstream/block": ingest_jetstream.Load(2_000, 1024),
    # A million memberships.
    "jetstream/restart": ingest_jetstream.Load(992, 1024, restart=True),
}
BRIDGE = {f"bridge/{transport}": transport for transport in ("nats-core", "jetstream")}


def _case(name: str, title: str, unit: str, goal: float | None = None, *, p99: str = "", **more: Any) -> Case:
    key = name.rpartition("/")[2]
    return Case(
        name=name,
        title=title,
        unit=unit,
        goal=goal,
        value=sample_value(key),
        p99=sample_value(p99) if p99 else None,
        **more,
    )


def _visible(name: str, goal: float | None, workload: str, through: str = "") -> Case:
    share = "p99" if name.endswith("p99") else "median"
    return _case(name, f"event to FindMatches{through}, {share}, 1,000 messages/s", "ms", goal, workload=workload)


_MESSAGES = f"20,000 messages/s of 4 blocks, {ingest_zmq.ENGINES} sockets"
_FLOOD = "blocks a second, batches of 1,024 as fast as they come"
_IDLE = f"CPU with {ingest_zmq.IDLE_ENGINES} silent sockets"


@dataclass(frozen=True, slots=True)
class IngestBench(Bench):
    """The ingest benchmark. Errors as of `Bench`."""

    CASES = (
        _case("zmq/message", f"CPU a message, {_MESSAGES}", "µs", 8.0, workload="zmq/messages", published=(17.0, 25.0)),
        _case("zmq/block", "CPU a block, batches of 1,024", "µs", 0.15, workload="zmq/batches", published=(0.54, 0.68)),
        _case("zmq/flood", _FLOOD, "1/s", more_is_better=True),
        _case("zmq/find", "FindMatches meanwhile, median", "ms", p99="find_p99", workload="zmq/flood"),
        _visible("zmq/visible", None, "zmq/modest"),
        _visible("zmq/visible_p99", 5.0, "zmq/modest"),
        _case(IDLE, _IDLE, "% of a core"),
        _case("jetstream/message", "CPU a message of 4 blocks", "µs", 125.0),
        _case("jetstream/block", "CPU a block, messages of 1,024", "µs", 5.0),
        _case("jetstream/restart", "started to SERVING, a snapshot of 1 million memberships", "s", 5.0),
        *(
            _visible(f"{workload}/visible_p99", 15.0, workload, f" through a bridge, {transport}")
            for workload, transport in BRIDGE.items()
        ),
    )
    PEERS = ("dynamo",)

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; processes are new in each run."""
        runs: dict[str, Callable[[str], Sample]] = {
            name: partial(ingest_zmq.ingest, load.short() if self.quick else load, say) for name, load in ZMQ.items()
        }
        runs[IDLE] = partial(ingest_zmq.idle, self.quick, say)

        def measure(side: str, workload: str) -> Sample | None:
            if workload in runs:
                return runs[workload](side)
            if side in self.PEERS:
                return None
            if workload in BRIDGE:
                return ingest_bridge.ingest(BRIDGE[workload], self.quick, say)
            load = JETSTREAM[workload]
            return ingest_jetstream.ingest(load.short() if self.quick else load, say)

        return measure
