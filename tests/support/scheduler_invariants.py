"""Invariants of the scheduler's structures, for tests: each raises AssertionError where one does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvscout_lab.simulation.simulation import Simulation
from kvscout_scheduler.bookings.bookings import Bookings
from kvscout_scheduler.load.active_load import ReferenceAllocation, ReferenceLoad
from kvscout_scheduler.load.native import NativeLoad
from kvscout_scheduler.load.prefix_tree import PrefixTree
from kvscout_scheduler.replicas.claim import ClaimSet
from kvscout_scheduler.replicas.mirrors import claim_of
from kvscout_scheduler.replicas.ownership import Ownership
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import HASH_BYTES


def check_scheduler(core: Scheduler) -> None:
    """Raise AssertionError if any structure contradicts another."""
    check_bookings(core.bookings)
    for pool in core.workers:
        allocations = [booking.allocation for booking in core.bookings if booking.pool is pool]
        check_load(pool.load, allocations)


def check_idle(simulation: Simulation) -> None:
    """Raise AssertionError unless a simulation is idle, and its schedulers hold their invariants."""
    simulation.check_idle()
    for replica in simulation.replicas:
        check_scheduler(replica.core)


def check_bookings(bookings: Bookings) -> None:
    """Raise AssertionError if the structures contradict each other."""
    for key, booking in bookings._active.items():
        assert booking.key == key
        assert booking in bookings._members[booking.pool, booking.allocation.slot]
        holders = bookings.owners.owns(booking) + (booking.lease_bucket is not None)
        assert holders == (not booking.mirror), "a lease or an owner, a mirror has neither"
    leased = [booking for booking in bookings._active.values() if booking.lease_bucket is not None]
    assert len(bookings._leases) == len(leased), "no lease without a booking"
    assert sum(map(len, bookings._members.values())) == len(bookings._active), "no member without a booking"
    assert bookings._by_tenant == Counter(key.tenant for key in bookings._active), "tenants add up"


def check_load(load: Any, allocations: Iterable[Any]) -> None:
    """Raise AssertionError unless the columns follow from these allocations, all that there are."""
    if isinstance(load, ReferenceLoad):
        check_reference(load, allocations)
    elif isinstance(load, NativeLoad):
        load._core.check_invariants(list(allocations))
    else:
        load.check_invariants(allocations)


def check_reference(load: ReferenceLoad, allocations: Iterable[ReferenceAllocation]) -> None:
    """Raise AssertionError unless the columns follow from these allocations, all that there are."""
    size = len(load.requests)
    requests, prefill, blocks = [0] * size, [0] * size, [0] * size
    for allocation in allocations:
        requests[allocation.slot] += 1
        prefill[allocation.slot] += allocation.prefill_tokens
        blocks[allocation.slot] += allocation.private_blocks
    for tree in load._trees.values():
        check_tree(tree)
        for slot, active in recount(tree).items():
            blocks[slot] += active
    assert requests == load.requests, "requests add up"
    assert prefill == load.prefill_tokens, "prefill tokens add up"
    assert blocks == load.decode_blocks, "blocks add up"
    assert min([0, *prefill, *blocks]) == 0, "nothing is negative"


def recount(tree: PrefixTree) -> Counter[int]:
    """Return distinct active blocks of each worker, counted from the runs."""
    blocks: Counter[int] = Counter()
    waiting = [tree._root]
    while waiting:
        node = waiting.pop()
        blocks.update(dict.fromkeys(node.holders, len(node.run) // HASH_BYTES))
        waiting.extend(node.children.values())
    return blocks


def runs_of(tree: PrefixTree) -> dict[bytes, dict[int, int]]:
    """Holders of each run, by the whole prefix up to its end; the same whatever the order of operations."""
    found: dict[bytes, dict[int, int]] = {}
    waiting = [(b"", tree._root)]
    while waiting:
        prefix, node = waiting.pop()
        for child in node.children.values():
            found[prefix + child.run] = dict(child.holders)
            waiting.append((prefix + child.run, child))
    return found


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError if the structure contradicts its description."""
    waiting = [tree._root]
    while waiting:
        node = waiting.pop()
        through: Counter[int] = Counter()
        for key, child in node.children.items():
            assert child.parent is node, "child knows its parent"
            assert child.run.startswith(key), "a run is filed under its first block"
            assert len(child.run) % HASH_BYTES == 0, "runs are whole blocks"
            assert all(count > 0 for count in child.holders.values()), "no holder counted 0"
            assert child.ends or len(child.children) > 1, "runs are as long as they can be"
            through.update(child.holders)
            waiting.append(child)
        if node is not tree._root:
            assert all(count <= node.holders.get(slot, 0) for slot, count in through.items()), "holders shrink"
            assert node.holders, "a run is active somewhere"
            assert sum(node.holders.values()) == sum(through.values()) + node.ends, "paths add up"


def check_claims(claims: ClaimSet) -> None:
    """Raise AssertionError if the digest is not that of the claims."""
    digest = 0
    for claim in claims.values():
        digest ^= claim.mark()
    assert digest == claims.digest
    assert claims._marks.keys() == claims.sent_sequence.keys() == claims.keys()


def check_ownership(ownership: Ownership) -> None:
    """Raise AssertionError if bookings and claims contradict each other."""
    check_claims(ownership.log.claims)
    ours = {booking.key for booking in ownership._bookings if not booking.mirror}
    assert ours == {key for key, claim in ownership.log.claims.items() if claim.active}, "a claim for each of ours"
    assert set(ownership._over) == {key for key, claim in ownership.log.claims.items() if not claim.active}
    for view in ownership.views.values():
        check_claims(view.claims)
    for key in {key for view in ownership.views.values() for key in view.claims} | {b.key for b in ownership._bookings}:
        held, booking = ownership.holder(key), ownership._bookings.find(key)
        if booking is None:
            assert held is None or key in ownership._unplaced_at, f"{key} is held by {held}, and not here"
        else:
            assert held is not None, f"{key} is here, and nobody's"
            assert booking.mirror == (held.by != ownership.me)
            claim = held.claim
            assert claim_of(booking, claim.term, claim.owner_since) == claim, f"{booking} is claimed as {claim}"
