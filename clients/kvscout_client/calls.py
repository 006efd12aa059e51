"""Calls of a gateway: deadlines, retries, and the reasons of failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import DeadlineExceeded, Draining, KvscoutError, Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.http_probe import http_trouble
from kvscout_common.identity.tls_probe import tls_trouble
from kvscout_common.rpc.channel import call, stream

T = TypeVar("T")

RETRIES = 2
"""Further tries of a call that can be repeated, by default."""
PAUSE_SECONDS = 0.1
"""Pause before the second try; it doubles from try to try."""


class NotSecured(Unavailable):
    """A server answers, but client and server do not agree on TLS: trying again does not help."""


class NotGrpc(Unavailable):
    """An HTTP server answers, not one of gRPC: the port is another one."""


class Calls:
    """Calls of one gateway over one channel.

    A call is made again if it never got an answer, or only that the gateway shuts down, and if making it twice is
    the same as making it once: whatever the gateway decided stands.
    """

    def __init__(
        self, address: str, security: ClientSecurity, *, timeout_seconds: float | None, retries: int = RETRIES
    ) -> None:
        """Prepare calls; nothing is sent yet.

        Args:
            address: host:port.
            security: TLS files and bearer token.
            timeout_seconds: Deadline of a unary call, all its tries together; None = none.
            retries: Further tries of a call that can be repeated.
        """
        self._address = address
        self._security = security
        self._timeout = timeout_seconds
        self._retries = retries

    async def unary(self, method: Callable[..., Awaitable[T]], request: Any, *, repeatable: bool = False) -> T:
        """Call a unary rpc.

        Args:
            method: Method of a stub.
            request: Its message.
            repeatable: Making it twice is the same as making it once.

        Raises:
            NotSecured: The gateway wants TLS and the call does not have it, or the other way round.
            NotGrpc: The port is one of HTTP.
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
        """Call a server-streaming rpc; closed early, it is cancelled.

        Raises:
            NotSecured, NotGrpc, KvscoutError: As `unary`.
        """
        try:
            async with aclosing(stream(method, request, timeout=timeout)) as answers:
                async for answer in answers:
                    yield answer
        except Unavailable as error:
            raise await self._explained(error) from error

    async def _explained(self, error: Unavailable) -> KvscoutError:
        """Return an error with its reason, where that is TLS or a port of HTTP."""
        if error.answered:
            return error
        trouble = await tls_trouble(self._address, self._security)
        if trouble:
            return NotSecured(f"{self._address} {trouble}")
        trouble = await http_trouble(self._address)
        return NotGrpc(f"{self._address} {trouble}") if trouble else error


async def started_within(
    seconds: float | None, messages: AsyncIterator[gateway_pb2.GenerateResponse]
) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
    """Yield the messages of a stream whose first output has a deadline.

    Raises:
        DeadlineExceeded: The first output did not come in time.
    """
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                message = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no token came within {seconds:g} s") from None
        if message is None:
            return
        if message.token_ids or message.text:
            deadline = None
        yield message
