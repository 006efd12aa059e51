"""The rpcs whose messages are large or many, as bytes: FindMatches and StreamFindMatches in and out, Dump out,
PublishEvents in.

What is usual goes through the extension without becoming Python objects. What it declines (errors, rare fields, no
extension) is parsed and answered by the plain servicer: same answers, byte for byte, and one place that words errors.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvscout.v1 import events_pb2, indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.index.native import NativeQueries
from kvscout_common.identity.identity import current_identity
from kvscout_common.observability import tracing
from kvscout_common.rpc.handlers import Synchronous
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_indexer.rpc.servicer import IndexerServicer
from kvscout_indexer.rpc.traces import tell, traced_stream

SERVICE = indexer_pb2.DESCRIPTOR.services_by_name["Indexer"].full_name


class RawQueries:
    """The hot rpcs over raw bytes.

    Args:
        native: Answers what is usual; None = the extension is not there.
        servicer: Answers the rest.
    """

    def __init__(self, native: NativeQueries | None, servicer: IndexerServicer) -> None:
        self._native = native
        self._servicer = servicer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicer to a server, with these handlers instead of its own."""
        indexer_pb2_grpc.add_IndexerServicer_to_server(self._servicer, server)
        # What is traced is told of here.
        native = self._native if not tracing.enabled() else None
        find_matches, find_many = (native.answers, native.stream_answers) if native is not None else (None, None)
        handlers: dict[str, grpc.RpcMethodHandler[Any, bytes]] = {
            "FindMatches": Synchronous(self.find_matches, find_matches).one_answer(),
            "StreamFindMatches": Synchronous(self.find_many, find_many).an_answer_each(),
            "Dump": grpc.unary_stream_rpc_method_handler(
                self._servicer.dump_messages, request_deserializer=indexer_pb2.DumpRequest.FromString
            ),
            "PublishEvents": grpc.stream_stream_rpc_method_handler(self.publish_events),
        }
        # A method that is registered again is taken from its last registration.
        server.add_registered_method_handlers(SERVICE, handlers)

    def find_matches(self, request: bytes) -> bytes:
        """Answer one `FindMatchesRequest`."""
        answer = self._find_matches(request)
        if tracing.enabled():
            tell(
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
        return self._servicer.find(message, message.tenant).SerializeToString()

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
        return self._servicer.find_many(message).SerializeToString()

    async def publish_events(self, messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        """Take serialised `KvEventBatch`es."""
        async with aclosing(self._servicer.publish_events(_of_own_tenant(messages), context)) as answers:
            async for answer in answers:
                yield answer.SerializeToString()


async def _of_own_tenant(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Return the messages, if the caller may send the first one; the others must name the same source."""
    first = await anext(messages, None)
    if first is None:
        return
    parse_message(events_pb2.KvEventBatch, first)
    yield first
    async for message in messages:
        yield message
