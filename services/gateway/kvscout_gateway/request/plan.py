"""The plan of a request: its attempts, in which order they are booked and sent, and what passes between them.

A plan says nothing of retries, of what is freed and of who pays for a failure: `Exchange.run_attempts` does.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from kvscout_common.errors import KvscoutError

if TYPE_CHECKING:
    from kvscout_gateway.request.attempt import Attempt, Reply
    from kvscout_gateway.request.exchange import Exchange
    from kvscout_gateway.values.request import Request


class Plan(Protocol):
    """One way to run a request."""

    def run(self, exchange: Exchange, reply: Reply) -> Awaitable[None]:
        """Run it to its end.

        Raises:
            KvscoutError: It cannot be.
        """

    async def place(self, exchange: Exchange) -> tuple[Attempt, Attempt | None]:
        """Book its attempts, for a front that has them sent by others: that which answers, and that which computes the
        prompt for it (None: the first does).

        Raises:
            KvscoutError: It cannot be.
        """


class Aggregated:
    """One attempt: the worker computes the prompt, and continues it."""

    def run(self, exchange: Exchange, reply: Reply) -> Awaitable[None]:
        """See `Plan`."""

        async def on(attempt: Attempt) -> None:
            await reply.placed(attempt.decision)
            await attempt.relay(await attempt.send(), reply)

        return exchange.run_attempts(exchange.request, on)

    async def place(self, exchange: Exchange) -> tuple[Attempt, Attempt | None]:
        """See `Plan`."""
        return await exchange.place(), None


class PrefillFailed(Exception):
    """No prefill worker did its part; nothing has been passed on to the client.

    Args:
        error: Error for the client.
    """

    def __init__(self, error: KvscoutError) -> None:
        super().__init__(str(error))
        self.error = error


class Handover(Protocol):
    """Handover of a prompt from a prefill to a decode engine."""

    async def run(self, exchange: Exchange, prefill: Request, decode: Attempt, reply: Reply) -> None:
        """Have the prompt computed by a prefill worker, and continued on the decode attempt, to its end.

        Args:
            exchange: The request.
            prefill: What is asked of the prefill worker.
            decode: The decode attempt, booked.
            reply: The client.

        Raises:
            PrefillFailed: No prefill worker did its part.
            EngineFailed: The decode engine did not.
            KvscoutError: The client's or this gateway's trouble.
        """
