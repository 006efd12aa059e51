"""Handlers of rpcs, and how they read what comes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvscout_common.errors import InvalidArgument

T = TypeVar("T")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class Synchronous:
    """A handler that makes bytes of bytes and waits for nothing, so that a call of it needs no task.

    Args:
        answer: Makes the answer; may ask for `current_identity`.
        native: The extension's `Answers`: the native transport asks them first, and `answer` about what they decline;
            None = there are none.
    """

    def __init__(self, answer: Callable[[bytes], bytes], native: Any = None) -> None:
        self.answer = answer
        self.native = native

    def one_answer(self) -> Handler:
        """Adapt the handler of an rpc with one request."""
        behaviour: Any = self  # grpcio's stubs know functions only
        return grpc.unary_unary_rpc_method_handler(behaviour)

    def an_answer_each(self) -> Handler:
        """Adapt the handler of an rpc whose many requests are answered one by one."""
        behaviour: Any = self
        return grpc.stream_stream_rpc_method_handler(behaviour)


def read_message(deserialize: Callable[[bytes], T], request: bytes) -> T:
    """Read a message.

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
