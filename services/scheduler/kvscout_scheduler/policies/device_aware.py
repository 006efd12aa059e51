"""`device-aware-weighted`: CPU and accelerator workers side by side, each kind loaded in proportion to its strength.

::

    normalized_load(group) = inflight(group) / (workers(group) · weight)
    weight = 1 for cpu, cpu_to_gpu_ratio for everything else

The group with the lower normalized load wins (the accelerators, if both are equal), and in it the worker with the
fewest active requests, ties uniformly at random. With one group only it is `least-loaded`. The ratio is how many
requests an accelerator carries in the time of one CPU worker (--cpu-to-gpu-ratio).

Source: NVIDIA Dynamo's device-aware policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_common.worker import DeviceClass
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.choose import choose


class DeviceAwareWeighted:
    """The group that is idler for its strength, then its least loaded worker."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.active_requests

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        members = min(_groups(candidates), key=lambda group: normalized_load(group, candidates, costs))
        return members[choose([costs[index] for index in members], 0.0, rng)]

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        group = next(group for group in _groups(candidates) if index in group)
        kind = candidates.specs[index].device_class
        load = normalized_load(group, candidates, costs)
        return f"{kind} workers have the lower normalized load, {load:g}; fewest active requests: {costs[index]:g}"


def _groups(candidates: Candidates) -> list[list[int]]:
    """Indices of the accelerators, then of the CPUs; a group without members is left out."""
    cpus: list[int] = []
    others: list[int] = []
    for index, spec in enumerate(candidates.specs):
        (cpus if spec.device_class is DeviceClass.CPU else others).append(index)
    return [group for group in (others, cpus) if group]


def normalized_load(group: Sequence[int], candidates: Candidates, costs: Sequence[float]) -> float:
    """Active requests of a group for each unit of its strength.

    Args:
        group: Indices of its candidates, all of one kind; at least one.
        candidates: All candidates.
        costs: Active requests of each candidate.
    """
    cpu = candidates.specs[group[0]].device_class is DeviceClass.CPU
    weight = 1.0 if cpu else candidates.settings.cpu_to_gpu_ratio
    return sum(costs[index] for index in group) / (len(group) * weight)
