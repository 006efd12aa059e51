"""The plan of a request: its legs, in which order they are booked and sent, and what passes between them.

A plan says nothing of retries, of what is freed and of who pays for a failure: `Exchange.attempt` does, for each leg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvscout_gateway.engines.adapter import ClientRequest
from kvscout_gateway.request.attempt import Leg, Reply

if TYPE_CHECKING:
    from kvscout_gateway.request.exchange import Exchange


class Plan(Protocol):
    """One way to run a request."""

    async def run(self, exchange: Exchange, request: ClientRequest, reply: Reply) -> None:
        """Runs it to its end.

        Raises:
            KvscoutError: It cannot be.
        """

    async def place(self, exchange: Exchange) -> tuple[Leg, Leg | None]:
        """Books its legs, for a front that has them sent by others: that which answers, and that which computes the
        prompt for it (None: the first does).

        Raises:
            KvscoutError: It cannot be.
        """


class Aggregated:
    """One leg: the worker computes the prompt, and continues it."""

    async def run(self, exchange: Exchange, request: ClientRequest, reply: Reply) -> None:
        """See `Plan`."""

        async def on(leg: Leg) -> None:
            await reply.placed(leg.placement)
            await leg.relay(await leg.send(request), request, reply)

        await exchange.attempt(exchange.wish, on)

    async def place(self, exchange: Exchange) -> tuple[Leg, Leg | None]:
        """See `Plan`."""
        return await exchange.place(), None
