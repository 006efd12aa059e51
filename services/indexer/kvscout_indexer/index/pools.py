"""The block indexes of an indexer, one a pool (model, tenant, block size, EAGLE), and who is in them."""

from __future__ import annotations

from collections.abc import Callable

from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.native import NativeQueries
from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.known_names import or_known
from kvscout_common.worker import ALL_TENANTS, PoolKey, WorkerRank, WorkerSpec


class Pools:
    """Indexes by pool; each exists while a worker of its pool is registered.

    Args:
        make_index: Makes an empty index.
        queries: Called for every index and of incomplete histories; None = the extension is not there.
    """

    def __init__(self, make_index: Callable[[PoolKey], BlockIndex], queries: NativeQueries | None = None) -> None:
        self._make_index = make_index
        self._queries = queries
        self._indexes: dict[PoolKey, BlockIndex] = {}
        self._workers: dict[PoolKey, set[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        """(tenant, model) of every worker that was ever registered."""
        self._incomplete: dict[PoolKey, set[WorkerRank]] = {}
        self._capacity: dict[PoolKey, dict[str, int]] = {}
        """Blocks that each worker keeps, as registered, of those whose blocks are indexed."""

    def add(self, spec: WorkerSpec, *, indexed: bool = True) -> BlockIndex:
        """Make a worker's ranks known to its index, or give them new options.

        Args:
            spec: The worker.
            indexed: False = another indexer has its blocks; the index exists all the same, and finds nothing of it.
        """
        self._seen.add((spec.tenant, spec.model))
        index = self._indexes.get(spec.pool)
        if index is None:
            index = self._indexes[spec.pool] = self._make_index(spec.pool)
            if self._queries is not None:
                self._queries.set_pool(spec.pool, index)
        self._workers.setdefault(spec.pool, set()).add(spec.worker_id)
        if indexed:
            self._capacity.setdefault(spec.pool, {})[spec.worker_id] = spec.kept_blocks * len(spec.ranks)
            for rank in spec.ranks:
                index.add_worker(rank, WorkerOptions.of(spec))
        return index

    def remove(self, spec: WorkerSpec) -> None:
        """Drop a worker with all its ranks, and its index if it was the last one."""
        index = self._indexes[spec.pool]
        for rank in spec.ranks:
            index.remove_rank(rank)
        members = self._workers[spec.pool]
        members.discard(spec.worker_id)
        self._capacity.get(spec.pool, {}).pop(spec.worker_id, None)
        if not members:
            del self._workers[spec.pool], self._indexes[spec.pool]
            self._incomplete.pop(spec.pool, None)
            self._capacity.pop(spec.pool, None)
            if self._queries is not None:
                self._queries.remove_pool(spec.pool)

    def capacity(self, pool: PoolKey) -> int:
        """Return the blocks that a pool's indexed workers keep together, as far as registered."""
        return sum(self._capacity.get(pool, {}).values())

    def incomplete(self, pool: PoolKey) -> frozenset[WorkerRank]:
        """Return the ranks of a pool that may hold more than is known: incomplete history, or blocks beyond a limit."""
        index = self._indexes.get(pool)
        limited = index.incomplete() if index is not None else frozenset()
        return limited.union(self._incomplete.get(pool, ()))

    def set_incomplete(self, pool: PoolKey, rank: WorkerRank, incomplete: bool) -> None:
        """Set whether the history of a rank is incomplete."""
        ranks = self._incomplete.setdefault(pool, set())
        (ranks.add if incomplete else ranks.discard)(rank)
        if not ranks:
            del self._incomplete[pool]
        if self._queries is not None:
            self._queries.set_incomplete(pool, rank, incomplete)

    def drop_rank(self, spec: WorkerSpec, rank: WorkerRank) -> None:
        """Drop a rank that a worker no longer has."""
        self._indexes[spec.pool].remove_rank(rank)

    def by_key(self) -> list[tuple[PoolKey, BlockIndex]]:
        """Return every index, in order of its key."""
        return sorted(self._indexes.items(), key=lambda item: item[0])

    def get(self, pool: PoolKey) -> BlockIndex | None:
        """Return the index of a pool; None if it has no worker."""
        return self._indexes.get(pool)

    def of(self, spec: WorkerSpec) -> BlockIndex:
        """Return the index of a registered worker."""
        return self._indexes[spec.pool]

    def require_model(self, tenant: str, model: str) -> None:
        """Refuse a model that was never seen; "" is no model, tenant "*" is any.

        Raises:
            NotFound: If no worker of it was ever registered in this tenant.
        """
        if not model or (tenant, model) in self._seen:
            return
        if tenant != ALL_TENANTS or all(seen != model for _, seen in self._seen):
            known = or_known(model, (name for owner, name in self._seen if tenant in (ALL_TENANTS, owner)))
            raise NotFound(f"no worker of model {model!r} was ever registered in tenant {tenant!r}{known}")

    def find(
        self, tenant: str, model: str, block_size: int | None, eagle: bool | None
    ) -> tuple[PoolKey, BlockIndex] | None:
        """Return the index that a query means.

        Args:
            tenant: Tenant.
            model: Model.
            block_size: None = the only one that the model's workers have.
            eagle: None = the only kind that the model's workers have.

        Returns:
            None if the model was seen but has no worker now: nothing matches.

        Raises:
            InvalidArgument: If `model` is empty or `block_size` is 0.
            NotFound: If the model was never seen.
            FailedPrecondition: If the model's workers have another block size, or several and none is named.
        """
        if not model:
            raise InvalidArgument("must not be empty", field="model")
        if block_size == 0:
            raise InvalidArgument("must be at least 1 token", field="block_size")
        self.require_model(tenant, model)
        candidates = [key for key in self._indexes if (key.tenant, key.model) == (tenant, model)]
        if not candidates:
            return None
        fitting = [key for key in candidates if block_size in (None, key.block_size) and eagle in (None, key.eagle)]
        if len(fitting) == 1:
            return fitting[0], self._indexes[fitting[0]]
        sizes = ", ".join(f"{key.block_size}{' (eagle)' if key.eagle else ''}" for key in sorted(candidates))
        if fitting:
            raise FailedPrecondition(f"the model's workers have several block sizes, name one: {sizes}")
        requested = f"{block_size or 'any'}{' (eagle)' if eagle else ''}"
        raise FailedPrecondition(f"block size {requested} was requested, the model's workers have {sizes}")
