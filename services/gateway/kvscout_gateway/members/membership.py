"""The indexers and schedulers that there are now, and the tasks of each as long as it is there.

::

    a name's addresses ──▶ joined: its watchers say what runs for it: workers are pushed (registration), decisions
                       │           reported and its version checked (upstreams)
                       └─▶ left:   none of that any more; what it has under way ends, bookings move

A lookup that fails, or finds nothing, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kvscout.v1 import gateway_pb2
from kvscout_common.endpoints import bracketed
from kvscout_common.enum_words import value_of
from kvscout_common.registry.dns import LOOKUP_SECONDS, RESOLVE_SECONDS, Resolve, resolve
from kvscout_common.rpc.service_info import Warned
from kvscout_gateway.upstreams.failover import DNS, Failover, Member

log = logging.getLogger("kvscout.gateway")

MAX_ADDRESSES = 64
"""Addresses of one name that are used."""
Work = Callable[[], Coroutine[Any, Any, None]]


class Watcher(Protocol):
    """A part that does something for each member."""

    def join(self, member: Any) -> dict[str, Work]:
        """Return what is to run for a member as long as it is there, by name."""

    def leave(self, member: Any) -> None:
        """Forget a member that is gone."""

    def fill_status(self, member: Any, status: gateway_pb2.HelperStatus) -> None:
        """Add to the status of a member what is known of it."""


class Upstream(Watcher, Protocol):
    """The indexers, or the schedulers."""

    @property
    def lists(self) -> Sequence[Failover[Any]]:
        """The lists of peers that may change."""

    @property
    def members(self) -> Sequence[Member[Any]]:
        """Every peer."""


class Membership:
    """All of them. `run` is a task of the process.

    Args:
        upstreams: The indexers, and the schedulers; each watches its own.
        watcher: Watches all.
        resolve: How a name is looked up.
    """

    def __init__(self, upstreams: Sequence[Upstream], watcher: Watcher, *, resolve: Resolve = resolve) -> None:
        self._upstreams = upstreams
        self._watcher = watcher
        self._resolve = resolve
        self._problems: dict[str, str] = {}
        self._tasks: dict[Member[Any], list[asyncio.Task[None]]] = {}
        self._works = {member: self._join(up, member) for up in upstreams for member in up.members}
        self.read = asyncio.Event()
        """Set when every name was looked up once, whatever came of it."""

    @property
    def members(self) -> list[Member[Any]]:
        """Every indexer, then every scheduler."""
        return [member for upstream in self._upstreams for member in upstream.members]

    def statuses(self) -> list[gateway_pb2.HelperStatus]:
        """Return the state of every indexer and scheduler."""
        statuses = []
        for upstream in self._upstreams:
            for member in upstream.members:
                status = gateway_pb2.HelperStatus(
                    kind=value_of(gateway_pb2.HelperKind, member.kind),
                    address=member.address,
                    healthy=not member.last_error,
                    last_error=member.last_error,
                    calls=member.calls,
                    failures=member.failures,
                )
                for watcher in (self._watcher, upstream):
                    watcher.fill_status(member, status)
                statuses.append(status)
        return statuses

    def warnings(self) -> list[Warned]:
        """Return the names that cannot be looked up, one sentence each."""
        return [f"{name}: {problem}" for name, problem in sorted(self._problems.items())]

    async def run(self) -> None:
        """Follow all of them, for ever."""
        async with asyncio.TaskGroup() as group:
            for member, works in self._works.items():
                self._begin(member, works, group)
            while True:
                await asyncio.gather(
                    *(
                        self._follow(up, of, name, group)
                        for up in self._upstreams
                        for of in up.lists
                        for name in of.names
                    )
                )
                self.read.set()
                await asyncio.sleep(RESOLVE_SECONDS)

    async def _follow(self, upstream: Upstream, of: Failover[Any], name: str, group: asyncio.TaskGroup) -> None:
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await self._resolve(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            self._set_problem(name, f"not resolved, what it was stays: {str(error) or 'timeout'}")
            return
        self._set_problem(name, f"has more than {MAX_ADDRESSES} addresses" if len(found) > MAX_ADDRESSES else "")
        joined, left = of.resolved(name, [f"{bracketed(address)}:{port}" for address in found[:MAX_ADDRESSES]])
        for member in left:
            self._leave(upstream, member)
        for member in joined:
            log.info("%s is available", member.name)
            self._begin(member, self._join(upstream, member), group)

    def _set_problem(self, name: str, problem: str) -> None:
        if problem and problem != self._problems.get(name):
            log.warning("%s %s", name, problem)
        self._problems.pop(name, None)
        if problem:
            self._problems[name] = problem

    def _join(self, upstream: Upstream, member: Member[Any]) -> dict[str, Work]:
        """Return what is to run for a member, by name."""
        return {**self._watcher.join(member), **upstream.join(member)}

    def _begin(self, member: Member[Any], works: dict[str, Work], group: asyncio.TaskGroup) -> None:
        self._tasks[member] = [group.create_task(work(), name=name) for name, work in works.items()]

    def _leave(self, upstream: Upstream, member: Member[Any]) -> None:
        log.info("%s is gone", member.name)
        for task in self._tasks.pop(member):
            task.cancel()
        for watcher in (self._watcher, upstream):
            watcher.leave(member)
