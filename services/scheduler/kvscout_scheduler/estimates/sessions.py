"""Sessions: which requests are turns of one conversation, and where it was last; pure.

A caller may say a request's session. Of a request without one it is found by *lineage*: a prompt that begins with all
complete blocks of an earlier one continues that one's session, since a client sends a conversation again with each
turn. Compared are whole prefixes, not only their last blocks, so that what is found is exact. A session ends in one
prompt, its last: another prompt that continues an earlier one (the same instructions, a branch) begins a session.

Prompts are looked at from their last block backwards, where sessions that begin alike end (`Reservation.lineage`).
Sessions that were not used for long are forgotten, and those that were not for longest when there are many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.estimates.pauses import ENDS, STAGES, PauseClass, Pauses
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import HASH_BYTES, NOWHERE, End, Reservation

if TYPE_CHECKING:
    from kvscout_scheduler.costs.cost import BlockFormat

MAX_SESSIONS: Final = 16_384
"""Sessions of one pool."""
TTL_SECONDS: Final = 3_600.0
"""For how long one is remembered after its last request."""
MAX_BLOCKS: Final = 8_192
"""Blocks that a turn may add to its conversation and still be found."""
MAX_CHECKS: Final = 8
"""Ends of sessions that are compared with a prompt: more than one that does not fit is a rare accident."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation."""

    session_id: int
    seen: float
    """Time when a request of it was last booked or ended."""
    rank: WorkerRank = NOWHERE
    """Worker rank of its last request."""
    tokens: int = 0
    """Of its last prompt, and of the output if that has ended: what the next prompt begins with, at most."""
    active: int = 0
    """Requests under way."""
    pauses: PauseClass | None = None
    """Its own, with those of its class."""
    away_since: float = 0.0
    """Time of its last answer, if none of its requests runs."""
    stage: int = 0
    """Stage of its pause at the last update."""
    lineage: int = 0
    """Of the prompt in which it ends; with `last_block`, where it stands among the ends."""
    last_block: int = 0
    """Local hash of the last complete block of that prompt."""
    blocks: int = 0
    """Complete blocks of that prompt; 0 = unknown."""
    prefix: int = 0
    """Hash of all of them."""


