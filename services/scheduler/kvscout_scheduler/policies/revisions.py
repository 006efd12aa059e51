"""Revisions by weight: which workers of a rollout take a session, before the policy chooses among them.

::

    session, else request id ──▶ a draw for each revision, weighted ──▶ the revisions in order ──▶ the first that can

Each revision draws -ln(u) / weight with u from the hash of session and revision, and the lowest draw comes first: a
revision comes first with a chance of its weight over all weights (weighted rendezvous hashing). All replicas draw
alike without a word, a session keeps its revision, and of other weights only those sessions move that have to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvscout_common.errors import InternalError
from kvscout_common.worker import Role
from kvscout_scheduler.policies.eligibility import constraints_of
from kvscout_scheduler.values.request import UNCONSTRAINED, SelectionRequest

if TYPE_CHECKING:
    from kvscout_scheduler.load.pool import Pool

_HASHES: Final = 2.0**64


class RevisionChoice(NamedTuple):
    """The revision whose workers take a request."""

    slots: int
    """Its eligible workers, as a set."""
    meant: str | None = None
    """The revision that the weights say; None: they say nothing of the request."""
    taken: str = ""
    """The one whose workers these are; another one where no worker of `meant` can take it."""

    @property
    def note(self) -> str:
        """Return what an explanation says of it."""
        if self.meant is None:
            return ""
        if self.taken == self.meant:
            return f"of {_named(self.meant)}, by its weight"
        return f"no worker of {_named(self.meant)} can take it"


NO_CHOICE: Final = RevisionChoice(0)
"""Of requests that no weights say anything of."""


def of_revision(pool: Pool, request: SelectionRequest, slots: int, weights: Mapping[str, float]) -> RevisionChoice:
    """Return those eligible workers that are of the revision of a request's session.

    A prefill worker follows its decode worker, and a request that allows workers of some revisions only has its
    choice among these.

    Args:
        pool: Where the request looks for a worker.
        request: A validated request.
        slots: The workers that may take it, as a set, not empty; those with room, if any has.
        weights: By revision.
    """
    if request.role is Role.PREFILL:
        return RevisionChoice(slots)
    by_revision, allowed = pool.by_revision(), _allowed(pool, request)
    named = [name for name in weights if by_revision.get(name, 0) & allowed]
    if not named:
        return RevisionChoice(slots)
    order = in_order(weights, named, _draw_key(pool, request))
    for name in (*order, *(name for name in by_revision if name not in order)):
        kept = by_revision[name] & slots
        if kept:
            return RevisionChoice(kept, order[0], name)
    raise InternalError("every eligible worker is of a revision")


def in_order(weights: Mapping[str, float], names: list[str], key: int) -> list[str]:
    """Return revisions in the order in which a session of a key goes to them."""

    def draw(name: str) -> tuple[float, str]:
        weight, drawn = weights[name], (xxh3_64_intdigest(name.encode(), key) + 0.5) / _HASHES
        return (-math.log(drawn) / weight if weight else math.inf, name)

    return sorted(names, key=draw)


def _allowed(pool: Pool, request: SelectionRequest) -> int:
    """Return the workers that a request asks for; those that it excludes failed it, or miss their prefill worker."""
    allowed, constraints = pool.everyone, request.constraints
    if constraints is not UNCONSTRAINED:
        for constraint in constraints_of(constraints._replace(excluded_worker_ids=frozenset())):
            allowed = constraint.kept(pool, allowed)
    return allowed


def _draw_key(pool: Pool, request: SelectionRequest) -> int:
    """Return the session of a request; of one without, what its id or else its prompt says."""
    session = request.session
    if not session:
        session = pool.sessions.of(request, pool.prompts(request.prompt, request.other_prompts, request.isl_tokens))
    return session or xxh3_64_intdigest(request.request_id.encode("utf-8", "replace") or request.prompt.block_hashes)


def _named(revision: str) -> str:
    return f"revision {revision}" if revision else "those without a revision"
