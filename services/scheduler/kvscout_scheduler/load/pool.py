"""The workers that can take each other's requests, as columns by slot, and what is known of each."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.costs.cost import BlockFormat
from kvscout_scheduler.estimates.engine_metrics import NO_METRICS, EngineMetrics
from kvscout_scheduler.estimates.first_rates import Rates, first_rates
from kvscout_scheduler.estimates.learned_times import LearnedTimes, RegisteredWorkers
from kvscout_scheduler.estimates.sessions import Sessions
from kvscout_scheduler.load.active_load import Allocation, Limits, MakeLoad
from kvscout_scheduler.load.cooling_set import CoolingSet
from kvscout_scheduler.load.feature_sets import FeatureSets
from kvscout_scheduler.values.request import EMPTY_PROMPT, Prompt
from kvscout_scheduler.values.reservation import HASH_BYTES, Observer, PoolId, Reservation
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.slot_sets import in_order, large_slot_set, slot_set, slots_in
from kvscout_scheduler.values.thresholds import NO_LIMIT, NO_THRESHOLDS, BusyThresholds


@dataclass(slots=True)
class HitCounts:
    """Prompt tokens booked on a worker rank since it came, and how many of them were cached."""

    isl_tokens: int = 0
    cached_tokens: int = 0

    def count(self, reservation: Reservation) -> None:
        """Add a booking."""
        self.isl_tokens += reservation.isl_tokens
        self.cached_tokens += reservation.isl_tokens - reservation.uncached_tokens


class LeavingRank(NamedTuple):
    """A rank that is not registered any more, and has requests that were booked while it was."""

    until: float
    """Time when they end; infinite = by themselves, as the worker continues them."""
    taken_out: bool = False
    """True: the worker was removed; else its registration ended."""


class Pool:
    """Workers of one (tenant, model, role). Slots of removed ranks are used again; columns never shrink.

    ::

        registered: in `order` ──removed──▶ `leaving`, while it has load ──its last request ends──▶ unused
                        ▲────────back as it was───────┘

    Invariants
    1. `order` is the slots of registered ranks, by rank; `slot_of` their inverse; `everyone` and `formats` the same.
    2. A slot in `leaving` carries load, one that is unused none; neither has a cool-down or metrics.
    3. The load knows the limits that follow from registration, thresholds and metrics.

    Args:
        pool_id: What its workers serve.
        make_load: Makes its load, of one of the backends.
        settings: Of the scheduler.
    """

    def __init__(self, pool_id: PoolId, make_load: MakeLoad, settings: SchedulerSettings) -> None:
        self.id = pool_id
        self.load = make_load(track_blocks=settings.tracks_blocks(pool_id.role))
        self.order: list[int] = []
        self.places: tuple[WorkerRank, ...] = ()
        """Rank at each slot, of those not in use the last one; another tuple after each change."""
        self.slot_of: dict[tuple[str, int], int] = {}
        self.slots_of: dict[str, list[int]] = {}
        """Slots of each worker, by rank."""
        self.ranks: list[WorkerRank] = []
        self.specs: list[WorkerSpec] = []
        self.format_of: list[BlockFormat] = []
        self.everyone = 0
        """The slots of `order`, as a set; see `slot_sets`."""
        self.formats: dict[BlockFormat, int] = {}
        """Slots of `order` by block format, as sets."""
        self.draining = 0
        """Those that drain, as a set."""
        self.cooldown_until: dict[int, float] = {}
        self._cool_downs = CoolingSet(self.cooldown_until, self.ranks)
        self.metrics: dict[int, EngineMetrics] = {}
        self.reported_at: dict[int, float] = {}
        """When `metrics` came."""
        self.silent: set[int] = set()
        """Slots whose engine reported metrics once, and has not for long."""
        self.leaving: dict[int, LeavingRank] = {}
        """Slots of ranks that are not registered any more."""
        self.hits: list[HitCounts] = []
        self.sessions = Sessions()
        """Conversations that its requests belong to."""
        self.times = LearnedTimes(
            self._registered_ranks, self._first_rates, self.sessions, reuse_weight=settings.session_reuse_weight
        )
        """Speed and work of its workers."""
        self.observers: list[Observer] = [self.sessions, self.times]
        """Observers of every booking here."""
        self.decisions = 0
        """Workers picked here since the pool came."""
        self.relieved: set[int] = set()
        """Slots that lost load since the last call of `take_changes`: there may be room."""
        self.changed = False
        """True: eligibility may have changed since the last look."""
        self._thresholds = NO_THRESHOLDS
        self.judged = False
        """True: thresholds are set, so that workers can be busy."""
        self._queue_threshold = settings.queue_threshold
        self.queues_requests = settings.queue_threshold is not None
        """True: requests wait while no worker has room."""
        self.policies: dict[str, Any] = {}
        """The instances of policies that decide here, by name; of the selector."""
        self._features = FeatureSets(self.ranks, self.specs)
        self._unused: list[int] = []

    def add(self, spec: WorkerSpec) -> None:
        """Add the ranks of a worker that is not here; those that were lately have their load again."""
        self._enter(spec.ranks, spec)
        self._registered(spec)

    def update(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Take another registration of a worker, whose requests go on: also those on ranks that it has no more, or
        that were hashed for other blocks, until they end."""
        if old == replace(new, adapters=old.adapters, labels=old.labels, draining=old.draining):
            # Often: nobody's place changes.
            self._describe(new)
            self.changed = True
            return
        stays = set(new.ranks) if _block_format(old) == _block_format(new) else set()
        self._leave([rank for rank in old.ranks if rank not in stays], LeavingRank(math.inf))
        self._enter([rank for rank in new.ranks if rank not in self.slot_of], new)
        self._registered(new)

    def remove(self, spec: WorkerSpec, leaving: LeavingRank) -> None:
        """Remove the ranks of a worker; those with load stay aside until that is gone."""
        self._leave(spec.ranks, leaving)
        self._reorder()

    def slots(self, spec: WorkerSpec) -> list[int]:
        """Return slots of a worker's ranks."""
        return [self.slot_of[rank] for rank in spec.ranks]

    def take_changes(self) -> tuple[set[int], bool]:
        """Return `relieved` and `changed` since the last call."""
        relieved, changed = self.relieved, self.changed
        self.relieved, self.changed = set(), False
        return relieved, changed

    def members(self, slots: int) -> list[int]:
        """Return registered slots that are in a set, by rank."""
        if slots == self.everyone:
            return self.order
        if 16 * slots.bit_count() < len(self.order):
            return sorted(slots_in(slots & self.everyone), key=self.ranks.__getitem__)
        return in_order(slots, self.order)

    def named(self, worker_ids: Collection[str], dp_rank: int | None = None) -> int:
        """Return the set of the ranks of some workers, or of one rank of each; who is not here is left out."""
        if dp_rank is not None:
            ranks = [(worker_id, dp_rank) for worker_id in worker_ids]
            return slot_set(self.slot_of[rank] for rank in ranks if rank in self.slot_of)
        slots_of = self.slots_of
        slots = [slot for worker_id in worker_ids for slot in slots_of.get(worker_id, ())]
        return slot_set(slots) if len(slots) < 64 else large_slot_set(slots, len(self.ranks))

    def with_labels(self, labels: frozenset[tuple[str, str]]) -> int:
        """Return the set of those that have all of some labels."""
        return self._features.having(labels, self.order)

    def by_revision(self) -> dict[str, int]:
        """Return the slots of each revision, as sets; "" = those without the label."""
        return self._features.by_revision(self.order)

    def with_adapter(self, adapter: str) -> int:
        """Return the set of those that have an adapter loaded."""
        return self._features.having(adapter, self.order)

    def judge(self, thresholds: BusyThresholds) -> None:
        """Set when its workers count as busy."""
        if thresholds is not self._thresholds and thresholds != self._thresholds:
            self._thresholds, self.judged = thresholds, not thresholds.off
            for slot in self.order:
                self._limit(slot)
            self.changed = True

    def report(self, slot: int, metrics: EngineMetrics, now: float) -> None:
        """Take what an engine says of itself."""
        self.metrics[slot], self.reported_at[slot] = metrics, now
        self.silent.discard(slot)
        self._limit(slot)
        self.relieved.add(slot)

    def forget_metrics(self, before: float) -> None:
        """Drop what was reported before a time: an old reading is no reading."""
        for slot in [slot for slot, at in self.reported_at.items() if at < before]:
            if self.metrics[slot] != NO_METRICS:
                self.silent.add(slot)
            self._drop_metrics(slot)
            self._limit(slot)
            self.relieved.add(slot)

    def cool_down(self, slot: int, until: float) -> None:
        """Leave a slot out until a time."""
        self._cool_downs.put(slot, until)
        self.changed = True

    def left_out(self, among: int, now: float) -> int:
        """Return slots that cool down, at most half of a set: those whose cool-downs end last."""
        return self._cool_downs.left_out(among, now)

    def recover(self, now: float) -> None:
        """End cool-downs that are over."""
        for slot in [slot for slot, until in self.cooldown_until.items() if until <= now]:
            self._cool_downs.drop(slot)
            self.changed = True

    def blocks(self, slot: int, isl_tokens: int) -> int:
        """Return blocks that a prompt fills or begins on a slot."""
        return -(-isl_tokens // self.format_of[slot].block_size)

    def place(
        self,
        slot: int,
        reservation: Reservation,
        block_hashes: bytes,
        *,
        now: float,
        output_blocks: int = 0,
        prefill: bool = True,
    ) -> Allocation:
        """Add the load of a request.

        Args:
            slot: Where it is.
            reservation: What is booked.
            block_hashes: Packed hashes of the blocks that it shares.
            now: On the scheduler's clock.
            output_blocks: That it has generated already.
            prefill: Whether its prompt is still to be computed.
        """
        self.sessions.extend(reservation.session, reservation.lineage, block_hashes, now)
        return self.load.add(
            slot,
            self.format_of[slot],
            block_hashes,
            private_blocks=self.blocks(slot, reservation.isl_tokens) - len(block_hashes) // HASH_BYTES + output_blocks,
            prefill_tokens=reservation.uncached_tokens if prefill else 0,
        )

    def complete_prefill(self, allocation: Allocation) -> None:
        """End the prefill phase of a request; a second time changes nothing."""
        self.load.complete_prefill(allocation)
        self.relieved.add(allocation.slot)

    def release(self, allocation: Allocation) -> None:
        """Release all that a request occupies; it must not be used again."""
        slot = allocation.slot
        self.load.remove(allocation)
        if slot not in self.leaving:
            self.relieved.add(slot)
        elif not self.load.at(slot).requests:
            del self.leaving[slot]
            self._unused.append(slot)

    def _limit(self, slot: int) -> None:
        spec = self.specs[slot]
        usage = self.metrics.get(slot, NO_METRICS).kv_cache_usage
        budget, threshold = spec.max_num_batched_tokens, self._queue_threshold
        queued = math.floor(min(threshold * budget, 2.0**62)) if budget and threshold is not None else NO_LIMIT
        prefill_tokens, decode_blocks = self._thresholds.limits(spec.total_kv_blocks, usage)
        self.load.limit(slot, Limits(min(prefill_tokens, NO_LIMIT), min(decode_blocks, NO_LIMIT), queued))

    def _enter(self, ranks: Iterable[WorkerRank], spec: WorkerSpec) -> None:
        block_format = _block_format(spec)
        for rank in ranks:
            slot = next((s for s in self.leaving if self.ranks[s] == rank and self.format_of[s] == block_format), None)
            if slot is not None:
                del self.leaving[slot]
            else:
                slot = self._empty_slot(rank, spec)
            self.slot_of[rank] = slot

    def _empty_slot(self, rank: WorkerRank, spec: WorkerSpec) -> int:
        row = (rank, spec, _block_format(spec), HitCounts())
        columns: tuple[list[Any], ...] = (self.ranks, self.specs, self.format_of, self.hits)
        if self._unused:
            slot = self._unused.pop()
            for column, value in zip(columns, row, strict=True):
                column[slot] = value
            return slot
        slot = len(self.ranks)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        self.load.ensure_slot(slot)
        return slot

    def _leave(self, ranks: Iterable[WorkerRank], leaving: LeavingRank) -> None:
        for rank in ranks:
            slot = self.slot_of.pop(rank)
            self.draining &= ~(1 << slot)
            self.relieved.discard(slot)
            self._cool_downs.drop(slot)
            self.silent.discard(slot)
            self._drop_metrics(slot)
            if self.load.at(slot).requests:
                self.leaving[slot] = leaving
            else:
                self._unused.append(slot)

    def _drop_metrics(self, slot: int) -> None:
        self.metrics.pop(slot, None)
        self.reported_at.pop(slot, None)

    def _registered(self, spec: WorkerSpec) -> None:
        is_new = spec.worker_id not in self.slots_of
        self._describe(spec)
        if is_new:
            self._insert(spec)
        else:
            self._reorder()

    def _describe(self, spec: WorkerSpec) -> None:
        """Take what a registration says of ranks that are here."""
        slots = self.slots(spec)
        members = slot_set(slots)
        for slot in slots:
            self.specs[slot] = spec
            self._limit(slot)
        self.draining = self.draining | members if spec.draining else self.draining & ~members
        self._features.described(spec, members)

    def _registered_ranks(self) -> RegisteredWorkers:
        # What leaves the device for a slower tier is not lost.
        tokens = {slot: self.specs[slot].kept_blocks * self.format_of[slot].block_size for slot in self.order}
        return RegisteredWorkers(self.places, tokens)

    def _first_rates(self) -> Rates:
        return first_rates(self.specs[slot] for slot in self.order)

    def _insert(self, spec: WorkerSpec) -> None:
        """Give the ranks of a new worker, which follow one another, their places: a fleet registers one by one."""
        slots = self.slots(spec)
        place = bisect_left(self.order, spec.ranks[0], key=self.ranks.__getitem__)
        self.order = [*self.order[:place], *slots, *self.order[place:]]
        self.slots_of[spec.worker_id] = slots
        members, block_format = slot_set(slots), _block_format(spec)
        self.formats[block_format] = self.formats.get(block_format, 0) | members
        self.everyone |= members
        self._reordered()

    def _reorder(self) -> None:
        self.order = [self.slot_of[rank] for rank in sorted(self.slot_of)]
        formats: dict[BlockFormat, list[int]] = {}
        self.slots_of = {}
        for slot in self.order:
            formats.setdefault(self.format_of[slot], []).append(slot)
            self.slots_of.setdefault(self.ranks[slot].worker_id, []).append(slot)
        self.formats = {block_format: large_slot_set(slots, len(self.ranks)) for block_format, slots in formats.items()}
        self.everyone = large_slot_set(self.order, len(self.ranks))
        self._reordered()

    def _reordered(self) -> None:
        self._features.forget()
        self.places = tuple(self.ranks)
        self.times.workers_changed()
        self.load.arrange(self.slot_of, self.order)
        self.changed = True

    def prompts(self, prompt: Prompt, others: tuple[Prompt, ...], isl_tokens: int) -> dict[BlockFormat, Prompt]:
        """Return the hashes for each block format, checked; a format without hashes gets none.

        Raises:
            InvalidArgument: A field of a prompt is wrong, or its block size is left open and the workers differ.
            FailedPrecondition: There are hashes, but for no block size of this pool.
        """
        if not others and len(self.formats) == 1:
            (block_format,) = self.formats
            if prompt.block_size in (0, block_format.block_size) and prompt.eagle in (None, block_format.eagle):
                prompt.validate(isl_tokens, block_format.block_size)
                return {block_format: prompt}
        given = (prompt, *others)
        if len(self.formats) > 1 and len({block_format.block_size for block_format in self.formats}) > 1:
            for each in given:
                if each.blocks and not each.block_size:
                    sizes = sorted({block_format.block_size for block_format in self.formats})
                    raise InvalidArgument(f"required, the model's workers have {sizes}", field="block_size")
        found: dict[BlockFormat, Prompt] = {}
        for block_format in self.formats:
            fitting = [
                p
                for p in given
                if p.block_size in (0, block_format.block_size) and p.eagle in (None, block_format.eagle)
            ]
            if fitting:
                best = next((p for p in fitting if p.eagle is not None), fitting[0])
                best.validate(isl_tokens, block_format.block_size)
                found[block_format] = best
            else:
                found[block_format] = EMPTY_PROMPT
        if self.formats and not any(p.blocks for p in found.values()) and any(p.blocks for p in given):
            hashed = sorted({p.block_size for p in given if p.blocks})
            sizes = sorted({block_format.block_size for block_format in self.formats})
            raise FailedPrecondition(f"block-size mismatch: hashed for {hashed}, the workers of the model have {sizes}")
        return found


def _block_format(spec: WorkerSpec) -> BlockFormat:
    return BlockFormat(spec.block_size, spec.eagle)
