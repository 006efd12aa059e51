"""The indexers of a gateway, as one: a list of replicas for each shard of the workers, mostly one shard with all.

Whatever goes wrong here costs knowledge, never the request. Every shard is queried at the same time, each with the
whole deadline: one that does not answer costs the overlaps of its own workers. The answers are united row by row, which
is exact because the overlap of a worker depends on that worker alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from xxhash import xxh3_64_intdigest

from kvscout.v1 import events_pb2, gateway_pb2, indexer_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.observability import tracing
from kvscout_common.rank_sets import RankSet
from kvscout_common.rpc.channel import stream
from kvscout_common.rpc.service_info import Warned, shown
from kvscout_common.shards import Shard, shard_of
from kvscout_common.transport.wire_fields import bytes_field
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.failover import Failover, Member, UpstreamDown, is_member_fault
from kvscout_gateway.upstreams.indexer.blindness import Reports, Served
from kvscout_gateway.upstreams.indexer.check import IndexerCheck
from kvscout_gateway.upstreams.indexer.link import IndexerLink, IndexerMember, Replicas
from kvscout_gateway.upstreams.indexer.overlaps import AnsweredRows, hold_for
from kvscout_gateway.upstreams.indexer.reporter import ReplicaReports
from kvscout_gateway.upstreams.interfaces import NO_RANKS
from kvscout_gateway.values.cache_reports import CacheReports
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.overlaps import ALL_THAT_DIFFER, FEW_ROWS_FROM, Overlaps
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry

ALL_ROWS_SECONDS = 1.0
"""For which all rows of a pool are requested after few of them did not say all."""
_Answers: TypeAlias = Sequence[indexer_pb2.FindMatchesResponse | None]
"""By shard."""


class RemoteIndexer(Collector):
    """Indexers behind rpcs.

    Args:
        shards: Addresses and names of each shard's replicas in order of preference; empty = there is no indexer.
        security: How they are called.
        timeout_seconds: Longest wait for the overlaps of a prompt.
        served: Gives when a worker rank was sent requests that should have brought events.
        reports: Tells whether a worker reports the prompt tokens that it had cached.
        caches: What engines report as cached.
        resync: Called with an indexer that does not know workers which this gateway knows.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[str]],
        security: ClientSecurity,
        *,
        timeout_seconds: float,
        served: Served,
        reports: Reports,
        caches: CacheReports,
        resync: Callable[[Member[Any]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        count, salt = len(shards), secrets.token_bytes(8)

        def order(address: str) -> int:
            """Sort differently at each gateway: the indexers behind a name share the requests."""
            return xxh3_64_intdigest(salt + address.encode())

        shares = [Shard(index, count) if count > 1 else None for index in range(count)]
        self.shards: tuple[Replicas, ...] = tuple(
            Failover("indexer", addresses, IndexerLink, security, shard=share, order=order)
            for share, addresses in zip(shares, shards, strict=True)
        )
        self.check = IndexerCheck(served, reports, caches)
        self.reports: dict[IndexerMember, ReplicaReports] = {}
        self._all_rows: dict[tuple[str, str, Geometry], float] = {}
        """Until when all rows of a pool are requested, on the clock, by tenant, model and geometry."""
        self._timeout = timeout_seconds
        self._resync = resync
        self._clock = clock

    @property
    def lists(self) -> tuple[Replicas, ...]:
        """The lists of peers that may change."""
        return self.shards

    @property
    def members(self) -> list[IndexerMember]:
        """Every replica of every shard."""
        return [member for shard in self.shards for member in shard.members]

    def join(self, member: IndexerMember) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what is to run for a replica as long as it is there, by name."""
        index = next(index for index, replicas in enumerate(self.shards) if member in replicas.members)
        checked = self.check.join(member, Shard(index, len(self.shards)))
        reports = self.reports[member] = ReplicaReports(member, resync=self._resync, clock=self._clock)
        return {f"report to {member.name}": reports.run, f"check {member.name}": lambda: self.check.keep(checked)}

    def leave(self, member: IndexerMember) -> None:
        """Forget a replica that is gone."""
        del self.reports[member]
        self.check.leave(member)

    async def match(
        self,
        model: str,
        tenant: str,
        hashes: Mapping[Geometry, bytes],
        *,
        prompt_tokens: int = 0,
        ranks: Mapping[Geometry, RankSet] = NO_RANKS,
    ) -> Overlaps:
        """Return the overlaps of a prompt with every cache; none is queried for a prompt without a complete block.

        From `FEW_ROWS_FROM` ranks on, rows are requested of the ranks that differ from what most have. If that does not
        hold for the ranks that are registered here, or shards have different overlaps in common, all rows are.
        """
        pools = [pool for pool in hashes if hashes[pool]]
        shards = self.shards
        if not pools or not shards:
            return Overlaps(hashes)
        problems: dict[str, str] = {}
        now = self._clock()
        few = {
            pool
            for pool in pools
            if pool in ranks
            and ranks[pool].ranks >= FEW_ROWS_FROM
            and self._all_rows.get((tenant, model, pool), now) <= now
        }

        async def ask(pools: Sequence[Geometry], few: Container[Geometry]) -> Iterator[tuple[Geometry, _Answers]]:
            requests = [
                find_matches_request(model, tenant, pool, hashes[pool], prompt_tokens, few_rows=pool in few)
                for pool in pools
            ]
            calls = [self._ask(shard, request, problems) for request in requests for shard in shards]
            # Nearly always there is one call: no need for a task of its own.
            answered = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
            starts = range(0, len(answered), len(shards))
            return zip(pools, (answered[start : start + len(shards)] for start in starts), strict=True)

        answers = dict(await ask(pools, few))
        again = [pool for pool in few if not hold_for(answers[pool], ranks[pool])]
        if again:
            self._all_rows = {key: until for key, until in self._all_rows.items() if until > now}
            self._all_rows.update(((tenant, model, pool), now + ALL_ROWS_SECONDS) for pool in again)
            answers.update(await ask(again, ()))
        return Overlaps(hashes, {pool: AnsweredRows(of) for pool, of in answers.items() if any(of)}, problems)

    def routed(self, decision: Decision) -> None:
        """Report that a prompt goes to its worker, to every replica that has the worker; in the background."""
        if self.shards and decision.block_hashes:
            for member in self.shards[shard_of(decision.tenant, decision.worker.worker_id, len(self.shards))].members:
                if member in self.reports:
                    self.reports[member].put(decision)

    async def dump(self, request: indexer_pb2.DumpRequest) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """Yield the state of every shard, each from its first indexer that answers.

        Raises:
            UpstreamDown: None of a shard does.
            NotFound: Unknown model.
        """
        if not self.shards:
            raise UpstreamDown("no indexer is configured")
        for shard in self.shards:
            async with aclosing(_dump_shard(shard, request)) as batches:
                async for batch in batches:
                    yield batch

    def warnings(self) -> list[Warned]:
        """Return the faults of indexers that no call of theirs shows."""
        return self.check.warnings()

    def no_events(self) -> Mapping[tuple[str, WorkerRank], str]:
        """Return the worker ranks whose events are missing, and what says so."""
        return self.check.no_events()

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name: nothing, each replica has its own."""
        return {}

    def fill_status(self, member: IndexerMember, status: gateway_pb2.HelperStatus) -> None:
        """Add to the status of a replica what is known here."""
        reports = self.reports[member]
        if member.shard is not None:
            status.shard_index, status.shard_count = member.shard.index, member.shard.count
        status.decisions_delivered = reports.delivered
        status.decisions_lost = reports.lost
        status.decisions_waiting = len(reports.queue)
        status.decisions_problem = "; ".join(shown(reports.problems()))

    async def close(self) -> None:
        """End every stream and close every channel."""
        await asyncio.gather(*(member.stub.find_matches.close() for member in self.members))
        await asyncio.gather(*(shard.close() for shard in self.shards))

    def collect(self) -> Iterator[Metric]:
        """Return samples of what the indexers were sent, and of what they lack."""
        decisions = CounterMetricFamily(
            "kvscout_reported_decisions",
            "Routing decisions, by whether the indexer received them",
            labels=["indexer", "outcome"],
        )
        waiting = GaugeMetricFamily(
            "kvscout_reported_decisions_waiting", "Routing decisions that wait to be reported", labels=["indexer"]
        )
        blind = GaugeMetricFamily(
            "kvscout_blind_worker_ranks",
            "Worker ranks that serve requests and whose events never came, as the indexer says",
            labels=["indexer"],
        )
        for member, reports in self.reports.items():
            decisions.add_metric([member.address, "delivered"], reports.delivered)
            decisions.add_metric([member.address, "lost"], reports.lost)
            waiting.add_metric([member.address], len(reports.queue))
        for checked in self.check.checked:
            blind.add_metric([checked.member.address], len(checked.ranks.blind))
        yield from (decisions, waiting, blind)

    async def _ask(
        self, shard: Replicas, request: bytes, problems: dict[str, str]
    ) -> indexer_pb2.FindMatchesResponse | None:
        try:
            answer, _ = await shard.call(
                lambda stub: stub.find_matches, request, timeout_seconds=self._timeout, is_stale=self._is_stale
            )
        except UpstreamDown as error:
            problems[shard.name] = str(error)
        except KvscoutError as error:
            problems[shard.name] = f"{shard.name}: {error}"
        else:
            return answer
        return None

    def _is_stale(self, member: Member[Any], error: KvscoutError) -> bool:
        """Return whether it may have restarted, with the workers that this gateway knows still under way to it."""
        if not isinstance(error, (NotFound, FailedPrecondition)):
            return False
        self._resync(member)
        return True


async def _dump_shard(
    shard: Replicas, request: indexer_pb2.DumpRequest
) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
    problem = ""
    for member in shard.preferred():
        begun = False
        try:
            async for batch in stream(member.stub.Dump, request):
                begun = True
                yield batch
            return
        except KvscoutError as error:
            if begun or not is_member_fault(error):
                raise
            problem = f"{member.name}: {error}"
    raise UpstreamDown(problem)


def find_matches_request(
    model: str, tenant: str, pool: Geometry, hashes: bytes, prompt_tokens: int, *, few_rows: bool = False
) -> bytes:
    """Serialise a `FindMatchesRequest`.

    Args:
        model: Model.
        tenant: Tenant.
        pool: Geometry of the caches.
        hashes: Local hashes of the prompt in that geometry, little-endian u64s.
        prompt_tokens: Length of the prompt; 0 = unknown.
        few_rows: Want rows of the ranks alone that differ from what most have.
    """
    message = indexer_pb2.FindMatchesRequest(
        model=model,
        tenant=tenant,
        block_size=pool.block_size,
        eagle=pool.eagle,
        # A caller that sends hashes may have given any length.
        prompt_tokens=prompt_tokens if prompt_tokens >= _tokens_in(hashes, pool) else 0,
        traceparent=tracing.traceparent(),
        top_k=ALL_THAT_DIFFER if few_rows else 0,
    )
    hashes_field = bytes_field(indexer_pb2.FindMatchesRequest.BLOCK_HASHES_FIELD_NUMBER, hashes)
    return message.SerializeToString() + hashes_field


def _tokens_in(hashes: bytes, pool: Geometry) -> int:
    """Return the tokens of a prompt's complete blocks."""
    return len(hashes) // HASH_BYTES * pool.block_size
