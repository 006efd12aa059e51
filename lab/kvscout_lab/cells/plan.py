"""Plans: what another set-up would make of recorded traffic, beside what was recorded and a replay of the same set-up.

How far the replay is from the recording is the error of everything else that is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Contender, Experiment
from kvscout_lab.cells.measures import Objective
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.engine_fit import EngineFit, fit_engine
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.statistics import percentile
from kvscout_lab.workloads.recording import Recording, from_recording
from kvscout_lab.workloads.workload import Workload

MIN_KV_TOKENS = 1_024


class Outcome(NamedTuple):
    """What a set-up makes of the traffic. Times are seconds."""

    hit_rate: float
    """Cached / prompt tokens, 0..1."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    within_target: float
    """Share of the requests whose first token came within the target, 0..1."""


class Change(NamedTuple):
    """A set-up that differs from today's."""

    label: str
    cluster: Cluster
    contender: Contender


class Planner:
    """Replays a recording in set-ups.

    Args:
        recording: What was recorded.
        workers: Ranks that decode; None = as recorded.
        prefill_workers: Ranks that only compute prompts; None = as recorded.
        kv_tokens: KV tokens of a rank; None = as registered.
        ttft_seconds: Target of the first token.
        warm_up: Share of the requests, the first, that do not count: the caches of a replay begin empty.

    Raises:
        ConfigError: The recording does not say the size of the caches, or too little to fit engine speeds.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        workers: int | None = None,
        prefill_workers: int | None = None,
        kv_tokens: int | None = None,
        ttft_seconds: float = 2.0,
        warm_up: float = 0.1,
    ) -> None:
        self.recording = recording
        self.workload: Workload = from_recording("recording", recording)
        self._objective = Objective(ttft_seconds, inf, warm_up).validate()
        cluster = _cluster(recording, self.workload, workers, prefill_workers, kv_tokens)
        self.fit: EngineFit = fit_engine(recording.requests, cluster.engine.max_num_batched_tokens)
        self.cluster = replace(cluster, engine=replace(cluster.engine, step=self.fit.step)).validate()
        """Today's set-up."""

    def recorded(self) -> Outcome:
        """Return what was recorded.

        Raises:
            ConfigError: No request had an output.
        """
        requests = self.recording.requests
        counted = [one for one in requests[int(len(requests) * self._objective.warm_up) :] if one.ttft_seconds > 0]
        if not counted:
            raise ConfigError("no recorded request had an output", field="recording")
        reported = [one for one in counted if one.cached_tokens is not None]
        cached = sum(one.cached_tokens or 0 for one in reported)
        ttft = sorted(one.ttft_seconds for one in counted)
        p50, p90, p99 = (percentile(ttft, percent) or 0.0 for percent in (50, 90, 99))
        kept = sum(seconds <= self._objective.ttft_seconds for seconds in ttft) / len(ttft)
        prompt_tokens = sum(one.prompt_tokens for one in reported)
        return Outcome(cached / max(1, prompt_tokens), fmean(ttft), p50, p90, p99, kept)

    def run(self, cluster: Cluster, contender: Contender, on_done: Callable[[int], None] = lambda _: None) -> Outcome:
        """Return what a replay makes of the traffic, at its own times.

        Args:
            cluster: The set-up.
            contender: The policy.
            on_done: Called with the number of requests that have ended.
        """
        experiment = Experiment(self.workload, cluster, objective=self._objective, on_done=on_done)
        measures = experiment.run(contender.settings, self.workload.flow_rate)
        ttft = measures.ttft
        return Outcome(measures.hit_rate, ttft.mean, ttft.p50, ttft.p90, ttft.p99, measures.well_served)

    def changes(
        self,
        today: Contender,
        *,
        contenders: Iterable[Contender],
        workers: Iterable[int],
        kv_factors: Iterable[float],
        prefill_workers: Iterable[int],
        offload_factors: Iterable[float] = (),
    ) -> list[Change]:
        """Return set-ups that differ from today's in one respect each."""
        changes = [Change(f"policy {one.label}", self.cluster, one) for one in contenders]
        changes += [
            Change(_plural(count, "worker"), replace(self.cluster, workers=count), today)
            for count in workers
            if count != self.cluster.workers
        ]
        for factor in kv_factors:
            tokens = max(MIN_KV_TOKENS, round(self.cluster.engine.kv_tokens * factor))
            engine = replace(self.cluster.engine, kv_tokens=tokens)
            changes.append(
                Change(f"caches × {factor:g} ({tokens:,} tokens)", replace(self.cluster, engine=engine), today)
            )
        for factor in offload_factors:
            tokens = round(self.cluster.engine.kv_tokens * factor)
            engine = replace(self.cluster.engine, offload_tokens=tokens)
            changes.append(
                Change(f"offload tier × {factor:g} ({tokens:,} tokens)", replace(self.cluster, engine=engine), today)
            )
        total = self.cluster.workers + self.cluster.prefill_workers
        for count in prefill_workers:
            if count >= total:
                raise ConfigError(f"there are {total} workers in all", field="--prefill-workers")
            split = replace(self.cluster, workers=total - count, prefill_workers=count)
            changes.append(Change(f"{count} prefill + {total - count} decode workers", split, today))
        return changes


def _cluster(
    recording: Recording,
    workload: Workload,
    workers: int | None,
    prefill_workers: int | None,
    kv_tokens: int | None,
) -> Cluster:
    prefill = [one for one in recording.workers if one.role == "prefill"]
    others = [one for one in recording.workers if one.role != "prefill"]
    ran = {(one.worker_id, one.dp_rank) for one in recording.requests if one.worker_id}
    if workers is None:
        workers = sum(one.dp_size for one in others) or len(ran)
    if prefill_workers is None:
        prefill_workers = sum(one.dp_size for one in prefill)
    sizes = [one.total_kv_blocks * one.block_size for one in others if one.total_kv_blocks]
    if kv_tokens is None:
        if not sizes:
            raise ConfigError("the workers were registered without total_kv_blocks: say it", field="--kv-tokens")
        kv_tokens = round(fmean(sizes))
    batched = [one.max_num_batched_tokens for one in others if one.max_num_batched_tokens]
    engine = EngineSettings(block_size=workload.block_size, kv_tokens=kv_tokens)
    if batched:
        engine = replace(engine, max_num_batched_tokens=round(fmean(batched)))
        engine = replace(engine, max_num_seqs=min(engine.max_num_seqs, engine.max_num_batched_tokens - 1))
    return Cluster(workers=max(1, workers), prefill_workers=prefill_workers, engine=engine)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cheapest(outcomes: Sequence[tuple[Change, Outcome]], share: float) -> Change | None:
    """Return the set-up with the fewest workers that keeps the target for a share of the requests; None = none does."""
    keeping = [change for change, outcome in outcomes if outcome.within_target >= share]
    return min(keeping, key=lambda change: change.cluster.workers + change.cluster.prefill_workers, default=None)
