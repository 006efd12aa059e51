"""The services a gateway depends on: an ordered list of equals, of which the first healthy one is used.

The list is given by addresses, and by names `dns://name:port` whose addresses stand in their place and change.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from kvscout_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    KvscoutError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.shards import Shard

log = logging.getLogger("kvscout.gateway")

Stub = TypeVar("Stub")
Answer = TypeVar("Answer")

COOL_DOWN_SECONDS = 1.0
"""Seconds for which a member that failed is passed over while others are left."""
RETIRE_SECONDS = 30.0
"""Seconds for which a member that left the list may still be called: what runs is booked at another by then."""
DNS = "dns://"

_REFUSALS = (Draining, Unauthenticated, PermissionDenied, Unimplemented)
"""Answers that say something of the member or of the gateway's access to it, nothing of the request."""
_TRANSPORT = (Unavailable, DeadlineExceeded, Cancelled)
"""Statuses that the member did not answer itself: it is gone, too slow, or was stopped."""


def is_member_fault(error: KvscoutError) -> bool:
    """Return whether another member may do better; else the error is the answer to the request."""
    return isinstance(error, (*_REFUSALS, InternalError)) or (isinstance(error, _TRANSPORT) and not error.answered)


@dataclass(slots=True, eq=False)
class Member(Generic[Stub]):
    """One service of a list, and how its calls went. Two are never equal."""

    kind: str
    address: str
    channel: grpc.aio.Channel
    stub: Stub
    calls: int = 0
    failures: int = 0
    last_error: str = ""
    avoid_until: float = 0.0
    shard: Shard | None = None
    """The share of the workers that it has; None = all of them."""
    closed: bool = False
    """It has been off the list for a while."""

    @property
    def name(self) -> str:
        """Kind, shard and address."""
        return " ".join(str(part) for part in (self.kind, self.shard, self.address) if part)

    async def call(
        self, method: Callable[[Stub], Callable[..., Awaitable[Answer]]], request: object, timeout_seconds: float
    ) -> Answer:
        """Call an rpc and record how that went.

        Raises:
            KvscoutError: What the service answered, or Unavailable / DeadlineExceeded.
        """
        self.calls += 1
        if self.closed:
            raise Unavailable(f"{self.name} is no longer there")
        try:
            answer = await call(method(self.stub), request, timeout=timeout_seconds)
        except KvscoutError as error:
            if is_member_fault(error):
                self.failed(error)
            else:
                self.works()
            raise
        self.works()
        return answer

    def failed(self, error: KvscoutError) -> None:
        """Record that it did not answer: others are preferred for a while."""
        self.failures += 1
        self.avoid_until = time.monotonic() + COOL_DOWN_SECONDS
        if not self.last_error:
            log.warning("%s fails: %s: %s", self.name, type(error).__name__, error)
        self.last_error = str(error)

    def works(self) -> None:
        """Record that it answered."""
        if self.last_error:
            log.info("%s answers again", self.name)
            self.last_error = ""
            self.avoid_until = 0.0


class UpstreamDown(Unavailable):
    """No member of a list answered: the gateway goes on without it."""

    discreet = "a service behind the gateway does not answer"


def address_order(address: str) -> tuple[int, int, int]:
    """Sort by number: every gateway has the same order, so that all use the same one of the list."""
    host, _, port = address.rpartition(":")
    ip = ipaddress.ip_address(host.strip("[]"))
    return ip.version, int(ip), int(port)


