"""What gateways tell indexers and schedulers of workers, and what they conclude from what those list."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest
from support.processes import DEADLINE_SECONDS, eventually
from support.worker_service import WorkerService, worker_service

from kvscout.v1 import scheduler_pb2_grpc
from kvscout_common.errors import FailedPrecondition, Unavailable
from kvscout_common.registry import worker_proto, worker_rpcs
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import DEFAULT_TENANT, EventEndpoint, WorkerSpec
from kvscout_gateway.members import member_list, member_sync, registration
from kvscout_gateway.members.registration import Registration, problem
from kvscout_gateway.upstreams.failover import Member

A = WorkerSpec("a", "m", 16)
B = WorkerSpec("b", "m", 16)


@dataclass
class Node:
    """A gateway as far as registration goes."""

    registry: Registry
    registration: Registration
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def sources(self) -> dict[str, Source]:
        return {entry.spec.worker_id: entry.source for entry in self.registry.entries()}

    def die(self) -> None:
        for task in self.tasks:
            task.cancel()


@dataclass
class Fleet:
    """Two services and the gateways in front of them."""

    services: list[WorkerService]
    stubs: "list[scheduler_pb2_grpc.SchedulerAsyncStub]"
    stack: AsyncExitStack

    def node(self, services: Sequence[int] = (0, 1), *, shared: bool = False) -> Node:
        """One more gateway; `shared`: its registry is the one in NATS."""
        registry = Registry(time.monotonic)
        registration = Registration(registry, shared=shared)
        node = Node(registry, registration)
        members = [Member("service", str(index), Mock(), self.stubs[index]) for index in services]
        works = [work for member in members for work in registration.join(member).values()]
        node.tasks = [asyncio.ensure_future(work()) for work in works]
        node.tasks.append(asyncio.ensure_future(_expire(registry)))
        self.stack.callback(node.die)
        return node


async def _expire(registry: Registry) -> None:
    while True:
        registry.expire()
        await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(member_sync, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(member_sync, "PASSED_ON_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(member_sync, "PASSED_ON_LEASE_SECONDS", 2)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(worker_service()) for _ in range(2)]
        yield Fleet([service for service, _ in pairs], [stub for _, stub in pairs], stack)


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition)


async def rounds(node: Node, count: int = 3) -> None:
    """Lets every member be asked so many times more."""
    for member in node.registration.members:
        for _ in range(count):
            before = member._listed_at
            await until(lambda member=member, before=before: member._listed_at != before)  # type: ignore[misc]


async def test_members_know_a_worker_when_flush_returns(fleet: Fleet) -> None:
    node = fleet.node()
    node.registry.register(A)
    await node.registration.flush()
    assert [service.worker_ids for service in fleet.services] == [["a"], ["a"]]
    node.registry.update(replace(A, total_kv_blocks=7))
    node.registry.register(B)
    await node.registration.flush()
    assert all(service.specs["a"].total_kv_blocks == 7 for service in fleet.services)
    node.registry.remove(DEFAULT_TENANT, "a")
    await node.registration.flush()
    assert [service.worker_ids for service in fleet.services] == [["b"], ["b"]]
    calls = [service.calls["RegisterWorker"] for service in fleet.services]
    await rounds(node)
    assert calls == [service.calls["RegisterWorker"] for service in fleet.services], "nothing is told twice"


async def test_a_thousand_workers_are_told_at_once(fleet: Fleet) -> None:
    node = fleet.node()
    for number in range(1000):
        node.registry.register(replace(A, worker_id=f"w{number}"))
    await node.registration.flush(DEADLINE_SECONDS)
    assert [len(service.worker_ids) for service in fleet.services] == [1000, 1000]


async def test_a_worker_that_is_removed_and_added_again_is_new_to_members(fleet: Fleet) -> None:
    node = fleet.node()
    node.registry.register(A)
    await node.registration.flush()
    node.registry.remove(DEFAULT_TENANT, "a")
    node.registry.register(A)
    await node.registration.flush()
    for service in fleet.services:
        assert service.calls["RemoveWorker"] == 1
        assert service.worker_ids == ["a"]


async def test_a_member_that_is_away_is_told_when_it_is_back(fleet: Fleet) -> None:
    node = fleet.node()
    await until(lambda: all(member.tried for member in node.registration.members))
    await fleet.services[1].stop()
    node.registry.register(A)
    with pytest.raises(Unavailable, match="service 1"):
        await node.registration.flush(0.3)
    await until(lambda: fleet.services[0].worker_ids == ["a"])
    assert node.registration.members[1].pending == 1
    await fleet.services[1].start()
    await until(lambda: fleet.services[1].worker_ids == ["a"])
    await node.registration.flush()


async def test_a_member_that_restarted_is_told_again(fleet: Fleet) -> None:
    node = fleet.node()
    node.registry.register(A, lease_seconds=60)
    await node.registration.flush()
    for service in fleet.services:
        service.forget()
    await until(lambda: all(service.worker_ids == ["a"] for service in fleet.services))
    assert node.sources() == {"a": Source.RPC}
    assert all(entry.lease_seconds == 60 for s in fleet.services for entry in s.registry.entries())


async def test_a_member_that_lacks_workers_gets_them_at_once_when_a_request_meets_that(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_sync, "SYNC_SECONDS", 60.0)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 60.0)
    monkeypatch.setattr(member_sync, "SUSPECT_SECONDS", 0.0)
    node = fleet.node()
    node.registry.register(A)
    await node.registration.flush()
    service, member = fleet.services[0], node.registration.members[0]
    service.forget()
    began = time.monotonic()
    assert await member.resync() >= began
    assert service.worker_ids == ["a"]
    began = time.monotonic()
    assert await member.resync() < began, "it lacked none"
    service.forget()
    member.failed("away")
    assert await member.resync() >= began, "nor is a member waited for that was away"


async def test_workers_of_others_are_adopted_but_not_told(fleet: Fleet) -> None:
    owner, other = fleet.node(), fleet.node()
    owner.registry.register(A)
    await until(lambda: other.sources() == {"a": Source.PEER})
    owner.registry.remove(DEFAULT_TENANT, "a")
    await until(lambda: other.sources() == {})
    await rounds(other)
    assert fleet.services[0].worker_ids == []


async def test_a_worker_registered_with_one_member_is_known_to_the_others_as_long_as_it_is_there(fleet: Fleet) -> None:
    """As publishers do that know indexers only."""
    nodes = fleet.node(), fleet.node()
    origin, other = fleet.services
    origin.registry.register(A, lease_seconds=60)
    await until(lambda: other.worker_ids == ["a"])
    assert [entry.source for service in fleet.services for entry in service.registry.entries()] == ["rpc", "peer"]
    drained = replace(A, draining=True)
    origin.registry.update(drained)
    await until(lambda: other.specs["a"] == drained)
    # Longer than the lease of what was passed on: it is renewed while it is there.
    for node in nodes:
        await rounds(node, 24)
    assert other.worker_ids == ["a"]
    origin.registry.remove(DEFAULT_TENANT, "a")
    await until(lambda: not other.worker_ids and not any(node.sources() for node in nodes))
    await rounds(nodes[0])
    assert not origin.worker_ids


async def test_what_was_passed_on_is_the_members_own_once_it_is_registered_there(fleet: Fleet) -> None:
    node = fleet.node()
    fleet.services[0].registry.register(A, lease_seconds=60)
    await until(lambda: fleet.services[1].worker_ids == ["a"])
    fleet.services[1].registry.register(replace(A, total_kv_blocks=5), lease_seconds=60)
    await rounds(node)
    assert fleet.services[1].specs["a"].total_kv_blocks == 5
    fleet.services[0].registry.remove(DEFAULT_TENANT, "a")
    await until(lambda: fleet.services[0].worker_ids == ["a"])


async def test_what_another_gateway_removes_stays_removed(fleet: Fleet) -> None:
    owner, other = fleet.node(), fleet.node()
    for lease in (0, 60):
        owner.registry.register(A, lease_seconds=lease)
        await until(lambda: other.sources() == {"a": Source.PEER})
        other.registration.take_over(DEFAULT_TENANT, "a")
        other.registry.remove(DEFAULT_TENANT, "a")
        await other.registration.flush()
        await until(lambda: owner.sources() == {})
        await rounds(owner)
        await rounds(other)
        assert [service.worker_ids for service in fleet.services] == [[], []]


async def test_what_another_gateway_changes_stays_changed(fleet: Fleet) -> None:
    owner, other = fleet.node(), fleet.node()
    owner.registry.register(A)
    await until(lambda: other.sources() == {"a": Source.PEER})
    other.registration.take_over(DEFAULT_TENANT, "a")
    other.registry.set_draining(DEFAULT_TENANT, "a", draining=True)
    await other.registration.flush()
    await until(lambda: owner.sources() == {"a": Source.PEER})
    await until(lambda: owner.registry.get(DEFAULT_TENANT, "a").spec.draining)
    assert all(service.specs["a"].draining for service in fleet.services)
    fleet.services[0].forget()
    await until(lambda: "a" in fleet.services[0].specs)
    assert fleet.services[0].specs["a"].draining


async def test_a_lease_ends_everywhere_unless_any_gateway_renews_it(fleet: Fleet) -> None:
    first, second = fleet.node(), fleet.node()
    first.registry.register(A, lease_seconds=3)
    await first.registration.flush()
    await until(lambda: second.sources() == {"a": Source.PEER})

    def kept_by_others() -> bool:
        """Whether the first one's own lease has ended, while the second one renews it everywhere."""
        second.registration.keep_alive(DEFAULT_TENANT, ["a"])
        assert [service.worker_ids for service in fleet.services] == [["a"], ["a"]]
        return first.sources() == {"a": Source.PEER}

    await until(kept_by_others)
    await until(lambda: [service.worker_ids for service in fleet.services] == [[], []])
    await until(lambda: (first.sources(), second.sources()) == ({}, {}))


