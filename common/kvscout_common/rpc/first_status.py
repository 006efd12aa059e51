"""Status with which a server ended a stream.

grpc.aio forgets that where a write fails because the stream has ended: its own INTERNAL takes the place of the status
that had come (grpc issue 36066). Which of the two a caller sees is chance.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import to_error

T = TypeVar("T")


class FirstStatus:
    """The first status of a call is the one that stays.

    Args:
        call: It has just been made.
    """

    def __init__(self, call: Any) -> None:
        self._error: KvscoutError | None = None
        call.add_done_callback(self._keep)

    def of(self, error: grpc.aio.AioRpcError) -> KvscoutError:
        """Return what the server said, where there is a doubt about what the call raised."""
        return self._error or to_error(error)

    def _keep(self, call: Any) -> None:
        code = _now(call.code())
        if self._error is None and code is not grpc.StatusCode.OK:
            nothing = grpc.aio.Metadata()
            trailers = _now(call.trailing_metadata()) or nothing
            self._error = to_error(grpc.aio.AioRpcError(code, nothing, trailers, _now(call.details())))


def _now(asked: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that has nothing to wait for."""
    try:
        asked.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("the call is not done")