class Failover(Generic[Stub]):
    """An ordered list of members."""

    def __init__(
        self,
        kind: str,
        addresses: Sequence[str],
        make_stub: Callable[[grpc.aio.Channel], Stub],
        security: ClientSecurity,
        *,
        shard: Shard | None = None,
        order: Callable[[str], Any] = address_order,
    ) -> None:
        """Connect lazily.

        Args:
            kind: What the members are, for people.
            addresses: host:port and `dns://name:port`, in order of preference.
            make_stub: What a member is called by.
            security: How.
            shard: Their share of the workers.
            order: Sorts the addresses of one name.
        """
        self.kind = kind
        self._shard = shard
        self._make_stub = make_stub
        self._security = security
        self._order = order
        self._given = tuple(addresses)
        self.names = tuple(address for address in addresses if address.startswith(DNS))
        """DNS names, whose addresses `resolved` sets."""
        self._resolved: dict[str, Sequence[str]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.name = f"{kind} {shard}" if shard else kind
        """For people: what the members are, and their share of the workers if they do not have all."""
        self.primary: Member[Stub] | None = None
        """Comes first, whatever the order of the list; None = the list's order."""
        self.members: list[Member[Stub]] = []
        """In order of preference; another list after each change."""
        self._arrange()

    def resolved(self, name: str, addresses: Sequence[str]) -> tuple[list[Member[Stub]], list[Member[Stub]]]:
        """Replace the addresses of a name; a member that is no longer there may be called for a while still.

        Args:
            name: One of `names`.
            addresses: host:port each.

        Returns:
            The members that are new, and those that left the list.
        """
        self._resolved[name] = sorted(addresses, key=self._order)
        return self._arrange()

    def _arrange(self) -> tuple[list[Member[Stub]], list[Member[Stub]]]:
        known = {member.address: member for member in self.members}
        joined, arranged = [], dict[str, Member[Stub]]()
        for given in self._given:
            server_name = given.removeprefix(DNS).rpartition(":")[0] if given.startswith(DNS) else ""
            for address in self._resolved.get(given, ()) if server_name else (given,):
                if address not in arranged:
                    arranged[address] = known.get(address) or self._member(address, server_name)
                    if address not in known:
                        joined.append(arranged[address])
        left = [member for address, member in known.items() if address not in arranged]
        self.members = list(arranged.values())
        for member in left:
            task = asyncio.get_running_loop().create_task(self._retire(member), name=f"retire {member.name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return joined, left

    def _member(self, address: str, server_name: str) -> Member[Stub]:
        channel = open_channel(address, self._security, server_name=server_name)
        return Member(self.kind, address, channel, self._make_stub(channel), shard=self._shard)

    async def _retire(self, member: Member[Stub]) -> None:
        """Close the channel of a member that left, once what was under way to it is over."""
        await asyncio.sleep(RETIRE_SECONDS)
        member.closed = True
        await member.channel.close()

    def preferred(self) -> list[Member[Stub]]:
        """Return the members in the order to try: the primary, then the list's; those that just failed last."""
        if len(self.members) < 2:
            return self.members
        now, primary = time.monotonic(), self.primary
        return sorted(self.members, key=lambda member: (member.avoid_until > now, member is not primary))

    async def call(
        self,
        method: Callable[[Stub], Callable[..., Awaitable[Answer]]],
        request: object,
        *,
        timeout_seconds: float,
        is_stale: Callable[[Member[Stub], KvscoutError], bool] = lambda member, error: False,
    ) -> tuple[Answer, Member[Stub]]:
        """Call the first member that answers, all within one deadline of which each gets an equal share.

        Args:
            method: Takes a stub, gives its rpc.
            request: The rpc's request.
            timeout_seconds: The deadline.
            is_stale: Returns whether an error that a member answered shows only that it lacks what this gateway
                knows; the next one may have it.

        Returns:
            The answer and who gave it.

        Raises:
            UpstreamDown: If no member answered.
            KvscoutError: Any other error that a member answered with; the next one is tried only if the member is
                stale.
        """
        deadline = time.monotonic() + timeout_seconds
        problem = f"no {self.kind} is configured"
        unknown: KvscoutError | None = None
        order = self.preferred()
        for position, member in enumerate(order):
            share = max(0.0, deadline - time.monotonic()) / (len(order) - position)
            try:
                return await member.call(method, request, share), member
            except KvscoutError as error:
                if not is_member_fault(error):
                    if not is_stale(member, error):
                        raise
                    unknown = error
                    continue
                problem = f"{member.name}: {error}"
        if unknown is not None:
            raise unknown
        raise UpstreamDown(problem, retry_after_seconds=COOL_DOWN_SECONDS)

    async def close(self) -> None:
        """Close every channel."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(member.channel.close() for member in self.members))