async def test_a_lease_that_lapsed_at_a_member_out_of_reach_is_told_again(fleet: Fleet) -> None:
    node = fleet.node()
    node.registry.register(A, lease_seconds=1)
    await node.registration.flush()
    await fleet.services[1].stop()

    async def renewed() -> bool:
        node.registry.keep_alive(DEFAULT_TENANT, ["a"])
        node.registration.keep_alive(DEFAULT_TENANT, ["a"])
        return not fleet.services[1].worker_ids

    await eventually(renewed)
    await fleet.services[1].start()

    async def back() -> bool:
        await renewed()
        return fleet.services[1].worker_ids == ["a"]

    await eventually(back)
    assert node.sources() == {"a": Source.RPC}


async def test_a_gateway_that_restarts_tells_a_member_that_restarted_what_the_other_knows(fleet: Fleet) -> None:
    before = fleet.node()
    before.registry.register(A, lease_seconds=50)
    before.registry.register(B)
    await before.registration.flush()
    before.die()
    fleet.services[1].forget()
    after = fleet.node()
    await until(lambda: fleet.services[1].worker_ids == ["a", "b"])
    # The one with a lease is known there as long as the other member knows it; nobody may be left to renew it here.
    listed = [(entry.source, bool(entry.lease_seconds)) for entry in fleet.services[1].registry.entries()]
    assert listed == [(Source.PEER, True), (Source.RPC, False)]
    assert after.sources() == {"a": Source.PEER, "b": Source.PEER}


