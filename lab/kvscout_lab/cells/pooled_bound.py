"""Lower bound of a run that queues: no policy could have served the requests sooner, at the times at which they came.

It counts three things that `bound` leaves out of a mean TTFT: that workers compute one token at a time, that all of
them together have so much speed and no more, and that prompts share it.

**Work.** Order the requests by the time at which their clients sent them. A request *owns* the blocks of its prompt
that no earlier one has in prompt or output, and the rest of its prompt behind the last cacheable block. With any
policy, and with whatever caches, all that a request owns is computed after it was sent and before its first token: by
itself, or by one that came later and was sooner. A token costs a worker at least ::

    prefill_token + pair · its position + (base + host) / tokens of a step                  of the step's sum
    max(prefill_token, base / tokens of a step) + pair · its position + host / tokens …     weights are read meanwhile

and the last one of a prompt may cost `request` instead of `prefill_token`. Let p be the work that a request owns, in
seconds of a worker as fast as the settings say. Of workers that are faster or slower, v is the largest factor of any of
these costs. V = Σ v.

**Relaxation.** Read a run as a schedule of jobs: job j has work p, is released when its request reaches a worker, at r,
and gets what is computed of its own. All together get at most V at any time, one of them at most max v unless several
workers compute its blocks at once, which are then computed twice and count once. Job j is complete, at C, no later than
the first token. So Σ (first token − sent) ≥ min Σ C − Σ sent over all such schedules. Three bounds of Σ C follow:

* alone: C ≥ r + what its prompt takes on the fastest worker with an engine to itself (`Rates.alone`);
* SRPT: on one machine of speed V, taking what has the shortest remaining work first minimises Σ C (Schrage, 1968);
* mean busy times: M = ∫ t · (its speed at t) dt / p. No job is faster than max v, so C ≥ M + p / (2 · max v). On one
  machine of speed V, Σ M is least if what has the least p runs first, preempting (Goemans, 1997: Σ M is linear in the
  speeds, with weight 1 / p for job j at every t).

**Parts.** Dropping jobs delays nobody, so each of the three also holds for any part of the jobs, and a sum over parts
may take the largest of the three in each. Parts are the busy periods of the machine of speed V.

What it leaves out: output tokens take time of the same workers, caches forget, a request waits for the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.records import Record
from kvscout_lab.simulation.timing import PICOSECONDS, Rates, picoseconds
from kvscout_lab.workloads.workload import Workload


class Job(NamedTuple):
    """What a request owns."""

    released: float
    """When it reaches a worker; all times are picoseconds."""
    work: float
    """Of a worker of speed 1; above 0."""
    alone: float
    """What it takes on the fastest worker with an engine to itself."""


class PooledBound:
    """Bounds runs of one workload on one cluster.

    Args:
        workload: Requests.
        cluster: Workers and latencies.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self._flows = workload.flows
        self._size = workload.block_size
        engine = cluster.engine
        self._budget = engine.max_num_batched_tokens
        self._route = picoseconds(cluster.latencies.route_ms / 1000)
        # Where prompts are computed apart, workers that decode compute none before a first token.
        first = cluster.workers if cluster.prefill_workers else 0
        speeds = [cluster.speeds_of(number) for number in range(first, cluster.workers + cluster.prefill_workers)]
        self._costs = _Costs.of(engine.step.rates(), self._budget)
        factors = [self._costs.factor(_Costs.of(engine.step.rates(*speed), self._budget)) for speed in speeds]
        self._fastest, self._together = max(factors), sum(factors)
        self._alone = engine.step.rates(max(prefill for prefill, _ in speeds), max(decode for _, decode in speeds))

    def mean_ttft(self, records: Sequence[Record], counted: Sequence[Record]) -> float:
        """Return the least mean TTFT of some requests of a run, in seconds.

        Args:
            records: All requests of the run.
            counted: Those to bound, all of them served.
        """
        if not counted:
            return 0.0
        wanted = {(record.flow, record.turn) for record in counted}
        jobs = [job for key, job in self._jobs(records) if key in wanted]
        completed = sum(
            max(
                sum(job.released + job.alone for job in part),
                sum(_shortest_remaining(part, self._together)),
                sum(
                    busy + job.work / (2 * self._fastest)
                    for busy, job in zip(_mean_busy(part, self._together), part, strict=True)
                ),
            )
            for part in _busy_periods(jobs, self._together)
        )
        return (completed - sum(record.arrived for record in counted)) / len(counted) / PICOSECONDS

    def _jobs(self, records: Sequence[Record]) -> Iterator[tuple[tuple[int, int], Job]]:
        """Yield the jobs in order of release, with flow and turn."""
        seen: set[int] = set()
        for record in sorted(records, key=lambda record: record.sent):
            turn = self._flows[record.flow].turns[record.turn]
            hit = 0
            for node in turn.nodes[: (turn.prompt_tokens - 1) // self._size]:
                if node not in seen:
                    break
                hit += 1
            seen.update(turn.nodes)
            before = hit * self._size
            tokens = turn.prompt_tokens - before
            # A retry may find what the first try computed.
            retried = record.arrived != record.sent
            alone = 0 if retried else self._alone.alone(before, tokens, self._budget)
            key = (record.flow, record.turn)
            yield key, Job(record.sent + self._route, self._costs.work(before, tokens), alone)


class _Costs(NamedTuple):
    """The least that tokens cost a worker, in picoseconds."""

    token: float
    last: float
    """Of the last token of a prompt."""
    pair: float

    @classmethod
    def of(cls, rates: Rates, budget: int) -> _Costs:
        """Return those of a worker whose steps have at most `budget` tokens."""
        if rates.overlapped:
            token = last = max(rates.prefill_token, rates.base / budget) + rates.host / budget
        else:
            step = (rates.base + rates.host) / budget
            token, last = rates.prefill_token + step, min(rates.prefill_token, rates.request) + step
        return cls(token, last, rates.pair)

    def factor(self, other: _Costs) -> float:
        """Return the largest factor by which another worker is faster."""
        return max(own / theirs for own, theirs in zip(self, other, strict=True) if theirs)

    def work(self, before: int, tokens: int) -> float:
        """Return the work of the tokens of a prompt behind `before` others."""
        pairs = tokens * before + tokens * (tokens + 1) // 2
        return self.token * (tokens - 1) + self.last + self.pair * pairs


def _busy_periods(jobs: Sequence[Job], speed: float) -> Iterator[list[Job]]:
    """Yield the jobs of each time in which one machine is never idle; they come in order of release."""
    part: list[Job] = []
    end = 0.0
    for job in jobs:
        if part and job.released >= end:
            yield part
            part = []
        end = max(end, job.released) + job.work / speed
        part.append(job)
    if part:
        yield part


def _shortest_remaining(jobs: Sequence[Job], speed: float) -> list[float]:
    """Return completion times on one machine that takes the shortest remaining work first, preempting."""
    completed: list[float] = []
    waiting: list[float] = []
    now = jobs[0].released
    for job in jobs:
        until = job.released
        while waiting and now < until:
            left = heappop(waiting)
            took = left / speed
            if now + took <= until:
                now += took
                completed.append(now)
            else:
                heappush(waiting, left - (until - now) * speed)
                now = until
        now = max(now, until)
        heappush(waiting, job.work)
    while waiting:
        now += heappop(waiting) / speed
        completed.append(now)
    return completed


def _mean_busy(jobs: Sequence[Job], speed: float) -> list[float]:
    """Return mean busy times on one machine that takes the least work first, preempting, in the order of the jobs."""
    busy = [0.0] * len(jobs)
    waiting: list[tuple[float, int, float]] = []
    """Work of a job, its number, what is left of it."""
    now = jobs[0].released

    def run(until: float) -> float:
        at = now
        while waiting and at < until:
            work, number, left = heappop(waiting)
            took = min(left / speed, until - at)
            busy[number] += (at + took / 2) * (took * speed / work)
            at += took
            if took < left / speed:
                heappush(waiting, (work, number, left - took * speed))
        return at

    for number, job in enumerate(jobs):
        now = max(run(job.released), job.released)
        heappush(waiting, (job.work, number, job.work))
    run(float("inf"))
    return busy
