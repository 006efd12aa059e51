"""Objectives of a Kubernetes cluster: the InferenceObjectives of the InferencePools whose pods are workers.

Of two with one name, that of the pool selected first counts, and llm-d's before that of the Gateway API. A cluster need
not have either kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvscout_common.kubernetes.access import KubernetesAccess, find_access
from kvscout_common.kubernetes.listing import ListWatch, api_session
from kvscout_common.kubernetes.objects import InferenceObjective
from kvscout_common.registry.pod_selection import Selection
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.objectives import Objective

COLLECTIONS: Final = tuple(
    f"/apis/{group}/v1alpha2/namespaces/{{}}/inferenceobjectives"
    for group in ("llm-d.ai", "inference.networking.x-k8s.io")
)
"""In the order in which they count."""


class _Pool(NamedTuple):
    """A selected pool."""

    namespace: str
    name: str


class KubernetesObjectives:
    """Follows the objectives of the selected pools. `run` is a task of the process.

    Args:
        selections: As `Selection.parse` reads them; those by labels have no objectives.
        kubeconfig: How the API is reached; None = as a pod does, or kubectl.
        access: How it is reached; None = by `kubeconfig`.

    Raises:
        ConfigError: A selection is wrong, or there is no way to the API.
    """

    def __init__(
        self, selections: Sequence[str], kubeconfig: Path | None = None, *, access: KubernetesAccess | None = None
    ) -> None:
        access = access or find_access(kubeconfig)
        parsed = [Selection.parse(text) for text in selections]
        self._pools = [_Pool(one.namespace or access.namespace, one.pool) for one in parsed if one.pool]
        self._followed = {
            namespace: [
                ListWatch(access, path.format(namespace), {}, InferenceObjective.read, self._changed, optional=True)
                for path in COLLECTIONS
            ]
            for namespace in dict.fromkeys(pool.namespace for pool in self._pools)
        }
        self.objectives: dict[str, Objective] = {}
        """By name; of now."""

    async def run(self) -> None:
        """Follow the objectives for ever."""
        async with api_session() as http, asyncio.TaskGroup() as tasks:
            for namespace, followed in self._followed.items():
                for each in followed:
                    tasks.create_task(each.run(http), name=f"objectives of {namespace}")

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, one sentence each."""
        found = []
        for namespace, followed in self._followed.items():
            for each in followed:
                if each.problem:
                    found.append(
                        f"InferenceObjectives of namespace {namespace!r} are not followed, what is known stays "
                        f"({len(each.objects)}): {each.problem}"
                    )
                if each.unreadable:
                    found.append(f"InferenceObjective of namespace {namespace!r}: {each.unreadable}")
        return [TenantWarning(ALL_TENANTS, text) for text in found]

    def _changed(self, _: Collection[str]) -> None:
        self.objectives.clear()
        for namespace, pool in self._pools:
            for each in self._followed[namespace]:
                for one in each.objects.values():
                    if one.pool == pool:
                        self.objectives.setdefault(one.name, Objective(one.priority))
