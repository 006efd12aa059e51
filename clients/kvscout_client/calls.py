"""How a client calls a gateway: deadlines, what is tried again, and why nothing answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from kvscout_common.errors import Draining, KvscoutError, Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.tls_probe import tls_trouble
from kvscout_common.rpc.channel import call, stream

T = TypeVar("T")

RETRIES = 2
"""Further tries of a call that can be repeated, where nothing tells how many."""
PAUSE_SECONDS = 0.1
"""Before the second try; doubles from try to try."""


class NotSecured(Unavailable):
    """Something answers there, and client and server do not agree on TLS: trying again does not help."""


class Calls:
    """Calls of one gateway over one channel.

    A call is made again if it never got an answer, or only that the gateway shuts down, and if making it twice is
    the same as making it once: whatever the gateway decided stands.
    """

    def __init__(
        self, address: str, security: ClientSecurity, *, timeout_seconds: float | None, retries: int = RETRIES
    ) -> None:
        """Calls this gateway.

        Args:
            address: host:port.
            security: How it is called.
            timeout_seconds: Deadline of a unary call, all its tries together; None = none.
            retries: Further tries of a call that can be repeated.
        """
        self._address = address
        self._security = security
        self._timeout = timeout_seconds
        self._retries = retries

    async def unary(self, method: Callable[..., Awaitable[T]], request: Any, *, repeatable: bool = False) -> T:
        """Calls a unary rpc.

        Args:
            method: Of a stub.
            request: Its message.
            repeatable: Making it twice is the same as making it once.

        Raises:
            NotSecured: The gateway wants TLS and the call does not have it, or the other way round.
            KvscoutError: As the gateway answers, or it does not.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if self._timeout is None else clock() + self._timeout
        left = self._retries if repeatable else 0
        pause = PAUSE_SECONDS
        while True:
            remaining = None if deadline is None else max(0.0, deadline - clock())
            try:
                return await call(method, request, timeout=remaining)
            except Unavailable as error:
                if left == 0 or (error.answered and not isinstance(error, Draining)):
                    raise await self._explained(error) from error
                wait = pause * random.uniform(0.5, 1.0)
                if deadline is not None and clock() + wait >= deadline:
                    raise await self._explained(error) from error
            await asyncio.sleep(wait)
            left, pause = left - 1, 2 * pause

    async def stream(
        self, method: Callable[..., Any], request: Any, *, timeout: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Calls a server-streaming rpc; closed early, it is cancelled.

        Raises:
            NotSecured, KvscoutError: As `unary`.
        """
        try:
            async with aclosing(stream(method, request, timeout=timeout)) as answers:
                async for answer in answers:
                    yield answer
        except Unavailable as error:
            raise await self._explained(error) from error

    async def _explained(self, error: Unavailable) -> KvscoutError:
        """What is known of an error besides: it may be TLS."""
        if error.answered:
            return error
        trouble = await tls_trouble(self._address, self._security)
        return NotSecured(f"{self._address} {trouble}") if trouble else error
