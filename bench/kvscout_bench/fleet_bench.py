"""`kvscout bench fleet`: an indexer with the engines of a whole fleet, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvscout_bench.fleet_process import Engines, Fleet, FleetIndexer, Probe
from kvscout_bench.harness import OURS, Bench, Case, Measure, Sample, Say, sample_value

MOST_RANKS = 16_000
DEEP = 10_000
"""Batches of a rank that engines keep for a replay: vLLM's `buffer_steps`."""
FLEETS = {
    "1": Fleet(1, 65_000, 1 << 20),
    "100": Fleet(100, 2_500, 10_240),
    "1000": Fleet(1_000, 256, 4_096, 8),
    "16000": Fleet(MOST_RANKS, 17, 512, 8),
    "16000/10M": Fleet(MOST_RANKS, 160, 640, 8),
    "1000/deep": Fleet(1_000, DEEP, 4_096, 8),
}
"""Of a million blocks each, ten millions, and with a long history of which most is evicted again."""
QUICK = Fleet(32, 40, 128, 8)
MESSAGES, QUICK_MESSAGES = 1_000_000, 2_000
"""Many: whether all are applied is looked at each two seconds."""
BURST = 4
"""Batches of a rank that come together, in a flood."""
RESTART_SECONDS = 1_800.0
IDLE_SECONDS, QUICK_IDLE_SECONDS = 10.0, 0.2
PAGES = 3
GIB = 2**30


def _cases(name: str, fleet: Fleet) -> Iterator[Case]:
    of = f"{fleet.ranks:,} ranks, {fleet.blocks / 1e6:.1f} million blocks"

    def case(key: str, title: str, unit: str, *, p99: str = "", goal: float | None = None, more: bool = False) -> Case:
        return Case(
            name=f"{name}/{key}",
            workload=name,
            title=f"{of}: {title}",
            unit=unit,
            value=sample_value(key),
            p99=sample_value(p99) if p99 else None,
            goal=goal,
            more_is_better=more,
        )

    live = f"started to all live, {fleet.batches:,} batches a rank"
    find = "FindMatches meanwhile, median"
    yield case("restart", live, "s", goal=30.0 if fleet.batches == DEEP else None)
    yield case("restart_cpu", "CPU of the indexer for that", "s")
    yield case("restart_find", find, "ms", p99="restart_find_p99")
    yield case("ingest", "messages of 4 blocks as fast as they come", "1/s", more=True)
    yield case("message", "CPU of the indexer a message", "µs")
    yield case("ingest_find", find, "ms", p99="ingest_find_p99")
    yield case("tenth", "a tenth of the ranks restarts, until all are live", "s")
    yield case("scrape", "a page of /metrics", "ms")
    yield case("status", "GetStatus", "ms")
    yield case("look_find", find, "ms", p99="look_find_p99")
    yield case("idle", "CPU while nothing comes", "% of a core", goal=5.0 if fleet.ranks == MOST_RANKS else None)
    yield case("memory", "memory of the indexer", "GiB")


@dataclass(frozen=True, slots=True)
class FleetBench(Bench):
    """The benchmark of fleets. Errors as of `Bench`."""

    CASES = tuple(case for name, fleet in FLEETS.items() for case in _cases(name, fleet))
    rounds: int = 1

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; processes are new in each run."""

        def measure(side: str, workload: str) -> Sample | None:
            fleet = QUICK if self.quick else FLEETS[workload]
            return _measure(fleet, self.quick, say) if side == OURS else None

        return measure


def _measure(fleet: Fleet, quick: bool, say: Say) -> dict[str, float]:
    """Run a fleet with a new indexer."""
    with ExitStack() as stack:
        engines = stack.enter_context(Engines(fleet))
        indexer = stack.enter_context(FleetIndexer(fleet))
        sample = _restart(engines, indexer)
        say(f"{fleet.ranks:,} ranks live after {sample['restart']:.1f} s, {sample['restart_cpu']:.1f} s of CPU")
        played, messages = engines.cpu_ns(), QUICK_MESSAGES if quick else MESSAGES
        sample |= _flood(engines, indexer, messages)
        played_us = (engines.cpu_ns() - played) / 1e3 / messages
        say(
            f"{sample['ingest']:,.0f} messages/s, which cost the process that plays the engines {played_us:.1f} µs each"
        )
        sample |= _tenth(engines, indexer)
        sample |= _looks(indexer)
        before, seconds = indexer.cpu_ns(), QUICK_IDLE_SECONDS if quick else IDLE_SECONDS
        time.sleep(seconds)
        sample["idle"] = (indexer.cpu_ns() - before) / 1e9 / seconds * 100
        sample["memory"] = indexer.rss_bytes() / GIB
    return sample


def _restart(engines: Engines, indexer: FleetIndexer) -> dict[str, float]:
    """Wait until an indexer that was just started has the history of every rank."""
    indexer.register_all(engines)
    with Probe(indexer) as probe:
        to_be_sure = indexer.until_live(batches=engines.published, within_seconds=RESTART_SECONDS)
        seconds = time.perf_counter() - indexer.began - to_be_sure
    return {
        "restart": seconds,
        "restart_cpu": indexer.cpu_ns() / 1e9,
        "restart_find": probe.percentile_ms(50),
        "restart_find_p99": probe.percentile_ms(99),
    }


def _flood(engines: Engines, indexer: FleetIndexer, messages: int) -> dict[str, float]:
    """Publish as fast as the indexer reads."""
    before, began = indexer.cpu_ns(), time.perf_counter()
    with Probe(indexer) as probe:
        engines.publish(messages, burst=BURST)
        to_be_sure = indexer.until_live(batches=engines.published, within_seconds=RESTART_SECONDS)
        seconds = time.perf_counter() - began - to_be_sure
    return {
        "ingest": messages / seconds,
        "message": (indexer.cpu_ns() - before) / 1e3 / messages,
        "ingest_find": probe.percentile_ms(50),
        "ingest_find_p99": probe.percentile_ms(99),
    }


def _tenth(engines: Engines, indexer: FleetIndexer) -> dict[str, float]:
    """Restart a tenth of the engines at once."""
    ranks = -(-engines.fleet.ranks // 10)
    began = time.perf_counter()
    engines.restart(ranks)
    to_be_sure = indexer.until_live(restarted=ranks, within_seconds=RESTART_SECONDS)
    return {"tenth": time.perf_counter() - began - to_be_sure}


def _looks(indexer: FleetIndexer) -> dict[str, float]:
    """Read what operators read."""
    with Probe(indexer) as probe:
        began = time.perf_counter()
        for _ in range(PAGES):
            indexer.scrape()
        scraped = time.perf_counter()
        for _ in range(PAGES):
            indexer.status()
        ended = time.perf_counter()
    return {
        "scrape": (scraped - began) / PAGES * 1e3,
        "status": (ended - scraped) / PAGES * 1e3,
        "look_find": probe.percentile_ms(50),
        "look_find_p99": probe.percentile_ms(99),
    }
