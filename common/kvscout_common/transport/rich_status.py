"""Errors as `google.rpc.Status`, which clients of any language take apart without parsing text.

A `BadRequest` names the field at fault, a `RetryInfo` says when a later try may succeed. They are the messages of
google/rpc/status.proto and google/rpc/error_details.proto, written field by field: packages with the generated ones
register them for the whole process, and three fields need no package.
"""

from __future__ import annotations

import grpc

from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.transport.wire_fields import bytes_field, number_field

DETAILS_TRAILER = "grpc-status-details-bin"
MAX_DETAILS_BYTES = 4 * 1024
"""More does not go with a status: all its headers together have to stay below the 8 KiB that some peers take."""
MAX_RETRY_SECONDS = 315_576_000_000
"""Largest value of a `google.protobuf.Duration`."""
_TYPES = "type.googleapis.com/google.rpc."


def details_of(code: grpc.StatusCode, text: str, error: KvscoutError) -> bytes:
    """Return a serialised `google.rpc.Status`; b"" = there is nothing in it that code and text do not say.

    Args:
        code: Status code of the error.
        text: Its whole text.
        error: What was raised.
    """
    details = b""
    if isinstance(error, InvalidArgument) and error.field:
        violation = bytes_field(1, error.field.encode()) + bytes_field(
            2, text.removeprefix(f"{error.field}: ").encode()
        )
        details += _any("BadRequest", bytes_field(1, violation))
    if error.retry_after_seconds is not None:
        seconds, nanos = divmod(round(min(max(0.0, error.retry_after_seconds), MAX_RETRY_SECONDS) * 1e9), 1_000_000_000)
        details += _any("RetryInfo", bytes_field(1, number_field(1, seconds) + number_field(2, nanos)))
    if not details:
        return b""
    status = number_field(1, code.value[0]) + bytes_field(2, text.encode()) + details
    return status if len(status) <= MAX_DETAILS_BYTES else b""


def _any(kind: str, message: bytes) -> bytes:
    """Return a detail of the status: its type and its bytes."""
    return bytes_field(3, bytes_field(1, f"{_TYPES}{kind}".encode()) + bytes_field(2, message))
