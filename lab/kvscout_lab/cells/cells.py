"""Cells: one workload on one cluster at one rate, under several policies; and the rate at which `kv` saturates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_common.known_names import nearest
from kvscout_lab.cells.bound import Bound, lower_bound
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.measures import Measures, Objective, measure
from kvscout_lab.cells.pooled_bound import PooledBound
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.simulation import Simulation
from kvscout_lab.workloads.workload import Burst, Workload, at_rate, in_bursts, led
from kvscout_scheduler.policies import PolicyRegistry
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.targets import NO_TARGETS

SATURATED = 5.0
"""Mean time to first token of a saturated cluster, in multiples of its lower bound."""
PRECISION = 1.03
"""Precision of the rate at which it is."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its parameters."""

    label: str
    settings: SchedulerSettings

    @classmethod
    def parse(cls, text: str, policies: PolicyRegistry) -> Contender:
        """`NAME` or `NAME:setting=value,…`, where settings are those of the scheduler, and `ttft_target_ms` and
        `itl_target_ms`.

        Raises:
            ConfigError: A setting is unknown or out of range.
            InvalidArgument: The policy is unknown.
        """
        name, _, rest = text.partition(":")
        policies.check(name)
        defaults = {field.name: getattr(SchedulerSettings(), field.name) for field in fields(SchedulerSettings)}
        known = [name for name, default in defaults.items() if isinstance(default, int | float | bool | None)]
        changes: dict[str, Any] = {"policy": name}
        targets = NO_TARGETS
        for assignment in filter(None, rest.split(",")):
            key, equals, value = assignment.partition("=")
            if equals and key in ("ttft_target_ms", "itl_target_ms"):
                seconds = _number(key, value, 0.0) / 1000
                targets = targets._replace(**{key.replace("_target_ms", "_seconds"): seconds})
                changes["targets"] = targets
                continue
            if not equals or key not in known:
                meant = nearest(key, known)
                problem = f"{assignment!r} is not a scheduler setting of the form NAME=NUMBER"
                hint = f"; did you mean {meant}?" if meant and meant != key else ";"
                raise ConfigError(f"{problem}{hint} Settings: {', '.join(sorted(known))}", field="policy")
            changes[key] = _number(key, value, defaults[key])
        return cls(text, SchedulerSettings(**changes).validate())


class Result(NamedTuple):
    """One policy in one cell."""

    label: str
    measures: Measures


class Cell(NamedTuple):
    """One workload on one cluster at one rate."""

    workload: str
    workers: int
    prefill_workers: int
    kv_tokens: int
    rate: float
    """Flows a second."""
    load: float | None
    """Share of the rate at which `kv` saturates; None = the rate was given."""
    results: tuple[Result, ...]
    replicas: int = 1
    """Replicas of the scheduler."""
    sync_ms: float = 0.0
    """Delay between them, in milliseconds."""


