"""The indexers and schedulers of a gateway: which there are now, and what is done for each as long as it is there.

::

    a name's addresses ──▶ joined: told of the workers (registration), of decisions (reports), checked
                       └─▶ left:   none of that any more; what it has under way ends, bookings move

A lookup that fails, or finds nothing, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvscout_common.endpoints import bracketed
from kvscout_common.registry.dns import LOOKUP_SECONDS, RESOLVE_SECONDS, Resolve, resolve
from kvscout_common.rpc.service_info import Warned
from kvscout_gateway.members.member_sync import MemberSync
from kvscout_gateway.members.registration import Registration
from kvscout_gateway.upstreams.failover import DNS, Failover, Member
from kvscout_gateway.upstreams.indexer.check import IndexerCheck
from kvscout_gateway.upstreams.indexer.indexers import Indexers
from kvscout_gateway.upstreams.indexer.reporter import Reporter
from kvscout_gateway.upstreams.scheduler.attachment import Attachment
from kvscout_gateway.upstreams.scheduler.booking import Schedulers

log = logging.getLogger("kvscout.gateway")

MAX_ADDRESSES = 64
"""Of one name."""
Work = Callable[[], Coroutine[Any, Any, None]]


class Membership:
    """All of them. `run` is a task of the process.

    Args:
        indexers: By shard.
        schedulers: In order of preference.
        registration: Tells them of the workers.
        reporter: Tells indexers of decisions.
        check: Asks indexers what is wrong.
        attachment: Told which schedulers are gone.
        resolve: How a name is looked up.
    """

    def __init__(
        self,
        indexers: Indexers,
        schedulers: Schedulers,
        *,
        registration: Registration,
        reporter: Reporter,
        check: IndexerCheck,
        attachment: Attachment,
        resolve: Resolve = resolve,
    ) -> None:
        self._indexers = indexers
        self._schedulers = schedulers
        self._registration = registration
        self._reporter = reporter
        self._check = check
        self._attachment = attachment
        self._resolve = resolve
        self._problems: dict[str, str] = {}
        self._syncs: dict[Member[Any], MemberSync] = {}
        self._tasks: dict[Member[Any], list[asyncio.Task[None]]] = {}
        self._works = {member: self._join(member) for member in self.members}
        self.read = asyncio.Event()
        """Set when every name was looked up once, whatever came of it."""

    @property
    def members(self) -> list[Member[Any]]:
        """Every indexer, then every scheduler."""
        return [*self._indexers.members, *self._schedulers.members]

    def sync(self, member: Member[Any]) -> MemberSync:
        """What brings one of `members` to what this gateway knows of the workers."""
        return self._syncs[member]

    def resync(self, member: Member[Any]) -> None:
        """One does not know workers that this gateway knows."""
        if member in self._syncs:
            self._syncs[member].suspect()

    def warnings(self) -> list[Warned]:
        """Names that cannot be looked up, one sentence each."""
        return [f"{name}: {problem}" for name, problem in sorted(self._problems.items())]

    async def run(self) -> None:
        """Keeps all of them for ever."""
        async with asyncio.TaskGroup() as group:
            for member, works in self._works.items():
                self._begin(member, works, group)
            while True:
                await asyncio.gather(*(self._follow(of, name, group) for of in self._lists() for name in of.names))
                self.read.set()
                await asyncio.sleep(RESOLVE_SECONDS)

    def _lists(self) -> list[Failover[Any]]:
        return [*self._indexers.shards, self._schedulers]

    async def _follow(self, of: Failover[Any], name: str, group: asyncio.TaskGroup) -> None:
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await self._resolve(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            self._say(name, f"not resolved, what it was stays: {str(error) or 'timeout'}")
            return
        self._say(name, f"has more than {MAX_ADDRESSES} addresses" if len(found) > MAX_ADDRESSES else "")
        joined, left = of.resolved(name, [f"{bracketed(address)}:{port}" for address in found[:MAX_ADDRESSES]])
        for member in left:
            self._leave(member)
        for member in joined:
            log.info("%s is there", member.name)
            self._begin(member, self._join(member), group)

    def _say(self, name: str, problem: str) -> None:
        if problem and problem != self._problems.get(name):
            log.warning("%s %s", name, problem)
        self._problems.pop(name, None)
        if problem:
            self._problems[name] = problem

    def _join(self, member: Member[Any]) -> dict[str, Work]:
        """What is to be done for a member, by name."""
        sync = self._syncs[member] = self._registration.join(member.name, member.stub)
        works: dict[str, Work] = {f"sync {member.name}": lambda: self._registration.keep(sync)}
        if member in self._indexers.members:
            checked = self._check.join(member)
            works[f"report to {member.name}"] = self._reporter.join(member).run
            works[f"check {member.name}"] = lambda: self._check.keep(checked)
        return works

    def _begin(self, member: Member[Any], works: dict[str, Work], group: asyncio.TaskGroup) -> None:
        self._tasks[member] = [group.create_task(work(), name=name) for name, work in works.items()]

    def _leave(self, member: Member[Any]) -> None:
        log.info("%s is no longer there", member.name)
        for task in self._tasks.pop(member):
            task.cancel()
        self._registration.leave(self._syncs.pop(member))
        self._reporter.leave(member)
        self._check.leave(member)
        self._attachment.left(member)
