"""Predictions from routing decisions: a worker will soon hold the blocks of a prompt that was routed to it.

Without events (`--no-kv-events`) this is all that is known of the workers; beside events (`--router-predicted-ttl`) it
bridges the time until the first Stored, so that prompts which belong together go together. An event that names a
predicted block ends its prediction; without one it ends with its time, which each further decision begins anew.

A prompt without hashes predicts nothing. It reports that a worker has served a request that should have brought events,
and is taken whether there are predictions or not. So is evidence about a cache (`cache_evidence`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_common.registry.registry import Registry
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_indexer.index.cache_evidence import CacheEvidence, Missed
from kvscout_indexer.index.pools import Pools

PREDICTIONS_OFF = "predictions are off: --no-kv-events or --router-predicted-ttl turns them on"
HASH_BYTES = 8
BLOCKS_PER_SLICE = 8192
"""Predicted between two iterations of the event loop: about a millisecond, so that queries go on."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt that was sent to a worker rank."""

    worker: WorkerRank
    block_hashes: bytes
    """Local hashes of its complete blocks, little-endian u64s; empty = it only reports that the worker served it."""
    block_size: int | None = None
    """None = whatever the worker's is."""
    eagle: bool | None = None
    """None = whatever the worker's are."""
    evidence: CacheEvidence | None = None
    """What its engine reported about its cache; None = it predicts."""


class Recorded(NamedTuple):
    """Result of recording routing decisions."""

    blocks: int
    """Predicted now and not before."""
    refused: tuple[int, ...]
    """Positions of the prompts that could not be recorded."""


class RoutedPrompts:
    """Predictions from decisions, in the indexes of all pools."""

    def __init__(
        self,
        registry: Registry,
        pools: Pools,
        *,
        ttl_seconds: float | None,
        served: Callable[[str, WorkerRank], object] = lambda tenant, rank: None,
        judge: Callable[[WorkerSpec, WorkerRank, Sequence[Missed]], object] = lambda spec, rank, evidence: None,
        shard: Shard = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Predict nothing yet.

        Args:
            registry: The workers.
            pools: Their indexes.
            ttl_seconds: How long a prediction lasts; None = prompts with hashes are refused.
            served: Called for each prompt without hashes: the tenant and the worker rank that served it.
            judge: Called with all evidence of one call about a worker rank.
            shard: The workers that are indexed here.
            clock: That of the indexes, in seconds.
        """
        self._registry = registry
        self._pools = pools
        self._ttl_seconds = ttl_seconds
        self._served = served
        self._judge = judge
        self._shard = shard
        self._clock = clock
        self.recorded = 0
        """Prompts since start."""
        self.refused = 0

    @property
    def predicts(self) -> bool:
        """Return whether prompts with hashes are recorded."""
        return self._ttl_seconds is not None

    async def record(self, tenant: str, model: str, prompts: Sequence[RoutedPrompt]) -> Recorded:
        """Predict the prompts' blocks on their workers, as far as possible, and report the workers that served.

        Raises:
            FailedPrecondition: Predictions are off and every prompt is one; or none could be recorded, the first
                one because of that, its blocks or its worker's shard.
            NotFound: None could be recorded, the first one because the model has no such worker rank.
        """
        ttl_seconds = self._ttl_seconds
        if ttl_seconds is None and all(prompt.block_hashes and prompt.evidence is None for prompt in prompts):
            raise FailedPrecondition(PREDICTIONS_OFF)
        added = blocks = 0
        refused: dict[int, KvscoutError] = {}
        evidence: dict[WorkerRank, tuple[WorkerSpec, list[Missed]]] = {}
        for position, prompt in enumerate(prompts):
            try:
                spec = self._worker(tenant, model, prompt)
            except (NotFound, FailedPrecondition) as error:
                refused[position] = error
                continue
            if prompt.evidence is not None:
                of_rank = evidence.setdefault(prompt.worker, (spec, []))[1]
                of_rank.append(Missed(prompt.block_hashes, prompt.evidence))
                continue
            if not prompt.block_hashes:
                self._served(tenant, prompt.worker)
                continue
            if ttl_seconds is None:
                refused[position] = FailedPrecondition(PREDICTIONS_OFF)
                continue
            added += self._pools.of(spec).predict(
                prompt.worker, prompt.block_hashes, ttl_seconds=ttl_seconds, now=self._clock()
            )
            blocks += len(prompt.block_hashes) // HASH_BYTES
            if blocks >= BLOCKS_PER_SLICE:
                blocks = 0
                await asyncio.sleep(0)
        for rank, (spec, of_rank) in evidence.items():
            self._judge(spec, rank, of_rank)
        self.recorded += len(prompts) - len(refused)
        self.refused += len(refused)
        if refused and len(refused) == len(prompts):
            raise refused[0]
        return Recorded(added, tuple(refused))

    def _worker(self, tenant: str, model: str, prompt: RoutedPrompt) -> WorkerSpec:
        worker_id, dp_rank = prompt.worker
        spec = self._registry.get(tenant, worker_id).spec
        if spec.model != model or prompt.worker not in spec.ranks:
            raise NotFound(f"model {model!r} has no worker {worker_id!r} with rank {dp_rank}")
        if not self._shard.has(tenant, worker_id):
            raise FailedPrecondition(f"worker {worker_id!r} is not of shard {self._shard}, which is indexed here")
        if prompt.block_size not in (None, spec.block_size) or prompt.eagle not in (None, spec.eagle):
            raise FailedPrecondition(
                f"the blocks of worker {worker_id!r} have {spec.block_size} tokens{' (eagle)' if spec.eagle else ''}, "
                f"those of the prompt {prompt.block_size or spec.block_size}{' (eagle)' if prompt.eagle else ''}"
            )
        return spec