class Experiment:
    """Runs policies on a workload.

    Args:
        workload: Requests and their times.
        cluster: Workers, schedulers and latencies.
        objective: Objective of served requests.
        burst: Bursts of the flows; None = as they come.
        lead_seconds: So long before the others comes the first one.
        on_run: Called with a text before each run.
        on_done: Called with the number of requests ended in this run, while it runs.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        objective: Objective = Objective(),
        burst: Burst | None = None,
        lead_seconds: float = 0.0,
        on_run: Callable[[str], None] = lambda _: None,
        on_done: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._burst = burst
        self._lead_seconds = lead_seconds
        self._workload = workload
        self._cluster = cluster.validate()
        self.objective = objective.validate()
        self._on_run = on_run
        self._on_done = on_done
        self._turns = [len(flow.turns) for flow in workload.flows]
        self._bound: Bound = lower_bound(workload, cluster)
        self._pooled = PooledBound(workload, cluster)
        self._policies = lab_policies()

    def run(self, settings: SchedulerSettings, rate: float) -> Measures:
        """One policy at one rate.

        Args:
            settings: Settings of the schedulers.
            rate: Flows a second.
        """
        workload = at_rate(self._workload, rate)
        if self._burst is not None:
            workload = in_bursts(workload, self._burst)
        workload = led(workload, self._lead_seconds)
        simulation = Simulation(workload, self._cluster, settings, self._policies, on_done=self._on_done)
        run = simulation.run()
        simulation.check_idle()
        return measure(run, self._bound, self._pooled, self._turns, self.objective)

    def cell(self, contenders: Sequence[Contender], rate: float, load: float | None = None) -> Cell:
        """Run every policy at one rate.

        Args:
            contenders: The policies.
            rate: Flows a second.
            load: Share of the saturated rate, for the record.
        """
        results = []
        for contender in contenders:
            self._on_run(contender.label)
            results.append(Result(contender.label, self.run(contender.settings, rate)))
        cluster = self._cluster
        return Cell(
            self._workload.name,
            cluster.workers,
            cluster.prefill_workers,
            cluster.engine.kv_tokens,
            rate,
            load,
            tuple(results),
            cluster.replicas,
            cluster.latencies.sync_ms,
        )

    def saturation(self, settings: SchedulerSettings | None = None) -> float:
        """Return the flows a second at which a policy (`kv`) makes requests wait `SATURATED` times their bound.

        Raises:
            ConfigError: There are too few requests for that, even if all come within a second.
        """
        settings = SchedulerSettings(policy="kv") if settings is None else settings
        factor, tried = 2.0, self._guess()
        low = high = 0.0
        while not (low and high):
            if low > len(self._turns):
                raise ConfigError(f"are too few to saturate it: {sum(self._turns)}", field="requests")
            self._on_run(f"where it saturates: {tried:.3g}/s")
            measures = self.run(settings, tried)
            if measures.ttft.mean > SATURATED * measures.bound_ttft_mean:
                high = tried
            else:
                low = tried
            tried = tried * factor if not high else tried / factor
        while high / low > PRECISION:
            tried = (low * high) ** 0.5
            self._on_run(f"where it saturates: {tried:.3g}/s")
            measures = self.run(settings, tried)
            if measures.ttft.mean > SATURATED * measures.bound_ttft_mean:
                high = tried
            else:
                low = tried
        return low

    def _guess(self) -> float:
        """Return a rate to begin with: as if prompts were half cached and all else were free."""
        flow = sum(turn.prompt_tokens for each in self._workload.flows for turn in each.turns) / len(self._turns)
        seconds = flow * self._cluster.engine.step.prefill_us_per_token / 2e6
        return self._cluster.workers / max(seconds, 1e-3)


def cells(
    make: Callable[[], Workload],
    *,
    clusters: Sequence[Cluster],
    contenders: Sequence[Contender],
    rates: Sequence[float],
    loads: Sequence[float],
    experiment: Callable[[Workload, Cluster], Experiment],
) -> Iterator[Cell]:
    """Run every cluster at every rate and load.

    Args:
        make: The workload.
        clusters: Clusters to compare.
        contenders: The policies.
        rates: Flows a second.
        loads: Shares of the rate at which `kv` saturates.
        experiment: Makes the experiment of a workload on a cluster.
    """
    workload = make()
    for cluster in clusters:
        cluster = replace(cluster, engine=replace(cluster.engine, block_size=workload.block_size))
        runner = experiment(workload, cluster)
        for rate in rates:
            yield runner.cell(contenders, rate)
        if loads:
            saturated = runner.saturation()
            for load in loads:
                yield runner.cell(contenders, load * saturated, load)


def cells_by_seed(
    make: Callable[[int], Workload],
    seeds: Sequence[int],
    *,
    clusters: Sequence[Cluster],
    contenders: Sequence[Contender],
    rates: Sequence[float],
    loads: Sequence[float],
    experiment: Callable[[Workload, Cluster], Experiment],
) -> Iterator[list[Cell]]:
    """Run every cluster at every rate and load, with each of some seeds; the first finds where `kv` saturates.

    Args:
        make: The workload of a seed.
        seeds: At least one.
        clusters: Clusters to compare.
        contenders: The policies.
        rates: Flows a second.
        loads: Shares of the rate at which `kv` saturates.
        experiment: Makes the experiment of a workload on a cluster.
    """
    first, *others = seeds
    for cluster in clusters:
        one = [replace(cluster, seed=first)]
        workload = partial(make, first)
        found = list(
            cells(workload, clusters=one, contenders=contenders, rates=rates, loads=loads, experiment=experiment)
        )
        groups = [[cell] for cell in found]
        for seed in others:
            again = cells(
                partial(make, seed),
                clusters=[replace(cluster, seed=seed)],
                contenders=contenders,
                rates=[cell.rate for cell in found],
                loads=(),
                experiment=experiment,
            )
            for group, cell in zip(groups, again, strict=True):
                group.append(cell)
        yield from groups


def _number(name: str, text: str, default: object) -> float | int | bool:
    try:
        if isinstance(default, bool):
            return bool(int(text))
        if isinstance(default, int):
            return int(text)
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not a number", field="policy") from error
