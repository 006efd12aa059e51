"""Registers that replicas share beside requests: busy thresholds and cool-downs, each merges in any order.

Thresholds: the last writer wins, by (version, replica id); a version is a time, and above all that the writer knew.
Cool-downs: the later clear wins, then the later end; a report that crosses a clear is cleared with the others. Both
travel as events, and with every snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvscout.v1 import replication_pb2
from kvscout_common.errors import KvscoutError, NotFound
from kvscout_common.registry.worker_proto import rank_from_proto, rank_to_proto
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.messages.translate import given_fields, thresholds_to_proto
from kvscout_scheduler.values.reservation import MICROSECONDS
from kvscout_scheduler.values.thresholds import DECODE_BLOCKS, PREFILL_TOKENS, BusyThresholds, ThresholdTable

if TYPE_CHECKING:
    from kvscout_scheduler.load.cool_downs import CoolDowns
    from kvscout_scheduler.replicas.log import ReplicaLog

log = logging.getLogger("kvscout.replicas")

MAX_COOL_DOWNS = 100_000
"""Ranks, known or not, that are shared; more are left to the replica that saw them fail."""


class CoolDown(NamedTuple):
    """Cool-down of one rank, in microseconds since the Unix epoch; of two, the greater one holds."""

    cleared_at: int
    """Time when its cool-downs were last ended early; 0 = never."""
    until: int
    """Time when it ends; 0 = there is none."""


NEVER = CoolDown(0, 0)


class Registers:
    """Thresholds and cool-downs of all replicas.

    Args:
        thresholds: Thresholds in effect here.
        cool_downs: Cool-downs in effect here.
        wall_clock: Seconds since the Unix epoch.
        replica_log: Takes what is changed here.
        replica_id: Ours.
    """

    def __init__(
        self,
        thresholds: ThresholdTable,
        cool_downs: CoolDowns,
        wall_clock: Callable[[], float],
        replica_log: ReplicaLog,
        replica_id: str,
    ) -> None:
        self.thresholds: dict[tuple[str, str], replication_pb2.ThresholdsEvent] = {}
        """By tenant and model."""
        self.cool_downs: dict[tuple[str, WorkerRank], CoolDown] = {}
        """By tenant and rank."""
        self._table = thresholds
        self._local = cool_downs
        self._wall_clock = wall_clock
        self._log = replica_log
        self._replica_id = replica_id
        thresholds.on_change = self._on_thresholds
        cool_downs.on_change = self._on_cool_down

    def merge_thresholds(self, event: replication_pb2.ThresholdsEvent) -> None:
        """Take what another replica knows."""
        given = event.thresholds
        name = (given.tenant, given.model)
        ours = self.thresholds.get(name)
        if ours is not None and (ours.version, ours.replica_id) >= (event.version, event.replica_id):
            return
        found = BusyThresholds(**given_fields(given, DECODE_BLOCKS, PREFILL_TOKENS))
        try:
            self._table.put(*name, found.validate())
        except KvscoutError as error:
            log.error("thresholds of model %s from replica %s are refused: %s", given.model, event.replica_id, error)
            return
        self.thresholds[name] = event

    def merge_cool_down(self, event: replication_pb2.CoolDownEvent) -> None:
        """Take what another replica knows."""
        name = (event.tenant, rank_from_proto(event.worker))
        given = CoolDown(event.cleared_at, event.until)
        latest = self._wall_now() + 2 * self._longest
        if max(given) > latest or self._is_over(given):
            return
        if given > self.cool_downs.get(name, NEVER) and (
            name in self.cool_downs or len(self.cool_downs) < MAX_COOL_DOWNS
        ):
            self.cool_downs[name] = given
            self._apply(*name)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Apply the cool-downs of a worker that is new here."""
        for rank in spec.ranks:
            if (spec.tenant, rank) in self.cool_downs:
                self._apply(spec.tenant, rank)

    def worker_removed(self, spec: WorkerSpec) -> None:
        """Forget a worker: one of the same name is another one."""
        for rank in spec.ranks:
            self.cool_downs.pop((spec.tenant, rank), None)

    def expire(self) -> None:
        """Forget cool-downs that are over, and clears that clear nothing any more."""
        for name in [name for name, held in self.cool_downs.items() if self._is_over(held)]:
            del self.cool_downs[name]

    def cool_down_events(self) -> list[replication_pb2.CoolDownEvent]:
        """Return all cool-downs, for a snapshot."""
        return [self._event(*name) for name in self.cool_downs]

    def _wall_now(self) -> int:
        return int(self._wall_clock() * MICROSECONDS)

    @property
    def _longest(self) -> int:
        return int(self._local.longest_seconds * MICROSECONDS)

    def _is_over(self, held: CoolDown) -> bool:
        return max(held.until, held.cleared_at + self._longest if held.cleared_at else 0) <= self._wall_now()

    def _event(self, tenant: str, rank: WorkerRank) -> replication_pb2.CoolDownEvent:
        held = self.cool_downs[tenant, rank]
        worker = rank_to_proto(rank)
        return replication_pb2.CoolDownEvent(tenant=tenant, worker=worker, until=held.until, cleared_at=held.cleared_at)

    def _apply(self, tenant: str, rank: WorkerRank) -> None:
        remaining = (self.cool_downs[tenant, rank].until - self._wall_now()) / MICROSECONDS
        try:
            self._local.put(tenant, rank, remaining)
        except NotFound:
            log.debug("a cool-down names worker %s, which is not known yet", rank.worker_id)

    def _on_thresholds(self, tenant: str, model: str, thresholds: BusyThresholds) -> None:
        known = self.thresholds.get((tenant, model))
        event = replication_pb2.ThresholdsEvent(
            thresholds=thresholds_to_proto(tenant, model, thresholds),
            version=max(self._wall_now(), known.version + 1 if known is not None else 0),
            replica_id=self._replica_id,
        )
        self.thresholds[tenant, model] = event
        self._log.send(replication_pb2.ReplicaEvent(thresholds=event))

    def _on_cool_down(self, tenant: str, rank: WorkerRank, seconds: float | None) -> None:
        name = (tenant, rank)
        known = self.cool_downs.get(name, NEVER)
        if seconds is None:
            held = CoolDown(max(self._wall_now(), known.cleared_at + 1), 0)
        else:
            end = self._wall_now() + int(seconds * MICROSECONDS)
            held = max(known, CoolDown(known.cleared_at, end))
        self.cool_downs[name] = held
        self._log.send(replication_pb2.ReplicaEvent(cool_down=self._event(*name)))