async def test_a_member_that_restarts_is_told_what_a_gone_gateway_registered(fleet: Fleet) -> None:
    gone, left = fleet.node([0]), fleet.node([0])
    gone.registry.register(A)
    await until(lambda: left.sources() == {"a": Source.PEER})
    gone.die()
    fleet.services[0].forget()
    await until(lambda: fleet.services[0].worker_ids == ["a"])
    assert left.sources() == {"a": Source.PEER}


async def test_peers_stay_while_no_member_can_be_reached_and_go_when_one_says_so(fleet: Fleet) -> None:
    owner, other = fleet.node(), fleet.node()
    owner.registry.register(A)
    await until(lambda: other.sources() == {"a": Source.PEER})
    owner.die()
    for service in fleet.services:
        await service.stop()
    await until(lambda: all(member.error for member in other.registration.members))
    assert other.sources() == {"a": Source.PEER}
    fleet.services[0].registry.remove(DEFAULT_TENANT, "a")
    await fleet.services[0].start()
    await until(lambda: other.sources() == {})


async def test_one_refused_registration_keeps_no_other_worker_back(fleet: Fleet) -> None:
    node = fleet.node()
    fleet.services[0].refused.add("a")
    node.registry.register(A)
    node.registry.register(B)
    await until(lambda: fleet.services[0].worker_ids == ["b"])
    member = node.registration.members[0]
    await until(lambda: shown([problem(member)]) == ["refuses a: worker_id: not this one"])
    await until(lambda: member.pending == 1)
    with pytest.raises(Unavailable, match="refuses a"):
        await node.registration.flush(0.1)
    fleet.services[0].refused.clear()
    await until(lambda: fleet.services[0].worker_ids == ["a", "b"])
    await until(lambda: not problem(member))


