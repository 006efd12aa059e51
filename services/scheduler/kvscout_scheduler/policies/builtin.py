"""The policies of this package; docs/policies.md has an example of each, which the tests run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from random import Random
from statistics import fmean, pstdev
from typing import ClassVar, Final

from kvscout_common.errors import InvalidArgument, ResourceExhausted
from kvscout_common.worker import DeviceClass, WorkerRank
from kvscout_scheduler.costs.choose import choose
from kvscout_scheduler.policies.policy import Candidates, Formula, Policy


class Kv(Policy):
    """The worker with the least work to do, its own and this request's.

    ::

        cost = overlap_score_weight · prefill_blocks + decode_blocks        (all of it: kvscout_scheduler.costs.cost)
    """

    formula = Formula.BLOCKS
    unit = "blocks"

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.kv_costs

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return (
            f"{candidates.prefill_blocks[index]:g} prefill and {candidates.decode_blocks[index]:g} decode blocks, "
            f"cost {costs[index]:g}"
        )


class KvLogit(Policy):
    """Cached share of the prompt against what the engines report of themselves.

    ::

        logit = 2 · overlap_tokens / isl − gpu_cache_usage − waiting / max_waiting          cost = −logit

    `gpu_cache_usage` and `waiting` are the engine's own (pushed or scraped); usage that was never reported is that of
    the booked blocks where `total_kv_blocks` is known, else 0, as is `waiting`. `max_waiting` is the largest of the
    candidates. Source: the first cost function of NVIDIA Dynamo's router.
    """

    def costs(self, candidates: Candidates) -> Sequence[float]:
        isl = candidates.request.isl_tokens
        waiting = [metrics.waiting_requests or 0 for metrics in candidates.metrics]
        most = max(waiting) or 1
        columns = zip(candidates.cached_tokens, candidates.kv_usage, waiting, strict=True)
        return [usage + queued / most - 2 * cached / isl for cached, usage, queued in columns]

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        cached, usage = _cached_share(candidates, index), candidates.kv_usage[index]
        return f"{cached:.0%} of the prompt cached, cache {usage:.0%} full, logit {-costs[index]:g}"


class KvBalance(Policy):
    """Cached prefixes while the loads are even, even loads while they are not.

    ::

        load(w) = kv_active / kv_total
        α       = 0.7 if std(load) > 0.1 · mean(load) else 0.3
        cost(w) = α · (load(w) − mean(load)) + (1 − α) · uncached(w) / isl + 0.1 · active_slots / total_slots

    `load` is the higher of what is booked and what the engine reports; it is 0 where neither is known. Workers whose
    slots are all taken are skipped; a worker that did not register `total_slots` has no such term. A booking counts as
    an active slot at once. Mean and std are over the candidates that are not full.
    """

    UNEVEN: Final = 0.1
    """Loads are uneven when their standard deviation is above this share of their mean."""
    ALPHA_UNEVEN: Final = 0.7
    ALPHA_EVEN: Final = 0.3
    SLOT_WEIGHT: Final = 0.1

    def costs(self, candidates: Candidates) -> Sequence[float]:
        isl, loads = candidates.request.isl_tokens, candidates.kv_usage
        slots = [
            active / spec.total_slots if spec.total_slots else 0.0
            for active, spec in zip(candidates.active_requests, candidates.specs, strict=True)
        ]
        open_loads = [load for load, taken in zip(loads, slots, strict=True) if taken < 1]
        if not open_loads:
            return [inf] * len(loads)
        mean = fmean(open_loads)
        alpha = self.ALPHA_UNEVEN if pstdev(open_loads, mean) > self.UNEVEN * mean else self.ALPHA_EVEN
        return [
            alpha * (load - mean) + (1 - alpha) * max(0.0, 1 - cached / isl) + self.SLOT_WEIGHT * taken
            if taken < 1
            else inf
            for load, cached, taken in zip(loads, candidates.cached_tokens, slots, strict=True)
        ]

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if min(costs) == inf:
            raise ResourceExhausted(f"all slots of {len(costs)} workers that could take the request are taken")
        return super().pick(candidates, costs, rng)

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        cached, load = _cached_share(candidates, index), candidates.kv_usage[index]
        return f"{cached:.0%} of the prompt cached, KV load {load:.0%}, cost {costs[index]:g}"


class LMetric(Policy):
    """The prefill work in front of a request times the requests it shares the engine with.

    ::

        cost = prefill_blocks · (active_requests + 1)

    `prefill_blocks` are the uncached blocks of the active requests and of this one. A product needs no weight between
    the two: whatever the scale of either, doubling one counts as much as doubling the other.
    """

    unit = "blocks × requests"

    def costs(self, candidates: Candidates) -> Sequence[float]:
        columns = zip(candidates.prefill_blocks, candidates.active_requests, strict=True)
        return [blocks * (requests + 1) for blocks, requests in columns]

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        blocks, requests = candidates.prefill_blocks[index], candidates.active_requests[index]
        return f"{blocks:g} prefill blocks times {requests + 1} requests, cost {costs[index]:g}"


class LeastLoaded(Policy):
    """The worker with the fewest active requests, ties uniformly at random; caches do not matter, nor temperatures."""

    unit: ClassVar[str | None] = "active requests"

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.active_requests

    def temperature(self, candidates: Candidates) -> float:
        return 0.0

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"fewest active requests: {costs[index]:g}"


class PowerOfTwo(LeastLoaded):
    """Two different workers drawn uniformly, the one with fewer active requests takes the request.

    It needs no look at all workers and does not herd: of those with the least load not everyone picks the same. Source:
    M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996.
    """

    unit = None

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if len(costs) == 1:
            return 0
        first, second = rng.sample(range(len(costs)), 2)
        return second if costs[second] < costs[first] else first

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """Return each of the n(n−1)/2 pairs is equally likely; a tie goes to either."""
        n = len(costs)
        if n == 1:
            return [1.0]
        wins = (
            sum(1.0 if cost < other else 0.5 if cost == other else 0.0 for at, other in enumerate(costs) if at != own)
            for own, cost in enumerate(costs)
        )
        return [won / (n * (n - 1) / 2) for won in wins]

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"{costs[index]:g} active requests, no more than the other of two drawn"


class DeviceAwareWeighted(LeastLoaded):
    """CPU and accelerator workers side by side, each kind loaded in proportion to its strength.

    ::

        normalized_load(group) = inflight(group) / (workers(group) · weight)
        weight = 1 for cpu, cpu_to_gpu_ratio for everything else

    The group with the lower normalized load wins (the accelerators, if both are equal), and in it the worker with the
    fewest active requests, ties uniformly at random. With one group only it is `least-loaded`. The ratio is how many
    requests an accelerator carries in the time of one CPU worker (--cpu-to-gpu-ratio). Source: NVIDIA Dynamo.
    """

    unit = None

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        members = min(_device_groups(candidates), key=lambda group: _normalized_load(group, candidates, costs))
        return members[choose([costs[index] for index in members], 0.0, rng)]

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        group = next(group for group in _device_groups(candidates) if index in group)
        kind = candidates.specs[index].device_class
        load = _normalized_load(group, candidates, costs)
        return f"{kind} workers have the lower normalized load, {load:g}; fewest active requests: {costs[index]:g}"


class Direct(LeastLoaded):
    """The worker that the request names, of its ranks the one with the fewest active requests; the caller has decided.

    A request that pins no worker is refused.
    """

    unit = None

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if not candidates.request.constraints.pinned_worker_id:
            raise InvalidArgument("policy direct requires it", field="pinned_worker_id")
        return super().pick(candidates, costs, rng)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return "the request names it"


class UniformRandom(Policy):
    """Any eligible worker, all equally likely."""

    unit = None

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return rng.randrange(len(costs))

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [1.0 / len(costs)] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"drawn uniformly among {len(costs)} workers"


class RoundRobin(Policy):
    """Round-robin over the eligible workers of a pool, in the order of (worker_id, dp_rank).

    ::

        next = the first eligible rank after the last one chosen, the first of all if there is none

    The last rank is remembered by name, so that workers that come, go or are skipped do not disturb the order of
    others. Queries have a position of their own: a client that queries before it books must not meet the same worker
    each time.
    """

    unit = None

    def __init__(self) -> None:
        self._last: dict[bool, WorkerRank] = {}

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def temperature(self, candidates: Candidates) -> float:
        return 0.0

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        ranks, books = candidates.ranks, candidates.books
        last = self._last.get(books)
        index = bisect_right(ranks, last) % len(ranks) if last is not None else 0
        self._last[books] = ranks[index]
        return index

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"its turn among {len(costs)} workers"


def _cached_share(candidates: Candidates, index: int) -> float:
    return candidates.cached_tokens[index] / candidates.request.isl_tokens


def _device_groups(candidates: Candidates) -> list[list[int]]:
    """Return indices of the accelerators, then of the CPUs; a group without members is left out."""
    cpus: list[int] = []
    others: list[int] = []
    for index, spec in enumerate(candidates.specs):
        (cpus if spec.device_class is DeviceClass.CPU else others).append(index)
    return [group for group in (others, cpus) if group]


def _normalized_load(group: Sequence[int], candidates: Candidates, costs: Sequence[float]) -> float:
    """Return active requests of a group of one kind, at least one, for each unit of its strength."""
    cpu = candidates.specs[group[0]].device_class is DeviceClass.CPU
    weight = 1.0 if cpu else candidates.settings.cpu_to_gpu_ratio
    return sum(costs[index] for index in group) / (len(group) * weight)


BUILTIN: Final[dict[str, type[Policy]]] = {
    "device-aware-weighted": DeviceAwareWeighted,
    "direct": Direct,
    "kv": Kv,
    "kv-balance": KvBalance,
    "kv-logit": KvLogit,
    "least-loaded": LeastLoaded,
    "lmetric": LMetric,
    "power-of-two": PowerOfTwo,
    "random": UniformRandom,
    "round-robin": RoundRobin,
}
