"""Answering the messages of a stream as they come, for handlers that have something to think about now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc

Answer: TypeAlias = Callable[[bytes], Sequence[bytes] | None]
"""Returns what answers a message, in messages; None = it is left to the handler. Waits for nothing, raises nothing."""


def answers_in_callbacks(context: Any) -> bool:
    """Return whether `read_unanswered` answers messages as they come, beside whatever the handler's tasks write
    meanwhile."""
    return hasattr(context, "read_unanswered")


async def read_unanswered(context: Any, answer: Answer) -> Any:
    """As `context.read`, but for the messages that `answer` answers: the next one is read.

    On the native transport that takes place as they come: the handler sleeps on.

    Args:
        context: Of a handler of bytes, whose both sides send many messages.
        answer: Asked about each message, in order.

    Returns:
        The first message that is left to the handler, or `grpc.aio.EOF`.
    """
    if answers_in_callbacks(context):
        return await context.read_unanswered(answer)
    while (message := await context.read()) is not grpc.aio.EOF:
        replies = answer(message)
        if replies is None:
            break
        for reply in replies:
            await context.write(reply)
    return message
