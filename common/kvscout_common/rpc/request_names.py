"""Messages that name one request by the same five fields, of the same numbers."""

from __future__ import annotations

from typing import TypeAlias

from kvscout.v1 import scheduler_pb2

NamesRequest: TypeAlias = (
    scheduler_pb2.RequestRef
    | scheduler_pb2.MarkPrefillCompleteRequest
    | scheduler_pb2.FreeRequest
    | scheduler_pb2.AddOutputRequest
)


def free_request(ref: scheduler_pb2.RequestRef, output_tokens: int = 0) -> scheduler_pb2.FreeRequest:
    """Return what frees a request.

    Args:
        ref: Its name.
        output_tokens: That it generated; 0 = unknown.
    """
    return scheduler_pb2.FreeRequest(
        model=ref.model,
        tenant=ref.tenant,
        role=ref.role,
        request_id=ref.request_id,
        attempt_id=ref.attempt_id,
        output_tokens=output_tokens,
    )
