"""Traces of the indexer's answers; see `kvscout_common.observability.tracing`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from google.protobuf.message import DecodeError

from kvscout.v1 import indexer_pb2
from kvscout_common.observability import tracing

RPC = "kvscout.v1.Indexer/FindMatches"


def traced_stream(message: bytes, answer: Callable[[bytes], bytes]) -> bytes:
    """Answer a message of a stream; each of its requests that is part of a trace has a span of its own.

    Args:
        message: A serialised `StreamFindMatchesRequest`.
        answer: Makes a serialised `StreamFindMatchesResponse` of it.
    """
    traced = {}
    with suppress(DecodeError):  # the answer reports it
        for request in indexer_pb2.StreamFindMatchesRequest.FromString(message).requests:
            if request.traceparent:
                span = tracing.span(RPC, tracing.SpanKind.SERVER, parent=request.traceparent)
                traced[request.id] = (request, span.begun())
    try:
        answers = answer(message)
    except Exception as error:
        for _, span in traced.values():
            span.failed(error)
        raise
    else:
        if traced:
            for result in indexer_pb2.StreamFindMatchesResponse.FromString(answers).results:
                if result.id in traced:
                    request, span = traced[result.id]
                    span.record(code=result.code)
                    record_answer(span, request, result.response)
        return answers
    finally:
        for _, span in traced.values():
            span.end()


def record_answer(
    span: tracing.Span, request: indexer_pb2.FindMatchesRequest, response: indexer_pb2.FindMatchesResponse
) -> None:
    """Record the attributes of an answer in its span."""
    span.record(
        model=request.model,
        tenant=request.tenant,
        blocks=response.num_blocks,
        workers=len(response.overlaps.worker_ids),
        longest_overlap_blocks=max(response.overlaps.device_blocks, default=0),
        lower_bound=response.lower_bound,
    )
