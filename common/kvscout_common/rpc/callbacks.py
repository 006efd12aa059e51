"""Messages of a client's stream in callbacks, where the transport can: no task wakes up for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


async def receive_each(call: Any, received: Callable[[bytes], object]) -> None:
    """Call a function with each message of a stream until the server ends it.

    Args:
        call: Of bytes, that nobody else reads.
        received: What it raises ends this.

    Raises:
        grpc.aio.AioRpcError: The call failed.
    """
    native = getattr(call, "receive_each", None)
    if native is not None:
        await native(received)
        return
    async for message in call:
        received(message)


def can_send_now(call: Any) -> bool:
    """Return whether `call.send_now` can be called now; else `call.write` is to be waited for."""
    return getattr(call, "has_room", False)
