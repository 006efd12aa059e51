"""The server interceptor that turns exceptions into gRPC statuses, by the one table of `errors`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc

from kvscout_common.endings import tell_panic
from kvscout_common.errors import KvscoutError, status_code
from kvscout_common.handlers import Context, Continuation, Handler, wrap

log = logging.getLogger("kvscout.rpc")

ANSWERED_TRAILER = "kvscout-error"
"""Marks a status that a service chose: UNAVAILABLE without it is a connection that failed."""
INTERNAL_TEXT = "internal error; the service's log has the details"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers our exceptions with their status and everything else with INTERNAL and a fixed text."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED itself
            return handler
        both_ways = bool(handler.request_streaming and handler.response_streaming)
        return wrap(handler, _Errors(handler_call_details.method, both_ways=both_ways))


class _Errors:
    def __init__(self, method: str, *, both_ways: bool) -> None:
        self._method = method
        self._both_ways = both_ways

    def check(self, request: Any) -> None:
        """Nothing to check: this interceptor looks at what is raised only."""

    @asynccontextmanager
    async def around(self, context: Context) -> AsyncIterator[None]:
        try:
            if self._both_ways:
                # The first write carries the headers, and so does a status where none went out before: a status while
                # another task's first write is on its way would be refused by grpc, and the caller wait for ever.
                await context.send_initial_metadata(())
            yield
        except grpc.aio.AbortError:
            raise
        except KvscoutError as error:
            trailers = [(ANSWERED_TRAILER, type(error).__name__)]
            if error.retry_after_seconds is not None:
                trailers.append(("retry-after", f"{error.retry_after_seconds:g}"))
            await _end(context, status_code(error), str(error), tuple(trailers))
        except NotImplementedError:
            # What generated servicers raise for an rpc that nobody wrote, after they set this code.
            if context.code() is not grpc.StatusCode.UNIMPLEMENTED:
                log.exception("unexpected error in %s", self._method)
                await _end(context, grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
            await _end(context, grpc.StatusCode.UNIMPLEMENTED, f"this release does not have {self._method}")
        except Exception as error:
            if _is_gone(error):
                raise asyncio.CancelledError from error
            log.exception("unexpected error in %s", self._method)
            await _end(context, grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
        except BaseException as error:
            if not tell_panic(error):
                raise
            await _end(context, grpc.StatusCode.INTERNAL, INTERNAL_TEXT)


async def _end(
    context: Context, code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """Ends a call with a status.

    Raises:
        grpc.aio.AbortError: Always, as grpc wants it; or CancelledError, if the caller has gone meanwhile.
    """
    try:
        await context.abort(code, text, trailing_metadata=trailers)
    except grpc.aio.InternalError as error:
        if not _is_gone(error):
            raise
        raise asyncio.CancelledError from error


def _is_gone(error: Exception) -> bool:
    """Whether grpc could not send because the call is over: its caller has gone, which we are yet to be told."""
    return isinstance(error, grpc.aio.InternalError) and "grpc_call_error" not in str(error)
