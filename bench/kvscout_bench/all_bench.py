"""`kvscout bench all`: benchmarks of services and index in one run, beside the peers, and one report of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from kvscout_bench.gateway_bench import GatewayBench
from kvscout_bench.gateway_stack import ROUTERS
from kvscout_bench.harness import Bench, Row, Say, rounded
from kvscout_bench.http_bench import HttpBench
from kvscout_bench.index_bench import IndexBench
from kvscout_bench.ingest_bench import IngestBench
from kvscout_bench.machine import Machine, this_machine
from kvscout_bench.routers_bench import RoutersBench
from kvscout_bench.rpc_bench import RpcBench
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_bench.strangers import ROOT, DriverFailed, described
from kvscout_common import __version__
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import backend_name

DYNAMO = "dynamo"
PEERS: Mapping[str, str] = {
    DYNAMO: f"dynamo-kv-router 1.6.1 (crate), {described('DYNAMO')} (wheel: indexer, selection service)",
    "services": "gateway, scheduler and indexer as three processes",
    "serve": "kvscout serve: the three in one process",
    **{name: described(stranger) for name, stranger in ROUTERS.items()},
    "smg-hash": "smg with consistent_hashing",
    "vllm-router-kv": "vllm-router with kv_aware, which reads the engines' events",
    "envoy": described("ENVOY"),
}
"""Peers, and the parts of each that are measured."""
BENCHES: Mapping[str, type[Bench]] = {
    "index": IndexBench,
    "rpc": RpcBench,
    "ingest": IngestBench,
    "scheduler": SchedulerBench,
    "gateway": GatewayBench,
    "http": HttpBench,
    "routers": RoutersBench,
}
PARTS = tuple(BENCHES)
USUAL_PARTS = tuple(name for name in PARTS if name != "routers")
"""All but what takes an hour."""
SHORT_SECONDS = {"index": 0.3, "gateway": 4.0, "http": 4.0}
"""Length of one run of one side in a run of everything, which must end within half an hour, where not the default."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of a part."""

    rows: tuple[Row, ...]
    failure: str
    """Why it ended before its end; "" = it did not."""
    seconds: float
    load: tuple[float, float]
    """Load averages of the machine over a minute, before and after it."""


@dataclass(frozen=True, slots=True)
class Report:
    """A run of everything."""

    machine: Machine
    versions: Mapping[str, str]
    commit: str
    """With "+" behind it if files were changed since; "" = not known."""
    rounds: int
    quick: bool
    parts: Mapping[str, Measured]

    def lost(self) -> list[tuple[str, Row, str]]:
        """Return rows in which a peer is better, the worst first: with their parts, and the peer."""
        rows = [(name, row, peer) for name, part in self.parts.items() for row in part.rows for peer in row.peers]
        ratios = [(ratio, each) for each in rows if (ratio := each[1].ratio(each[2])) is not None and ratio < 1]
        return [each for _, each in sorted(ratios, key=lambda pair: pair[0])]

    def missed(self) -> list[tuple[str, Row]]:
        """Return rows that miss their goals, with their parts."""
        return [(name, row) for name, part in self.parts.items() for row in part.rows if row.met is False]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "machine": asdict(self.machine),
            "versions": dict(self.versions),
            "commit": self.commit,
            "rounds": self.rounds,
            "quick": self.quick,
            "parts": {
                name: {
                    "seconds": rounded(part.seconds),
                    "load": list(part.load),
                    "failure": part.failure,
                    "rows": [row.as_json() for row in part.rows],
                }
                for name, part in self.parts.items()
            },
            "lost": [f"{row.case.name}: {peer}" for _, row, peer in self.lost()],
            "missed": [row.case.name for _, row in self.missed()],
        }


@dataclass(frozen=True, slots=True)
class AllBench:
    """Parts, peers and rounds of a run of everything.

    Raises:
        InvalidArgument: A value is out of range or names nothing.
    """

    peers: tuple[str, ...] = ()
    rounds: int = 2
    parts: tuple[str, ...] = field(default=USUAL_PARTS)
    quick: bool = False
    """Short: shows that everything works, judges nothing."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidArgument("must be at least 1", field="rounds")
        for name, given, known in (("peers", self.peers, tuple(PEERS)), ("parts", self.parts, PARTS)):
            for each in given:
                if each not in known:
                    raise InvalidArgument(f"{each!r} is not one of {', '.join(known)}", field=name)

    def run(self, say: Say) -> Report:
        """Measure part by part; blocks. The failure of a part is reported, and the next one begins.

        Args:
            say: Reports progress.
        """
        measured = {}
        for name in (part for part in PARTS if part in self.parts):
            say(f"== {name}")
            measured[name] = _measured(self._bench(name).run(say))
        versions = {"kvscout": f"{__version__}, {backend_name()}", **_versions()}
        versions |= {peer: PEERS[peer] for peer in self.peers}
        return Report(this_machine(), versions, commit(), 1 if self.quick else self.rounds, self.quick, measured)

    def _bench(self, part: str) -> Bench:
        bench = BENCHES[part]
        peers = tuple(peer for peer in self.peers if peer in bench.PEERS)
        return bench(rounds=self.rounds, quick=self.quick, peers=peers, seconds=SHORT_SECONDS.get(part, 0.0))


def _measured(rows: Iterable[Row]) -> Measured:
    began, before = time.monotonic(), os.getloadavg()[0]
    done: list[Row] = []
    failure = ""
    try:
        for row in rows:
            done.append(row)  # rows count even if a later one fails  # noqa: PERF402
    except (DriverFailed, OSError) as error:
        failure = str(error)
    after = os.getloadavg()[0]
    return Measured(tuple(done), failure, time.monotonic() - began, (round(before, 2), round(after, 2)))


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that carry calls."""
    names = ("grpcio", "protobuf", "uvloop", "pyzmq")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def commit() -> str:
    """Return the commit of the source tree, as git says; "" where there is none."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return ""

    def output(*words: str) -> str:
        done = subprocess.run([git, "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = "+" if output("status", "--porcelain", "--untracked-files=no") else ""
    return output("rev-parse", "--short=12", "HEAD") + changed
