"""The workers that can take each other's requests, as columns by slot, and what is known of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.active_load import NO_LIMIT, Allocation, Limits
from kvscout_scheduler.cost import Lane
from kvscout_scheduler.engine_metrics import NO_METRICS, EngineMetrics
from kvscout_scheduler.native_load import make_load
from kvscout_scheduler.request import EMPTY_PROMPT, PoolId, Prompt
from kvscout_scheduler.thresholds import NO_THRESHOLDS, BusyThresholds

if TYPE_CHECKING:
    from kvscout_scheduler.policies import Policy


@dataclass(slots=True)
class HitCounts:
    """Prompt tokens booked on a worker rank since it came, and how many of them were cached."""

    isl_tokens: int = 0
    cached_tokens: int = 0


class Pool:
    """Workers of one (tenant, model, role). Slots of removed ranks are used again; columns never shrink.

    Invariants
    1. `order` is the slots in use, by rank; `slot_of` their inverse; `lanes` the same slots by lane.
    2. A slot that is not in use carries no load, no cool-down and no metrics.
    3. The load knows the limits that follow from registration, thresholds and metrics.

    Args:
        pool_id: What its workers serve.
        track_blocks: Whether requests occupy blocks.
        queue_threshold: Requests wait for a worker that has more active prefill tokens than this times what it takes
            into one batch; None = nobody waits.
    """

    def __init__(self, pool_id: PoolId, *, track_blocks: bool, queue_threshold: float | None = None) -> None:
        self.id = pool_id
        self.load = make_load(track_blocks=track_blocks)
        self.order: list[int] = []
        self.slot_of: dict[tuple[str, int], int] = {}
        self.slots_of: dict[str, list[int]] = {}
        """Slots of each worker, by rank."""
        self.ranks: list[WorkerRank] = []
        self.specs: list[WorkerSpec] = []
        self.lane_of: list[Lane] = []
        self.lanes: dict[Lane, list[int]] = {}
        self.draining: set[int] = set()
        self.cooldown_until: dict[int, float] = {}
        self.metrics: dict[int, EngineMetrics] = {}
        self.hits: list[HitCounts] = []
        self.policies: dict[str, Policy] = {}
        """Instances of the policies that were used here, by name."""
        self.decisions = 0
        """Workers picked here since the pool came."""
        self.relieved: set[int] = set()
        """Slots that lost load since somebody asked: there may be room."""
        self.changed = False
        """Whether anything else changed since: who may go where must be looked at anew."""
        self._thresholds = NO_THRESHOLDS
        self._queue_threshold = queue_threshold
        self._unused: list[int] = []

    def add(self, spec: WorkerSpec) -> None:
        """Adds the ranks of a worker that is not here."""
        for rank in spec.ranks:
            if self._unused:
                slot = self._unused.pop()
            else:
                slot = len(self.ranks)
                self.ranks.append(rank)
                self.specs.append(spec)
                self.lane_of.append(Lane(spec.block_size, spec.eagle))
                self.hits.append(HitCounts())
                self.load.ensure_slot(slot)
            self.ranks[slot], self.hits[slot] = rank, HitCounts()
            self.slot_of[rank] = slot
        self.update(spec)
        self._reorder()

    def update(self, spec: WorkerSpec) -> None:
        """Takes what may change of a worker while its requests go on."""
        for slot in self.slots(spec):
            self.specs[slot] = spec
            self.lane_of[slot] = Lane(spec.block_size, spec.eagle)
            self._limit(slot)
            (self.draining.add if spec.draining else self.draining.discard)(slot)
        self.changed = True

    def remove(self, spec: WorkerSpec) -> None:
        """Removes the ranks of a worker, whose load must be gone."""
        for rank in spec.ranks:
            slot = self.slot_of.pop(rank)
            self.draining.discard(slot)
            self.cooldown_until.pop(slot, None)
            self.metrics.pop(slot, None)
            self._unused.append(slot)
        self.changed = True
        self._reorder()

    def slots(self, spec: WorkerSpec) -> list[int]:
        """Slots of a worker's ranks."""
        return [self.slot_of[rank] for rank in spec.ranks]

    def take_changes(self) -> tuple[set[int], bool]:
        """`relieved` and `changed` since the last call."""
        relieved, changed = self.relieved, self.changed
        self.relieved, self.changed = set(), False
        return relieved, changed

    def judge(self, thresholds: BusyThresholds) -> None:
        """Sets when its workers count as busy."""
        if thresholds != self._thresholds:
            self._thresholds = thresholds
            for slot in self.order:
                self._limit(slot)
            self.changed = True

    def report(self, slot: int, metrics: EngineMetrics) -> None:
        """Takes what an engine says of itself."""
        self.metrics[slot] = metrics
        self._limit(slot)
        self.relieved.add(slot)

    def cool_down(self, slot: int, until: float) -> float:
        """Leaves a slot out until a time, or later if that was said before; returns until when."""
        self.cooldown_until[slot] = until = max(until, self.cooldown_until.get(slot, until))
        self.changed = True
        return until

    def recover(self, now: float) -> None:
        """Ends cool-downs that are over."""
        for slot in [slot for slot, until in self.cooldown_until.items() if until <= now]:
            del self.cooldown_until[slot]
            self.changed = True

    def complete_prefill(self, allocation: Allocation) -> None:
        """Ends the prefill phase of a request; a second time changes nothing."""
        self.load.complete_prefill(allocation)
        self.relieved.add(allocation.slot)

    def release(self, allocation: Allocation) -> None:
        """Releases all that a request occupies; it must not be used again."""
        self.load.remove(allocation)
        self.relieved.add(allocation.slot)

    def _limit(self, slot: int) -> None:
        spec = self.specs[slot]
        usage = self.metrics.get(slot, NO_METRICS).kv_cache_usage
        budget, threshold = spec.max_num_batched_tokens, self._queue_threshold
        queued = math.floor(min(threshold * budget, 2.0**62)) if budget and threshold is not None else NO_LIMIT
        prefill_tokens, decode_blocks = self._thresholds.limits(spec.total_kv_blocks, usage)
        self.load.limit(slot, Limits(min(prefill_tokens, NO_LIMIT), min(decode_blocks, NO_LIMIT), queued))

    def _reorder(self) -> None:
        self.order = [self.slot_of[rank] for rank in sorted(self.slot_of)]
        self.lanes, self.slots_of = {}, {}
        for slot in self.order:
            self.lanes.setdefault(self.lane_of[slot], []).append(slot)
            self.slots_of.setdefault(self.ranks[slot].worker_id, []).append(slot)
        self.load.arrange(self.slot_of, self.order)

    def prompts(self, prompt: Prompt, others: tuple[Prompt, ...], isl_tokens: int) -> dict[Lane, Prompt]:
        """The hashes that hold for each lane, checked; a lane nobody hashed for gets none.

        Raises:
            InvalidArgument: A field of a prompt is wrong, or its block size is left open and the workers differ.
            FailedPrecondition: There are hashes, but for no block size of this pool.
        """
        given = (prompt, *others)
        if len(self.lanes) > 1 and len({lane.block_size for lane in self.lanes}) > 1:
            for each in given:
                if each.blocks and not each.block_size:
                    sizes = sorted({lane.block_size for lane in self.lanes})
                    raise InvalidArgument(f"required, the model's workers have {sizes}", field="block_size")
        found: dict[Lane, Prompt] = {}
        for lane in self.lanes:
            fitting = [p for p in given if p.block_size in (0, lane.block_size) and p.eagle in (None, lane.eagle)]
            if fitting:
                best = next((p for p in fitting if p.eagle is not None), fitting[0])
                best.validate(isl_tokens, lane.block_size)
                found[lane] = best
            else:
                found[lane] = EMPTY_PROMPT
        if self.lanes and not any(p.blocks for p in found.values()) and any(p.blocks for p in given):
            hashed = sorted({p.block_size for p in given if p.blocks})
            sizes = sorted({lane.block_size for lane in self.lanes})
            raise FailedPrecondition(f"block-size mismatch: hashed for {hashed}, the workers of the model have {sizes}")
        return found
