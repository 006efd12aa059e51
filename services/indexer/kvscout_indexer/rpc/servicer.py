"""The Indexer service: one call of the core an rpc.

FindMatches, StreamFindMatches, Dump and PublishEvents, whose messages are large or many, are served over bytes. Usual
requests go through the extension without becoming Python objects; those that it declines (errors, rare fields, no
extension) are parsed and answered by `find`: same answers, byte for byte, and one place that words errors.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvscout.v1 import events_pb2, indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_blocks.index.block_index import Overlaps
from kvscout_blocks.index.native import NativeQueries
from kvscout_blocks.index.top_k import Common, top_k
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.hashing import MmItem, block_hashes_packed
from kvscout_common.identity.identity import current_identity, tenant_to_show
from kvscout_common.observability import tracing
from kvscout_common.registry.worker_rpcs import WorkerRpcs, required_id
from kvscout_common.rpc.handlers import Synchronous
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_common.rpc.service_info import service_info
from kvscout_common.transport.statuses import status_code
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT, PoolKey, WorkerRank
from kvscout_indexer.index.cache_evidence import CacheEvidence, Finding
from kvscout_indexer.index.routed import RoutedPrompt
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.status import NOTHING_HELD, RANKS_A_SLICE, index_status, source_status
from kvscout_indexer.rpc.traces import record_answer, traced_stream

SERVICE = indexer_pb2.DESCRIPTOR.services_by_name["Indexer"].full_name

HASH_BYTES = 8
MAX_REQUESTS = 1024
"""In one message of StreamFindMatches."""
_FINDINGS = {
    indexer_pb2.CACHE_FINDING_EMPTIED: Finding.EMPTIED,
    indexer_pb2.CACHE_FINDING_AGREES: Finding.AGREES,
    indexer_pb2.CACHE_FINDING_KEPT: Finding.KEPT,
}


class IndexerServicer(WorkerRpcs, indexer_pb2_grpc.IndexerServicer):
    """Translates; every decision is made below.

    Args:
        indexer: The core.
        native: Answers usual queries; None = the extension is not there.
    """

    def __init__(self, indexer: Indexer, native: NativeQueries | None) -> None:
        super().__init__(indexer.registry, indexer.backends.registrar)
        self._indexer = indexer
        self._native = native

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server, with handlers over bytes for the hot rpcs."""
        indexer_pb2_grpc.add_IndexerServicer_to_server(self, server)
        # Traced requests are answered in Python, which records their spans.
        native = self._native if not tracing.enabled() else None
        find_matches, find_many = (native.answers, native.stream_answers) if native is not None else (None, None)
        handlers: dict[str, grpc.RpcMethodHandler[Any, bytes]] = {
            "FindMatches": Synchronous(self.find_matches, find_matches).one_answer(),
            "StreamFindMatches": Synchronous(self.find_many, find_many).an_answer_each(),
            "Dump": grpc.unary_stream_rpc_method_handler(
                self.dump_messages, request_deserializer=indexer_pb2.DumpRequest.FromString
            ),
            "PublishEvents": grpc.stream_stream_rpc_method_handler(self.publish_events),
        }
        # A method that is registered again is taken from its last registration.
        server.add_registered_method_handlers(SERVICE, handlers)

    def _served_over_bytes(self, *_: Any) -> Any:
        """Fail: `add_to` has a handler over bytes for the rpc, and the generated one is never called."""
        raise NotImplementedError

    FindMatches: Any = _served_over_bytes
    StreamFindMatches: Any = _served_over_bytes
    Dump: Any = _served_over_bytes
    PublishEvents: Any = _served_over_bytes

    def find_matches(self, request: bytes) -> bytes:
        """Answer one `FindMatchesRequest`."""
        answer = self._find_matches(request)
        if tracing.enabled():
            record_answer(
                tracing.current(),
                indexer_pb2.FindMatchesRequest.FromString(request),
                indexer_pb2.FindMatchesResponse.FromString(answer),
            )
        return answer

    def _find_matches(self, request: bytes) -> bytes:
        if self._native is not None:
            answer = self._native.answer(request, now=time.monotonic(), caller_tenant=current_identity().tenant)
            if answer is not None:
                return answer
        message = parse_message(indexer_pb2.FindMatchesRequest, request)
        return self.find(message, message.tenant).SerializeToString()

    def find_many(self, request: bytes) -> bytes:
        """Answer one `StreamFindMatchesRequest` of a stream."""
        if tracing.enabled():
            return traced_stream(request, self._find_many)
        return self._find_many(request)

    def _find_many(self, request: bytes) -> bytes:
        if self._native is not None:
            answer = self._native.answer_stream(request, now=time.monotonic(), caller_tenant=current_identity().tenant)
            if answer is not None:
                return answer
        message = parse_message(indexer_pb2.StreamFindMatchesRequest, request)
        return self.find_each(message).SerializeToString()

    def find_each(self, message: indexer_pb2.StreamFindMatchesRequest) -> indexer_pb2.StreamFindMatchesResponse:
        """Answer every request of a message; one that fails has its status in its answer.

        Raises:
            InvalidArgument: There are too many of them.
        """
        if len(message.requests) > MAX_REQUESTS:
            raise InvalidArgument(f"{len(message.requests)} in one message, at most {MAX_REQUESTS}", field="requests")
        answers = indexer_pb2.StreamFindMatchesResponse()
        for request in message.requests:
            result = answers.results.add(id=request.id)
            try:
                result.response.CopyFrom(self.find(request, request.tenant or message.tenant))
            except KvscoutError as error:
                result.code, result.message = status_code(error).value[0], str(error)
        return answers

    def find(self, request: indexer_pb2.FindMatchesRequest, tenant: str) -> indexer_pb2.FindMatchesResponse:
        """Answer one request; "" = the default tenant.

        Raises:
            InvalidArgument: Its fields contradict one another.
            NotFound: The model was never seen.
        """
        if request.token_ids and request.block_hashes:
            raise InvalidArgument("give token_ids or block_hashes, not both", field="token_ids")
        if request.token_ids and request.prompt_tokens:
            raise InvalidArgument("goes with block_hashes", field="prompt_tokens")
        found = self._indexer.pools.find(
            tenant or DEFAULT_TENANT,
            request.model,
            request.block_size if request.HasField("block_size") else None,
            request.eagle if request.HasField("eagle") else None,
        )
        if found is None:
            return indexer_pb2.FindMatchesResponse()
        key, index = found
        hashes = _hashes(request, key)
        overlaps = index.find_matches(
            hashes, now=time.monotonic(), early_exit=request.early_exit, usable=_usable(request, key)
        )
        incomplete = self._indexer.pools.incomplete(key)
        common = None
        if request.top_k:
            overlaps, common = top_k(overlaps, request.top_k, index.workers(), incomplete)
        return indexer_pb2.FindMatchesResponse(
            overlaps=overlaps_to_proto(overlaps, common),
            num_blocks=len(hashes) // HASH_BYTES,
            block_size=key.block_size,
            lower_bound=request.early_exit or bool(incomplete),
            incomplete_rows=[row for row, rank in enumerate(overlaps.workers) if rank in incomplete],
        )

    async def RecordRouting(
        self, request: indexer_pb2.RecordRoutingRequest, context: Any
    ) -> indexer_pb2.RecordRoutingResponse:
        if not request.model:
            raise InvalidArgument("must not be empty", field="model")
        if not request.prompts:
            raise InvalidArgument("names no prompt", field="prompts")
        recorded = await self._indexer.routed.record(
            request.tenant or DEFAULT_TENANT, request.model, [_routed(prompt) for prompt in request.prompts]
        )
        return indexer_pb2.RecordRoutingResponse(predicted_blocks=recorded.blocks, not_recorded=recorded.refused)

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> indexer_pb2.IndexerGetStatusResponse:
        tenant = tenant_to_show(request.tenant)
        self._indexer.pools.require_model(tenant, request.model)
        now = time.monotonic()
        status = indexer_pb2.IndexerGetStatusResponse(
            service=service_info(
                self._indexer.started,
                warnings=self._indexer.warnings(),
                nats=self._indexer.backends.nats(),
            ),
            shard_index=self._indexer.shard.index,
            shard_count=self._indexer.shard.count,
        )
        names = self._indexer.nats.names if self._indexer.nats is not None else None
        for key, index in self._indexer.pools.by_key():
            if tenant in (ALL_TENANTS, key.tenant) and request.model in ("", key.model):
                status.indexes.append(index_status(key, index))
        for number, (spec, rank, source) in enumerate(self._indexer.sources(tenant), 1):
            if number % RANKS_A_SLICE == 0:
                await asyncio.sleep(0)
            known = self._indexer.pools.get(spec.pool)
            if known is None:
                continue  # its worker was removed meanwhile
            unread = self._indexer.unread(spec)
            observed = source.observed if source is not None else None
            stats = known.worker_stats(rank) or (NOTHING_HELD if unread else None)
            if request.model in ("", spec.model) and stats is not None:
                status.sources.append(
                    source_status(spec, rank, source, observed, stats, now, unread=unread, names=names)
                )
        return status

    async def dump_messages(self, request: indexer_pb2.DumpRequest, context: Any) -> AsyncGenerator[bytes, None]:
        """Return the serialised answers of Dump, source by source.

        Raises:
            InvalidArgument: A rank without its worker.
            NotFound: The model was never seen, or the worker is not registered.
        """
        tenant = request.tenant or DEFAULT_TENANT
        self._indexer.pools.require_model(tenant, request.model)
        if request.worker_id:
            self.registry.get(tenant, request.worker_id)
        elif request.HasField("dp_rank"):
            raise InvalidArgument("needs worker_id", field="dp_rank")
        wanted = [
            (spec, rank)
            for spec, rank, _ in self._indexer.sources(tenant)
            if request.model in ("", spec.model)
            and request.worker_id in ("", spec.worker_id)
            and (not request.HasField("dp_rank") or request.dp_rank == rank.dp_rank)
        ]
        for spec, rank in wanted:
            # One cut after the other; a worker may be gone by the time the ones before it are sent.
            for message in await self._indexer.dump_messages(spec, rank):
                yield message

    async def publish_events(self, messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """Serve PublishEvents.

        Raises:
            KvscoutError: As `GrpcPush.publish`.
        """
        async with aclosing(self._indexer.push.publish(_of_own_tenant(messages))) as answers:
            async for cursor, resend, malformed in answers:
                yield indexer_pb2.PublishEventsResponse(
                    last_event_id=cursor.last_event_id,
                    epoch=cursor.epoch,
                    resend_from=resend.first_id if resend is not None else None,
                    resend_id=resend.number if resend is not None else 0,
                    malformed=malformed,
                ).SerializeToString()

    async def ResetWorker(
        self, request: indexer_pb2.ResetWorkerRequest, context: Any
    ) -> indexer_pb2.ResetWorkerResponse:
        ranks = self._indexer.recover(
            request.tenant or DEFAULT_TENANT,
            required_id(request.worker_id),
            request.dp_rank if request.HasField("dp_rank") else None,
        )
        return indexer_pb2.ResetWorkerResponse(ranks=ranks)


async def _of_own_tenant(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Return the messages, if the caller may send the first one; the others must name the same source."""
    first = await anext(messages, None)
    if first is None:
        return
    parse_message(events_pb2.KvEventBatch, first)
    yield first
    async for message in messages:
        yield message


def _hashes(request: indexer_pb2.FindMatchesRequest, key: PoolKey) -> bytes:
    """Return the local hashes of a request's prompt, packed."""
    if request.token_ids:
        return block_hashes_packed(
            array("I", request.token_ids).tobytes(),
            key.block_size,
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            mm_items=[MmItem(item.id, item.offset, item.length or 1) for item in request.mm_items],
            eagle=key.eagle,
        )
    for name in ("lora_name", "cache_salt", "mm_items"):
        if request.block_hashes and getattr(request, name):
            raise InvalidArgument("may only be given with token_ids: block_hashes include it", field=name)
    return array("Q", request.block_hashes).tobytes()


def _usable(request: indexer_pb2.FindMatchesRequest, key: PoolKey) -> int | None:
    """Return the most blocks of a request's prompt that an engine takes from its cache; None = length unknown."""
    tokens = len(request.token_ids) or request.prompt_tokens
    if request.prompt_tokens and request.prompt_tokens < len(request.block_hashes) * key.block_size:
        raise InvalidArgument("fewer than the blocks of block_hashes have", field="prompt_tokens")
    return (tokens - 1) // key.block_size if tokens else None


def _routed(prompt: indexer_pb2.RoutedPrompt) -> RoutedPrompt:
    if not prompt.worker.worker_id:
        raise InvalidArgument("must not be empty", field="prompts.worker.worker_id")
    if prompt.HasField("block_size") and not prompt.block_size:
        raise InvalidArgument("must be at least 1 token", field="prompts.block_size")
    return RoutedPrompt(
        worker=WorkerRank(prompt.worker.worker_id, prompt.worker.dp_rank),
        block_hashes=array("Q", prompt.block_hashes).tobytes(),
        block_size=prompt.block_size if prompt.HasField("block_size") else None,
        eagle=prompt.eagle if prompt.HasField("eagle") else None,
        evidence=_evidence(prompt.evidence) if prompt.HasField("evidence") else None,
    )


def _evidence(evidence: indexer_pb2.CacheEvidence) -> CacheEvidence:
    finding = _FINDINGS.get(evidence.finding)
    if finding is None:
        raise InvalidArgument(f"{evidence.finding} is none that is known", field="prompts.evidence.finding")
    event_id = evidence.intact_event_id if evidence.HasField("intact_event_id") else None
    return CacheEvidence(finding, evidence.cached_blocks, event_id)


def overlaps_to_proto(overlaps: Overlaps, common: Common | None = None) -> types_pb2.Overlaps:
    """Return overlaps as columns; those that equal the one before are left out.

    Args:
        overlaps: The rows.
        common: What the ranks without a row have; None = nothing.
    """
    message = types_pb2.Overlaps(
        worker_ids=[worker.worker_id for worker in overlaps.workers], device_blocks=overlaps.device
    )
    if any(worker.dp_rank for worker in overlaps.workers):
        message.dp_ranks.extend(worker.dp_rank for worker in overlaps.workers)
    slower = (overlaps.host, overlaps.disk, overlaps.external)
    if any(column != overlaps.device for column in slower):
        message.host_blocks.extend(overlaps.host)
        message.disk_blocks.extend(overlaps.disk)
        message.external_blocks.extend(overlaps.external)
    if overlaps.predicted != overlaps.device:
        message.predicted_blocks.extend(overlaps.predicted)
    if common is not None:
        others = message.others
        others.ranks, others.exact, others.ranks_digest = common.ranks, common.exact, common.digest
        for level, blocks in common.overlap._asdict().items():
            setattr(others, f"{level}_blocks", blocks)
        others.SetInParent()
    return message
