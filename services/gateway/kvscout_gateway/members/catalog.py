"""The registered workers as requests see them: by model, with what each model's workers have in common.

A view of a tenant is made when first used and dropped when one of its workers changes, so that a request costs
a few look-ups however many workers there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvscout_common.errors import InvalidArgument
from kvscout_common.rank_sets import RankSet, rank_set
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import SHARED_CACHE, SHARED_CACHE_BLOCKS, EngineKind, Role, WorkerRank, WorkerSpec
from kvscout_gateway.values.prompt import Geometry, geometries
from kvscout_gateway.values.request import Request

ROUTABLE_ENGINES = frozenset(
    {EngineKind.VLLM, EngineKind.MOCK, EngineKind.SGLANG, EngineKind.TRTLLM, EngineKind.OPENAI}
)
"""Engines whose HTTP API the gateway speaks; the others are for Route."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request means: a base model, and the adapter on it ("" = none)."""

    model: str
    lora_name: str


class Caches(NamedTuple):
    """Caches of several workers, in blocks."""

    workers: int
    blocks: int
    """Blocks that all ranks and the caches that they share keep; 0 = unknown."""
    smallest: int
    """Blocks that the smallest rank keeps; 0 = unknown."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The workers of one model."""

    specs: tuple[WorkerSpec, ...] = ()
    pools: tuple[Geometry, ...] = ()
    """The commonest first."""
    unroutable: tuple[str, ...] = ()
    """Ids of those that the gateway cannot run a request on: no HTTP endpoint, or an API it does not speak."""
    routable_roles: frozenset[Role] = frozenset()
    """Roles of the others."""
    longest_prompt: int | None = None
    """Tokens that the largest cache of a rank holds; None = some worker's size is unknown."""
    caches: Mapping[Geometry, Caches] = field(default_factory=dict)
    """Caches of the workers that compute prompts."""
    ranks: Mapping[Geometry, RankSet] = field(default_factory=dict)
    """Ranks of all workers."""
    target: Target | None = None
    """The model, without an adapter; None = nobody serves it."""


NOBODY = Serving()


@dataclass(frozen=True, slots=True)
class TenantView:
    """The workers of one tenant."""

    specs: Mapping[str, WorkerSpec]
    """By worker id."""
    models: Mapping[str, Serving]
    base_of: Mapping[str, str]
    """Base model of each adapter that a worker has loaded."""

    def resolve(self, model: str, lora_name: str) -> Target:
        """Return the model that a request's model name means: an adapter's name stands for its base model.

        Args:
            model: As the request names it.
            lora_name: As the request names it; "" = none.

        Raises:
            InvalidArgument: If `model` is empty, or names one adapter and `lora_name` another.
        """
        serving = self.models.get(model)
        if serving is not None and serving.target is not None and not lora_name:
            return serving.target
        if not model:
            raise InvalidArgument("must not be empty", field="model")
        base = self.base_of.get(model)
        if base is None or serving is not None:
            return Target(model, lora_name)
        if lora_name not in ("", model):
            raise InvalidArgument(f"{model!r} is an adapter itself", field="lora_name")
        return Target(base, model)

    def serving(self, model: str, lora_name: str = "") -> Serving:
        """Return the workers of a model, or of an adapter's base model; may be nobody. Raises as `resolve`."""
        return self.models.get(self.resolve(model, lora_name).model, NOBODY)


_EMPTY = TenantView(MappingProxyType({}), MappingProxyType({}), MappingProxyType({}))


class Catalog:
    """Views of the registry, one a tenant that has workers. A registry listener."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._views: dict[str, TenantView] = {}
        registry.listen(self)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Drop its tenant's view."""
        self._views.pop(spec.tenant, None)

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Drop its tenant's view."""
        self._views.pop(new.tenant, None)

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Drop its tenant's view."""
        self._views.pop(spec.tenant, None)

    def serves(self, tenant: str, model: str) -> bool:
        """Return whether a tenant has workers of a model now."""
        return model in self.tenant(tenant).models

    def serving(self, request: Request) -> Serving:
        """Return the workers of the model that a request names. Raises as `TenantView.resolve`."""
        view = self._views.get(request.tenant)
        serving = view.models.get(request.model) if view is not None and not request.lora_name else None
        if serving is not None and serving.target is not None:
            return serving  # what nearly every request names: the name of a model
        return self.tenant(request.tenant).serving(request.model, request.lora_name)

    def model_of(self, tenant: str, worker_id: str) -> str:
        """Return the model of a registered worker; "" for any other."""
        spec = self.spec_of(tenant, worker_id)
        return spec.model if spec is not None else ""

    def spec_of(self, tenant: str, worker_id: str) -> WorkerSpec | None:
        """Return a registered worker; None for any other."""
        return self.tenant(tenant).specs.get(worker_id)

    def tenant(self, tenant: str) -> TenantView:
        """Return the workers of a tenant now."""
        view = self._views.get(tenant)
        if view is None:
            specs = [entry.spec for entry in self._registry.entries(tenant)]
            if not specs:
                return _EMPTY  # not cached: clients may send any name
            view = self._views[tenant] = _view(specs)
        return view


def _is_routable(spec: WorkerSpec) -> bool:
    return bool(spec.http_endpoint) and spec.engine in ROUTABLE_ENGINES


def _caches(specs: Iterable[WorkerSpec]) -> dict[Geometry, Caches]:
    found: defaultdict[Geometry, list[WorkerSpec]] = defaultdict(list)
    for spec in specs:
        if spec.role is not Role.DECODE:
            found[Geometry(spec.block_size, spec.eagle)].append(spec)
    return {
        pool: Caches(
            len(members),
            sum(spec.kept_blocks * len(spec.ranks) for spec in members) + _shared_blocks(members),
            min(spec.kept_blocks for spec in members),
        )
        if all(spec.total_kv_blocks for spec in members)
        else Caches(len(members), 0, 0)
        for pool, members in found.items()
    }


def _shared_blocks(specs: Iterable[WorkerSpec]) -> int:
    """Return the blocks of the caches that workers share, each counted once, as far as registered."""
    rooms: dict[str, int] = {}
    for spec in specs:
        if name := spec.labels.get(SHARED_CACHE):
            rooms[name] = max(rooms.get(name, 0), int(spec.labels.get(SHARED_CACHE_BLOCKS, "0")))
    return sum(rooms.values())


def _ranks(specs: Iterable[WorkerSpec]) -> dict[Geometry, RankSet]:
    found: defaultdict[Geometry, list[WorkerRank]] = defaultdict(list)
    for spec in specs:
        found[Geometry(spec.block_size, spec.eagle)].extend(spec.ranks)
    return {pool: rank_set(ranks) for pool, ranks in found.items()}


def _view(specs: list[WorkerSpec]) -> TenantView:
    by_model: defaultdict[str, list[WorkerSpec]] = defaultdict(list)
    for spec in specs:
        by_model[spec.model].append(spec)
    return TenantView(
        specs={spec.worker_id: spec for spec in specs},
        models={
            model: Serving(
                specs=tuple(members),
                pools=geometries(members),
                unroutable=tuple(spec.worker_id for spec in members if not _is_routable(spec)),
                routable_roles=frozenset(spec.role for spec in members if _is_routable(spec)),
                longest_prompt=max(spec.total_kv_blocks * spec.block_size for spec in members)
                if all(spec.total_kv_blocks for spec in members)
                else None,
                caches=_caches(members),
                ranks=_ranks(members),
                target=Target(model, ""),
            )
            for model, members in by_model.items()
        },
        base_of={adapter.name: spec.model for spec in specs for adapter in spec.adapters},
    )
