"""What the caller of an rpc is told of what was raised, by the one table of `errors`."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import grpc

from kvscout_common.endings import tell_panic
from kvscout_common.errors import KvscoutError, status_code
from kvscout_common.rich_status import DETAILS_TRAILER, details_of

log = logging.getLogger("kvscout.rpc")

ANSWERED_TRAILER = "kvscout-error"
"""Marks a status that a service chose: UNAVAILABLE without it is a connection that failed."""
INTERNAL_TEXT = "internal error; the service's log has the details"


class Status(NamedTuple):
    """How a call ends."""

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
        if error.retry_after_seconds is not None:
            trailers.append(("retry-after", f"{error.retry_after_seconds:g}"))
        details = details_of(code, text, error)
        if details:
            trailers.append((DETAILS_TRAILER, details))
        return Status(code, text, tuple(trailers))
    if not isinstance(error, Exception):
        if not tell_panic(error):
            raise error
    elif caller_gone(error):
        raise asyncio.CancelledError from error
    else:
        log.error("unexpected error in %s", method, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


def caller_gone(error: BaseException) -> bool:
    """Whether grpc could not send because the call is over: its caller has gone, which we are yet to be told."""
    return isinstance(error, grpc.aio.InternalError) and "grpc_call_error" not in str(error)
