"""The one table of errors to gRPC status codes, and what the caller of an rpc gets for what was raised.

Servers apply it in one direction (`status_of`), clients in the other (`from_status`): both ends raise the same types.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import NamedTuple

import grpc

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvscout_common.process.endings import report_panic
from kvscout_common.transport.rich_status import DETAILS_TRAILER, details_of

log = logging.getLogger("kvscout.rpc")

ANSWERED_TRAILER = "kvscout-error"
"""Marks a status that a service chose: UNAVAILABLE without it is a connection that failed."""
CAUSE_TRAILER = "kvscout-cause"
"""Names an error's cause, where its class does not say it."""
INTERNAL_TEXT = "internal error; the service's log has the details"

STATUS_CODES: dict[type[KvscoutError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    InternalError: grpc.StatusCode.INTERNAL,
}

_BY_CODE: dict[grpc.StatusCode, type[KvscoutError]] = {
    code: kind for kind, code in STATUS_CODES.items() if kind.__base__ is KvscoutError
}


def status_code(error: KvscoutError | type[KvscoutError]) -> grpc.StatusCode:
    """Return the gRPC status code of an error or a class of them: that of the nearest class in `STATUS_CODES`."""
    for kind in (error if isinstance(error, type) else type(error)).__mro__:
        if kind in STATUS_CODES:
            return STATUS_CODES[kind]
    return grpc.StatusCode.INTERNAL


_FIELD = re.compile(r"\w+(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?)*")
"""`event_endpoints[0].endpoint`: fields of messages within messages."""


def from_status(
    code: grpc.StatusCode,
    message: str,
    *,
    retry_after_seconds: float | None = None,
    raised: str = "",
    cause: str = "",
) -> KvscoutError:
    """Return the error that a gRPC status stands for; codes we never send become `InternalError`.

    Args:
        code: The status code of the answer.
        message: The status details; "field: text" is split again into field and message.
        retry_after_seconds: From the `retry-after` trailer, if there was one.
        raised: Name of what the server raised, where it said so; distinguishes `Draining` from `Unavailable`.
        cause: The error's own, where the server named it.
    """
    kind = Draining if raised == Draining.__name__ else _BY_CODE.get(code, InternalError)
    field: str | None = None
    head, separator, tail = message.partition(": ")
    if kind is InvalidArgument and separator and _FIELD.fullmatch(head):
        field, message = head, tail
    return kind(message, field=field, retry_after_seconds=retry_after_seconds, cause=cause)


class Status(NamedTuple):
    """Status with which a call ends."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, str | bytes], ...] = ()


def status_of(error: BaseException, method: str) -> Status:
    """Our exceptions as themselves; everything else is INTERNAL with a fixed text, and is logged.

    Args:
        error: What was raised.
        method: By which rpc.

    Raises:
        asyncio.CancelledError: It failed because the caller has gone.
        BaseException: The error itself, if it is one that ends tasks or processes because somebody wants it.
    """
    if isinstance(error, KvscoutError):
        code, text = status_code(error), str(error)
        trailers: list[tuple[str, str | bytes]] = [(ANSWERED_TRAILER, type(error).__name__)]
        if error.cause:
            trailers.append((CAUSE_TRAILER, error.cause))
        if error.retry_after_seconds is not None:
            trailers.append(("retry-after", f"{error.retry_after_seconds:g}"))
        details = details_of(code, text, error)
        if details:
            trailers.append((DETAILS_TRAILER, details))
        return Status(code, text, tuple(trailers))
    if not isinstance(error, Exception):
        if not report_panic(error):
            raise error
    elif caller_gone(error):
        raise asyncio.CancelledError from error
    else:
        log.error("unexpected error in %s", method, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


def caller_gone(error: BaseException) -> bool:
    """Return whether grpc could not send because the call is over: its caller has gone, which is reported to us
    later."""
    return isinstance(error, grpc.aio.InternalError) and "grpc_call_error" not in str(error)