async def test_the_file_of_a_gateway_wins_over_what_others_say(fleet: Fleet) -> None:
    node = fleet.node()
    node.registry.replace_source(Source.FILE, [A])
    await node.registration.flush()
    for service in fleet.services:
        service.registry.remove(DEFAULT_TENANT, "a")
    await until(lambda: all(service.worker_ids == ["a"] for service in fleet.services))
    assert node.sources() == {"a": Source.FILE}
    node.registry.replace_source(Source.FILE, [B])
    await until(lambda: all(service.worker_ids == ["b"] for service in fleet.services))


async def test_workers_of_a_members_own_file_are_changed_there_only(fleet: Fleet) -> None:
    fleet.services[0].from_file(A)
    node = fleet.node()
    await until(lambda: node.sources() == {"a": Source.PEER})
    with pytest.raises(FailedPrecondition, match="file of service 0"):
        node.registration.take_over(DEFAULT_TENANT, "a")
    await rounds(node)
    assert fleet.services[1].worker_ids == []
    node.registry.register(replace(A, total_kv_blocks=5))
    await node.registration.flush()
    await rounds(node)
    assert (fleet.services[0].specs["a"].total_kv_blocks, fleet.services[1].specs["a"].total_kv_blocks) == (0, 5)
    assert node.sources() == {"a": Source.RPC}


async def test_what_is_in_the_shared_registry_is_neither_told_nor_learned(fleet: Fleet) -> None:
    node = fleet.node(shared=True)
    for service in fleet.services:
        service.registry.register(A, source=Source.NATS)
    node.registry.register(A, source=Source.NATS)
    node.registration.announce(A)
    node.registration.keep_alive("default", ["a"])
    await node.registration.flush()
    await rounds(node)
    node.registry.remove("default", "a", source=Source.NATS)
    await rounds(node)  # members hear of it later; until then it must not come back from them
    assert node.sources() == {}
    assert all(not service.calls for service in fleet.services)
    assert all(service.worker_ids == ["a"] for service in fleet.services)


