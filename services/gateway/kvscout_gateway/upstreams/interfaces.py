"""Interfaces of indexers and schedulers to a request, be they in this process or behind rpcs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from kvscout.v1 import events_pb2, indexer_pb2, scheduler_pb2, types_pb2
from kvscout_common.rank_sets import RankSet
from kvscout_common.rpc.service_info import Warned
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Choice, Decision
from kvscout_gateway.values.overlaps import Overlaps
from kvscout_gateway.values.prompt import Geometry
from kvscout_gateway.values.request import Request

if TYPE_CHECKING:
    from kvscout_gateway.upstreams.scheduler.link import SchedulerLink

NO_RANKS: Mapping[Geometry, RankSet] = MappingProxyType({})
Answer = TypeVar("Answer")
Rpc: TypeAlias = "Callable[[SchedulerLink], Callable[..., Awaitable[Answer]]]"
"""Takes a stub of a scheduler, gives its rpc."""


class Indexer(Protocol):
    """Indexers, as a request uses them."""

    async def match(
        self,
        model: str,
        tenant: str,
        hashes: Mapping[Geometry, bytes],
        *,
        prompt_tokens: int = 0,
        ranks: Mapping[Geometry, RankSet] = NO_RANKS,
    ) -> Overlaps:
        """Return the overlaps of a prompt with every cache.

        Args:
            model: Whose caches.
            tenant: Whose they are.
            hashes: The prompt's local hashes, packed, for each geometry.
            prompt_tokens: Its length, which decides what an engine with sliding windows can use; 0 = not known.
            ranks: The registered worker ranks; where there are many, most may be told of in one.
        """

    def routed(self, decision: Decision) -> None:
        """Report that a prompt goes to its worker."""

    def dump(self, request: indexer_pb2.DumpRequest) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield the state of every worker rank."""

    def warnings(self) -> list[Warned]:
        """Return faults of indexers that no call of theirs shows, one sentence each."""

    def no_events(self) -> Mapping[tuple[str, WorkerRank], str]:
        """Return the worker ranks whose events are missing though they ran prompts, and what says so."""


class Scheduler(Protocol):
    """Schedulers, as a request uses them."""

    @property
    def overlap_score_weight(self) -> float:
        """Return the weight of overlaps; 0 = prefix caches are ignored, and indexers need not be called."""

    async def reserve(
        self,
        request: Request,
        overlaps: Overlaps,
        booking: Booking | None,
        *,
        knows_workers: bool,
        refresh: Callable[[], Awaitable[Overlaps]],
    ) -> tuple[Choice, Overlaps]:
        """Have a worker chosen, and the request booked on it unless it is a query."""

    def hold(self, booking: Booking) -> None:
        """Take over a booking."""

    def prefill_complete(self, booking: Booking) -> None:
        """Report its first token."""

    def free(self, booking: Booking, output_tokens: int = 0) -> None:
        """Free it; a second call does nothing."""

    async def call(self, method: Rpc[Answer], request: object) -> Answer:
        """Call an rpc of the first scheduler that answers."""

    async def call_booked(
        self, method: Rpc[Answer], request: object, has_it: Callable[[Answer], bool] = lambda answer: True
    ) -> Answer:
        """Call an rpc about a request that Route booked, at whichever scheduler has it."""

    async def renew(self, request: scheduler_pb2.RenewRequest) -> scheduler_pb2.RenewResponse:
        """Renew leases of requests that Route booked."""

    async def set_busy_thresholds(
        self, request: types_pb2.SetBusyThresholdsRequest
    ) -> types_pb2.SetBusyThresholdsResponse:
        """Change thresholds on every scheduler."""

    def report_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        """Report an ejected worker, in the background."""
