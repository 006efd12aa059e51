"""Wrapping gRPC method handlers: what the interceptors of kvscout have in common.

A gRPC handler is one of four shapes (unary or streaming on either side). An interceptor that only wants to look
at each incoming request and to surround the call can say so once, as a `Surround`; `wrap` applies it to all four.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvscout_common.errors import InvalidArgument

T = TypeVar("T")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class Surround(Protocol):
    """What an interceptor does around one call."""

    def around(self, context: Context) -> AbstractAsyncContextManager[None]:
        """Entered before the behaviour runs, left after its last answer or error."""
        ...

    def check(self, request: Any) -> None:
        """Sees every request message before the behaviour does; raises to refuse it."""
        ...


def wrap(handler: Handler, surround: Surround) -> Handler:
    """A handler of the same shape whose calls `surround` surrounds.

    It takes bytes and reads them within: what grpc itself cannot read it answers with INTERNAL, past all of us.
    """
    kwargs = {"response_serializer": handler.response_serializer}
    # grpcio's stubs type the behaviour of a handler as the synchronous one, whatever the server is.
    unary_unary: Any = handler.unary_unary
    unary_stream: Any = handler.unary_stream
    stream_unary: Any = handler.stream_unary
    stream_stream: Any = handler.stream_stream
    make: Callable[..., Any]
    if not handler.response_streaming:
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        answering: Handler = make(_answer(stream_unary or unary_unary, handler, surround), **kwargs)
        return answering
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    streaming: Handler = make(_stream(stream_stream or unary_stream, handler, surround), **kwargs)
    return streaming


def read_message(deserialize: Callable[[bytes], T], request: bytes) -> T:
    """Reads a message.

    Args:
        deserialize: The `FromString` of its class.
        request: Its bytes.

    Raises:
        InvalidArgument: The bytes are no such message.
    """
    try:
        return deserialize(request)
    except DecodeError as error:
        kind: Any = getattr(deserialize, "__self__", None)
        raise InvalidArgument(f"is no {kind.DESCRIPTOR.name if kind else 'message'}", field="request") from error


def _checked(request: Any, handler: Handler, surround: Surround) -> Any:
    # grpcio's stubs do not know that a handler may go without.
    deserialize: Any = handler.request_deserializer
    if handler.request_streaming:
        return _checked_stream(request, deserialize, surround)
    message = read_message(deserialize, request) if deserialize is not None else request
    surround.check(message)
    return message


async def _checked_stream(requests: AsyncIterator[Any], deserialize: Any, surround: Surround) -> AsyncIterator[Any]:
    async for request in requests:
        message = read_message(deserialize, request) if deserialize is not None else request
        surround.check(message)
        yield message


def _answer(
    behaviour: Callable[[Any, Context], Awaitable[Any]], handler: Handler, surround: Surround
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: Any, context: Context) -> Any:
        async with surround.around(context):
            return await behaviour(_checked(request, handler, surround), context)

    return answer


def _stream(
    behaviour: Callable[[Any, Context], Any], handler: Handler, surround: Surround
) -> Callable[[Any, Context], Awaitable[None]]:
    # Writes to the context instead of yielding: when the caller goes away, the behaviour's generator is closed here
    # and now, in the call's own task, and not whenever it happens to be collected.
    async def stream(request: Any, context: Context) -> None:
        async with surround.around(context):
            result = behaviour(_checked(request, handler, surround), context)
            if inspect.isawaitable(result):  # a behaviour that writes to the context itself
                await result
                return
            async with aclosing(result):
                async for response in result:
                    await context.write(response)

    return stream
