"""Messages of a client's stream in callbacks, where the transport can: no task wakes up for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


async def hear(call: Any, heard: Callable[[bytes], object]) -> None:
    """Has a function called with each message that comes; returns when the server has ended the stream.

    Args:
        call: Of bytes, that nobody else reads.
        heard: What it raises ends this.

    Raises:
        grpc.aio.AioRpcError: The call failed.
    """
    native = getattr(call, "hear", None)
    if native is not None:
        await native(heard)
        return
    async for message in call:
        heard(message)


def sends_at_once(call: Any) -> bool:
    """Whether `call.send_at_once` can be called now; else `call.write` is to be waited for."""
    return getattr(call, "has_room", False)
