"""The services a gateway depends on: an ordered list of equals, of which the first healthy one is used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from kvscout_common.channel import ClientSecurity, call, open_channel
from kvscout_common.errors import DeadlineExceeded, InternalError, KvscoutError, Unavailable

Stub = TypeVar("Stub")
Answer = TypeVar("Answer")

COOL_DOWN_SECONDS = 1.0
"""How long a member that failed is passed over while others are left."""

_MEMBER_FAULTS = (Unavailable, DeadlineExceeded, InternalError)


@dataclass(slots=True)
class Member(Generic[Stub]):
    """One service of a list, and how its calls went."""

    kind: str
    address: str
    channel: grpc.aio.Channel
    stub: Stub
    calls: int = 0
    failures: int = 0
    last_error: str = ""
    avoid_until: float = 0.0

    async def call(
        self, method: Callable[[Stub], Callable[..., Awaitable[Answer]]], request: object, timeout_seconds: float
    ) -> Answer:
        """Calls an rpc and keeps account of it.

        Raises:
            KvscoutError: What the service answered, or Unavailable / DeadlineExceeded.
        """
        self.calls += 1
        try:
            answer = await call(method(self.stub), request, timeout=timeout_seconds)
        except _MEMBER_FAULTS as error:
            # UNAVAILABLE is also an answer ("no worker now"); only grpc's own kind means the member is gone.
            if error.answered:
                self.last_error = ""
            else:
                self.failures += 1
                self.last_error = str(error)
                self.avoid_until = time.monotonic() + COOL_DOWN_SECONDS
            raise
        except KvscoutError:
            self.last_error = ""
            raise
        self.last_error = ""
        self.avoid_until = 0.0
        return answer


class Failover(Generic[Stub]):
    """An ordered list of members."""

    def __init__(
        self,
        kind: str,
        addresses: Sequence[str],
        make_stub: Callable[[grpc.aio.Channel], Stub],
        security: ClientSecurity,
    ) -> None:
        self.kind = kind
        self.members: list[Member[Stub]] = []
        for address in addresses:
            channel = open_channel(address, security)
            self.members.append(Member(kind, address, channel, make_stub(channel)))

    def preferred(self) -> list[Member[Stub]]:
        """Members in the order to try: the list's, those that just failed last."""
        now = time.monotonic()
        return sorted(self.members, key=lambda member: member.avoid_until > now)

    async def call(
        self,
        method: Callable[[Stub], Callable[..., Awaitable[Answer]]],
        request: object,
        *,
        timeout_seconds: float,
    ) -> tuple[Answer, Member[Stub]]:
        """Calls the first member that answers, all within one deadline.

        Returns:
            The answer and who gave it.

        Raises:
            Unavailable: If no member answered.
            KvscoutError: Any other error that a member answered with; it is not tried on the next.
        """
        deadline = time.monotonic() + timeout_seconds
        problem = f"no {self.kind} is configured"
        for member in self.preferred():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return await member.call(method, request, left), member
            except _MEMBER_FAULTS as error:
                if error.answered:
                    raise
                problem = f"{self.kind} {member.address}: {error}"
        raise HelperDown(problem)

    async def close(self) -> None:
        """Closes every channel."""
        await asyncio.gather(*(member.channel.close() for member in self.members))


class HelperDown(Unavailable):
    """No member of a list answered: the gateway goes on without it."""