async def test_a_member_that_does_not_follow_the_shared_registry_is_told_of(fleet: Fleet) -> None:
    node = fleet.node(shared=True)
    node.registry.register(A, source=Source.NATS)
    fleet.services[0].registry.register(A, source=Source.NATS)
    follows, does_not = node.registration.members
    await until(lambda: "does not follow" in shown([problem(does_not)])[0])
    assert problem(follows) == ""
    fleet.services[1].registry.register(A, source=Source.NATS)
    await until(lambda: not problem(does_not))


async def test_workers_of_a_dns_name_are_told_and_taken_back(fleet: Fleet) -> None:
    node = fleet.node(shared=True)
    node.registry.replace_source(Source.DNS, [A])
    await until(lambda: all(service.worker_ids == ["a"] for service in fleet.services))
    assert all(e.lease_seconds == member_sync.FILE_LEASE_SECONDS for s in fleet.services for e in s.registry.entries())
    node.registry.replace_source(Source.DNS, [])
    await until(lambda: all(service.worker_ids == [] for service in fleet.services))


async def test_what_is_declared_to_a_member_itself_is_neither_told_to_it_nor_taken_back(fleet: Fleet) -> None:
    for service in fleet.services:
        service.registry.replace_source(Source.KUBERNETES, [A])
    node = fleet.node()
    await rounds(node)
    for specs in ([A], [A.with_draining(True)]):
        node.registry.replace_source(Source.KUBERNETES, specs)
        for service in fleet.services:
            service.registry.replace_source(Source.KUBERNETES, specs)
        await rounds(node)
        await node.registration.flush()
    node.registry.replace_source(Source.KUBERNETES, [])
    await node.registration.flush()
    for service in fleet.services:
        assert (service.calls["RegisterWorker"], service.calls["RemoveWorker"]) == (0, 0)
        assert service.worker_ids == ["a"], "that its own watch says otherwise is its own affair"


async def test_what_engines_told_a_member_is_no_change_by_another_gateway(fleet: Fleet) -> None:
    node = fleet.node()
    asked = replace(A, http_endpoint="http://a")
    node.registry.register(asked)
    await node.registration.flush()
    facts = EngineFacts("http://a", (EventEndpoint(0, "tcp://a:1"),))
    for service in fleet.services:
        service.registry.complete("default", "a", facts)
    await rounds(node)
    assert node.sources() == {"a": Source.RPC}
    assert all(service.specs["a"] == facts.complete(asked) for service in fleet.services)


class Stretches:
    """Counts calls of a function between two turns of others on the loop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = 0
        self.longest = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._function(*arguments)

    async def watch(self) -> None:
        while True:
            before = self.calls
            await asyncio.sleep(0)
            self.longest = max(self.longest, self.calls - before)


async def test_a_round_over_a_fleet_leaves_others_their_turn_and_reads_only_what_is_new(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Stretches(worker_proto.spec_from_proto)
    written = Stretches(worker_proto.spec_to_proto)
    monkeypatch.setattr(member_list, "spec_from_proto", read)
    monkeypatch.setattr(worker_rpcs, "spec_to_proto", written)
    specs = [replace(A, worker_id=f"w{number}") for number in range(500)]
    for spec in specs:
        fleet.services[0].registry.register(spec)
    watching = [asyncio.create_task(stretches.watch()) for stretches in (read, written)]
    node = fleet.node([0])
    await until(lambda: len(node.sources()) == len(specs))
    await rounds(node)
    assert read.calls == len(specs)
    lists = written.calls
    await rounds(node)
    assert written.calls == lists, "what has not changed is not listed again"
    fleet.services[0].registry.update(replace(specs[7], total_kv_blocks=3))
    await until(lambda: node.registry.get("default", "w7").spec.total_kv_blocks == 3)
    assert read.calls == len(specs) + 1
    for task in watching:
        task.cancel()
    assert 0 < read.longest <= member_list.WORKERS_A_SLICE
    assert 0 < written.longest <= worker_rpcs.WORKERS_A_TURN