class Sessions:
    """Sessions of one pool; an `Observer` of every booking in it."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        """By id, those that were not used for longest first."""
        self.pauses = Pauses()
        self._away: tuple[OrderedDict[int, Session], ...] = tuple(OrderedDict() for _ in STAGES)
        """Sessions that pause, by id, in each stage of a pause; those that do so for longest first."""
        self._ends: dict[int, dict[int, list[Session]]] = {}
        """Sessions by the last block of their last prompt, by its lineage; of those that end alike the last few."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: int) -> Session | None:
        """Return a session; None = nothing is known of it."""
        return self._sessions.get(session_id)

    def of(self, request: SelectionRequest, prompts: Mapping[BlockFormat, Prompt]) -> int:
        """Return the session of a request: as its caller says, else by lineage, else a new one; 0 = unknown.

        Args:
            request: The request.
            prompts: Its prompt, by block format.
        """
        if request.session or not request.by_lineage:
            return request.session
        first = b""
        for block_format, prompt in prompts.items():
            if prompt.block_hashes:
                first = first or prompt.block_hashes
                found = self._continued(prompt.block_hashes, prompt.lineage(block_format.block_size))
                if found is not None:
                    return found.session_id
        if not first or not request.request_id:
            return 0
        # The same one for all attempts of a request, in every pool.
        return xxh3_64_intdigest(request.request_id.encode("utf-8", "replace"), xxh3_64_intdigest(first)) or 1

    def extend(self, session_id: int, lineage: int, block_hashes: bytes, now: float) -> None:
        """Let a session end in a prompt, whatever it ended in before.

        Args:
            session_id: The session; 0 = unknown.
            lineage: Of the prompt.
            block_hashes: Packed local hashes of its leading complete blocks; empty = unknown.
            now: On the scheduler's clock.
        """
        if not session_id:
            return
        session = self._touch(session_id, now)
        if not block_hashes:
            return
        self._drop_end(session)
        session.lineage, session.blocks = lineage, len(block_hashes) // HASH_BYTES
        session.last_block = memoryview(block_hashes).cast("Q")[-1]
        session.prefix = xxh3_64_intdigest(block_hashes)
        alike = self._ends.setdefault(lineage, {}).setdefault(session.last_block, [])
        alike.append(session)
        if len(alike) > MAX_CHECKS:
            self._drop_end(alike[0])

    def booked(self, reservation: Reservation, now: float) -> None:
        """See `reservation.Observer`."""
        if reservation.session:
            session = self._touch(reservation.session, now)
            session.rank, session.tokens = reservation.rank, reservation.isl_tokens
            session.active += 1
            if session.pauses is None:
                session.pauses = PauseClass(self.pauses.of(reservation.output_class))
            self._pass(now)
            if self._away[session.stage].pop(session.session_id, None) is not None:
                session.pauses.add(session.stage, came=True)

    def prefill_completed(self, reservation: Reservation, ttft_seconds: float, now: float) -> None:
        """See `reservation.Observer`."""

    def ended(self, reservation: Reservation, end: End, now: float) -> None:
        """See `reservation.Observer`."""
        session = self._sessions.get(reservation.session)
        if session is None or not session.active:
            return
        session.active -= 1
        session.seen = now
        if not session.active:
            session.away_since, session.stage = now, 0
            self._away[0][session.session_id] = session
        self._sessions.move_to_end(session.session_id)
        session.tokens = max(session.tokens, reservation.isl_tokens + end.output_tokens)

    def soon(self, session_id: int, rank: WorkerRank, now: float) -> float | None:
        """Return the chance that a session soon uses what it has left on a worker (`PauseClass.soon`); None = it is
        using it, and nothing of it is evicted.

        Args:
            session_id: The session; 0 = unknown.
            rank: The worker.
            now: On the scheduler's clock.
        """
        session = self._sessions.get(session_id)
        if session is None or session.pauses is None or session.rank != rank:
            return 0.0
        return None if session.active else session.pauses.soon(now - session.away_since)

    def forget_old(self, now: float) -> None:
        """Forget sessions that were not heard of for long."""
        self._pass(now)
        while self._sessions and next(iter(self._sessions.values())).seen < now - TTL_SECONDS:
            self._forget()

    def check_invariants(self) -> None:
        """Raise AssertionError unless ends are those of sessions that are there, each at its place."""
        for lineage, ends in self._ends.items():
            assert ends, f"nothing ends in lineage {lineage}"
            for last_block, alike in ends.items():
                assert 1 <= len(alike) <= MAX_CHECKS
                for session in alike:
                    assert (session.lineage, session.last_block) == (lineage, last_block)
                    assert session.blocks
                    assert self._sessions.get(session.session_id) is session

    def _continued(self, block_hashes: bytes, lineage: int) -> Session | None:
        """Return the session whose last prompt a prompt begins with, the longest one of several."""
        ends = self._ends.get(lineage)
        if not ends:
            return None
        blocks = memoryview(block_hashes).cast("Q")
        checks = 0
        backwards = islice(reversed(blocks), MAX_BLOCKS)
        for at in compress(range(len(blocks), 0, -1), map(ends.__contains__, backwards)):
            for session in reversed(ends[blocks[at - 1]]):
                if session.blocks != at:
                    continue
                if xxh3_64_intdigest(block_hashes[: HASH_BYTES * at]) == session.prefix:
                    return session
                checks += 1
                if checks == MAX_CHECKS:
                    return None
        return None

    def _touch(self, session_id: int, now: float) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            while len(self._sessions) >= MAX_SESSIONS:
                self._forget()
            session = self._sessions[session_id] = Session(session_id, now)
        else:
            session.seen = now
            self._sessions.move_to_end(session_id)
        return session

    def _pass(self, now: float) -> None:
        """Let pauses come to the stage that they have reached; those that are through all of them teach no more."""
        for stage, away in enumerate(self._away):
            while away and (session := next(iter(away.values()))).away_since <= now - ENDS[stage]:
                del away[session.session_id]
                if session.pauses is not None:
                    session.pauses.add(stage, came=False)
                if stage + 1 < len(STAGES):
                    session.stage = stage + 1
                    self._away[stage + 1][session.session_id] = session

    def _forget(self) -> None:
        """Forget the session that was not used for longest."""
        session_id, session = self._sessions.popitem(last=False)
        self._away[session.stage].pop(session_id, None)
        self._drop_end(session)

    def _drop_end(self, session: Session) -> None:
        if not session.blocks:
            return
        ends = self._ends[session.lineage]
        alike = ends[session.last_block]
        alike.remove(session)
        if not alike:
            del ends[session.last_block]
            if not ends:
                del self._ends[session.lineage]
        session.blocks = 0
