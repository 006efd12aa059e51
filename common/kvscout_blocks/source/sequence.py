"""The order of a source's event batches: what to apply, what to drop, when to request a replay.

::

              ┌──────────── id = last+1: apply ───────────┐
              ▼                                           │
                                                       ┌── hole, or no end, after progress: again
                                                       ▼       │
    WAITING ─────▶ LIVE ── gap, reconnect, restart ──▶ REPLAYING ── verified to the end ──▶ LIVE
                                                          │ history gone, no answer, overflow
                                                          └──▶ demote, then LIVE with history_incomplete

One machine a source (one worker rank behind one publisher). It is pure: it owns no socket and no clock, takes
what happened and returns decisions, which the caller carries out in order. Batches are opaque to it but
for their number, their digest and whether they clear the cache.

Engines without epochs start again at 0 after a restart. A batch is therefore known by (id, digest): an old
id with a digest never seen is a new life of the engine. Every replay begins at the last applied batch, to
compare its digest: an engine that restarted and has overtaken `last` meanwhile is found out by it. The
caller reads what a socket still holds before it reports that socket's reconnect.

Engines drop replies that outrun their socket, and the end marker with them, but never the first ones, for which it has
room: so what a round of replies leaves out was lost on the way, and is requested again from the last applied batch.
What is missing at the *start* of a round, before its first reply or right after the one that is known, the engine does
not have: it went from its buffer, or its queue was full and dropped it. A round without its end that brought nothing
new counts as a failed one.

With epochs a restart shows itself, an id is one batch however often it is encoded, and what is of a lower epoch than
what was seen is old, whoever sends it.

A *state* (one consistent cut, such as a publisher's or a peer's dump) stands for everything up to its cursor. It comes
live or as a part of a replay, is never older than what was applied, and ends an incomplete history unless it says that
its own is.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Generic, TypeVar

from kvscout_blocks.source.decisions import (
    Apply,
    Decision,
    Demote,
    Drop,
    DropReason,
    RequestReplay,
    Reset,
    SequencedBatch,
)
from kvscout_blocks.source.digests import Digests
from kvscout_blocks.source.held import HELD_BATCHES, HeldBatches, HeldBudget
from kvscout_blocks.source.publishers import MIXED, PublisherCheck
from kvscout_blocks.source.replay import Replay

DIGESTS_KEPT: Final = 64
"""Digests of the last applied batches, to distinguish duplicates from restarts."""

OUTDATED_AFTER: Final = 100
"""Live batches of a lower epoch in a row, none of the present one among them: no remains of a former life."""

QUARANTINE_AFTER: Final = 100
"""Malformed batches in a row."""

QUARANTINE_SECONDS: Final = 60.0

T = TypeVar("T")


class SourceSequence(Generic[T]):
    """The state machine of one source.

    Args:
        dp_rank: The registered rank; batches that name another one are refused.
        can_replay: Past batches can be requested from the source.
        rewinds: Its publisher goes back on request: what it sends again comes live, and what follows as well.
        budget: Bounds what it holds together with others; None = it is alone.
    """

    def __init__(
        self,
        *,
        dp_rank: int = 0,
        can_replay: bool = True,
        rewinds: bool = False,
        budget: HeldBudget | None = None,
    ) -> None:
        self._dp_rank = dp_rank
        self._can_replay = can_replay
        self._rewinds = rewinds
        self.epoch = 0
        self.last_id: int | None = None
        """Last batch applied."""
        self._replay = Replay()
        self.history_incomplete = False
        self.missing = ""
        """Missing events, for people, while `history_incomplete`."""
        self.fenced = False
        """History is incomplete on purpose: the cache was emptied without an event, and what came before is wrong."""
        self.misconfigured = ""
        """Reason for refusing the source: another rank, an epoch that is over, or two publishers; "" = none."""
        self.quarantined_until: float | None = None
        self.counters: Counter[str] = Counter()
        """applied, malformed, gaps, replays, restarts, demotions, fences, states, and one for each `DropReason`."""
        self._digests = Digests(HELD_BATCHES)
        self._highest_live = -1
        self._held: HeldBatches[T] = HeldBatches(budget or HeldBudget())
        self._malformed_in_row = 0
        self._outdated_in_row = 0
        self._mixed = False
        """True if there are two publishers, so that nothing is applied."""
        self._publishers = PublisherCheck()
        self._new_publisher = False
        """Nobody published at the other end until it was connected to."""
        self.unproven_start = False
        """True if the publisher is taken to have begun with batch 1 although nothing shows that it had no batch 0."""
        self._began_at_one = False
        """A replay from 0 on began with 1: if one that is requested later does, nothing was dropped before it."""

    @property
    def replaying(self) -> bool:
        """Return whether live batches wait for a replay."""
        return self._replay.active

    @property
    def attempt(self) -> int:
        """Return the number of the replay request that is answered now."""
        return self._replay.attempt

    @property
    def retry_at(self) -> float | None:
        """Return when to call `on_tick`, on the caller's clock, as at `quarantined_until`; None = never."""
        return self._replay.retry_at

    @property
    def held(self) -> int:
        """Return the number of live batches that wait for the replay to end."""
        return len(self._held)

    @property
    def last_digest(self) -> int | None:
        """Return the digest of the last batch applied; None = there is none, or it came as a part of a state."""
        return self._digests.get(self.last_id) if self.last_id is not None else None

    @property
    def quiet(self) -> bool:
        """Return whether the next batch in order would only be applied: nothing is awaited, held or doubted."""
        return (
            self.last_id is not None
            and not (self.epoch or self.replaying or self._waits or self.misconfigured or self._malformed_in_row)
            and self.quarantined_until is None
            and not self._began_at_one
            and not self._publishers.doubtful
        )

    @property
    def replays_quietly(self) -> bool:
        """Return whether the next reply in order, below `first_held`, would only be applied."""
        return self.last_id is not None and not (self.epoch or self.misconfigured) and self._replay.goes_on

    @property
    def first_held(self) -> int | None:
        """Return the lowest id that is held; None: nothing is."""
        return min(self._held, default=None)

    @property
    def digests(self) -> bytes:
        """Return the digests of the last batches applied, up to `last_id`, 8 bytes each in the machine's order."""
        return self._digests.packed()

    def lend_digests(self) -> None:
        """Forget the digests while a bypass has them, which knows when it needs the older ones no more."""
        self._digests.clear()

    def advance(self, *, last_id: int, digests: bytes, applied: int) -> None:
        """Note that the next `applied` batches were applied by a bypass, since it was `quiet`.

        Args:
            last_id: Last batch applied.
            digests: What was lent, and those of the batches since; as of `digests`.
            applied: Number of batches.
        """
        self._digests.clear()
        self._digests.extend(last_id, digests)
        if applied:
            self.last_id = last_id
            self._highest_live = max(self._highest_live, last_id)
            self._publishers.note(last_id - applied + 1, last_id)
            self.counters["applied"] += applied

    def advance_replay(self, *, last_id: int, digests: bytes, applied: int) -> None:
        """Note that the next `applied` replies were applied by a bypass, since it was `replays_quietly`."""
        if applied:
            self.last_id = last_id
            self._digests.extend(last_id, digests)
            self._trim()
            self.counters["applied"] += applied

    def restore(self, *, epoch: int, last_id: int | None, last_digest: int | None = None) -> None:
        """Set the cursor because a state was loaded that contains everything up to `last_id`."""
        self.epoch, self.last_id = epoch, last_id
        self._digests.clear()
        if last_id is not None and last_digest is not None:
            self._digests.add(last_id, last_digest)
        self._highest_live = -1
        self._end_replay()
        self.drop_held()
        self._complete()

    def drop_held(self) -> None:
        """Drop what waits for a replay, since nobody wants it any more."""
        self._held.drop()
        self._held.lack()

    def wants_state(self, attempt: int | None, *, epoch: int, last_id: int | None) -> bool:
        """Return whether a state is newer than what was applied; then load it and call `on_state`.

        Args:
            attempt: Number of the replay request that it answers; None: it came over the live channel.
            epoch: Its incarnation.
            last_id: Last batch contained; None: it has no cursor.
        """
        if attempt is not None and (not self._replay.answers(attempt)):
            return False
        if epoch != self.epoch or self.last_id is None:
            return epoch >= self.epoch
        # Without a cursor it is newer only if it comes by itself: whoever answers a request for what came after
        # `last_id` without a cursor knows less than we do.
        return attempt is None if last_id is None else last_id >= self.last_id

    def on_state(
        self,
        attempt: int | None,
        *,
        epoch: int,
        last_id: int | None,
        history_incomplete: bool = False,
        second_hand: bool = False,
        last_digest: int | None = None,
    ) -> list[Decision[T]]:
        """Note that a state which `wants_state` wanted was loaded; `attempt`, `epoch` and `last_id` as there.

        What is held and newer is applied: after a live state immediately, after a replayed one when the replay ends.

        Args:
            history_incomplete: Events before it may be missing.
            second_hand: It is not from the source itself, which may have restarted since: the rest of the replay must
                show batch `last_id`, if the source has a replay and no epochs.
            last_digest: Of batch `last_id`; None = not known.
        """
        out: list[Decision[T]] = []
        self.counters["states"] += 1
        if epoch > self.epoch:
            self._drop_held(out)
        elif last_id is not None:
            self._drop_held(out, below=last_id + 1)
        self.epoch, self.last_id = epoch, last_id
        self._digests.clear()
        if last_id is not None and last_digest is not None:
            self._digests.add(last_id, last_digest)
        self._highest_live = -1
        self._replay.verified = not second_hand or epoch > 0 or last_id is None or not self._can_replay
        self.history_incomplete = history_incomplete
        self.missing = "what came before the state that was loaded" if history_incomplete else ""
        self.fenced = False
        if attempt is None:
            if self.replaying:
                self._end_replay()
                self._replay.attempt += 1
            self._apply_held(out, until_gap=True)
            self._fill_gap(out)
        return out

    def expect_state(self) -> list[Decision[T]]:
        """Wait for a state of the source from peers, before anything is requested from it.

        What comes live waits as in a replay, and the answer is that of a replay, even if the source itself has none.
        """
        out: list[Decision[T]] = []
        self._request(out)
        return out

    def on_heal(self) -> list[Decision[T]]:
        """Request everything once more: history is incomplete, and the source may have a whole state by now.

        A replay that fails changes nothing then, unless batch 0 has come: from there on it is one like any other.
        """
        out: list[Decision[T]] = []
        # Whoever has the whole history of a fenced source has what is wrong in it, too.
        if self.history_incomplete and self._can_replay and not (self.replaying or self._mixed or self.fenced):
            self._request(out, everything=True)
            self._replay.healing = True
        return out

    def on_fence(self, event_id: int | None) -> list[Decision[T]]:
        """Forget what is known, since the engine's cache was emptied and no event said so.

        Later events count on: those after batch `event_id` are requested again where the source has them as batches;
        otherwise those count that come from now on.

        Args:
            event_id: Last batch before the cache was emptied; None = unknown.
        """
        self.counters["fences"] += 1
        out: list[Decision[T]] = [Reset("its cache was emptied without an event")]
        self.history_incomplete = self.fenced = True
        self.unproven_start = self._began_at_one = False
        self.missing = f"those up to {self.last_id}: the engine's cache was emptied without an event"
        has_batches = self._can_replay and not self._rewinds and not self.epoch
        if has_batches and event_id is not None and self.last_id is not None and event_id < self.last_id:
            self.missing = f"those up to {event_id}: the engine's cache was emptied without an event"
            self.last_id = event_id
            self._digests.clear()
            self._request(out)
        return out

    def end_fence(self) -> None:
        """Note that nothing from before the fence is missing."""
        if self.fenced:
            self._complete()

    def on_batch(self, batch: SequencedBatch[T], now: float) -> list[Decision[T]]:
        """Take a batch of the live channel."""
        out: list[Decision[T]] = []
        if not self._admit(batch, now, out):
            return out
        if self._is_mixed(batch, out):
            return out
        self._outdated_in_row = self._outdated_in_row + 1 if batch.epoch < self.epoch else 0
        if self._outdated_in_row >= OUTDATED_AFTER:
            self.misconfigured = (
                f"batches are of epoch {batch.epoch}, which {self.epoch} has ended: did the publisher's clock go back? "
                "ResetWorker begins anew with what it sends"
            )
        if batch.epoch < self.epoch:
            self._drop(batch, DropReason.STALE, out)
        elif batch.epoch > self.epoch and (self.last_id is not None or self._held):
            self._restart(out, epoch=batch.epoch, cause=batch)
        elif self._seen(batch) or (batch.epoch and self._has(batch.event_id)):
            self._on_duplicate(batch, out)
        elif not batch.epoch and self._is_taken(batch.event_id):
            self._restart(out, epoch=0, cause=batch)
        else:
            self.epoch = batch.epoch
            self._accept(batch, out)
        self._highest_live = max(self._highest_live, batch.event_id)
        self._trim()
        return out

    def on_reconnect(self, *, new_publisher: bool = False) -> list[Decision[T]]:
        """Handle a (re)connected live channel: batches may have been lost, the engine may be another.

        Batches held until now may be of another life than what comes; if they are not, the replay has them.

        Args:
            new_publisher: For a while before, nobody was there who could have published.
        """
        out: list[Decision[T]] = []
        self.quarantined_until = None
        self._publishers.restart()
        self._new_publisher = new_publisher
        if self._mixed:
            self._mixed, self.misconfigured = False, ""
        self._drop_held(out)
        if self._can_replay:
            self._request(out)
        elif self.last_id is not None:
            self._lose(f"whatever came after {self.last_id}, before a reconnect", out)
        return out

    def on_replay(self, attempt: int, batch: SequencedBatch[T], now: float) -> list[Decision[T]]:  # noqa: C901, PLR0912  # one case after the other
        """Take a reply of the replay."""
        out: list[Decision[T]] = []
        if not self._replay.answers(attempt) or self._refuse_rank(batch, out):
            return out
        if batch.epoch < self.epoch:
            self._drop(batch, DropReason.STALE, out)
            return out
        if batch.epoch > self.epoch and (self.last_id is not None or self._held):
            self._restart(out, epoch=batch.epoch)
            return out
        if self._replay.healing and batch.event_id == 0:
            # All of it comes again, not as a state: that replaces what is incomplete.
            self._begin_again("all its batches come again", out)
            self._replay.verified = True
        if self._replay.healing and batch.event_id == 1 and not self._replay.answered and self._began_at_one:
            # A replay from 0 on began with 1 before, and more was published since: none had to go for that, so that
            # none was there before 1.
            self._complete()
        # Within one epoch an id is one batch, however often it is encoded; without epochs its bytes decide.
        waiting = None if batch.epoch else self._held.get(batch.event_id)
        known = None if batch.epoch else self._digests.get(batch.event_id)
        if waiting is not None and waiting.digest != batch.digest:
            self._restart(out, epoch=batch.epoch)
            return out
        if batch.event_id == self.last_id:
            if known is not None and known != batch.digest:
                self._restart(out, epoch=batch.epoch)
                return out
            self._digests.add(batch.event_id, batch.digest)
            self._replay.verified = True
        elif self.last_id is not None and batch.event_id < self.last_id:
            self._drop(batch, DropReason.DUPLICATE, out)
        elif batch.cleared or self._reaches(batch, out):
            self.epoch = batch.epoch
            if batch.cleared:
                self._drop_held(out, below=batch.event_id)
            else:
                if self._expected() < batch.event_id:
                    self._apply_held(out, below=batch.event_id)
                self._check_history(batch.event_id, out)
            self._replay.verified = True
            self._apply(batch, out)
        else:
            self._request_again(now, out)
            return out
        self._replay.answered = True
        return out

    def on_replay_end(self, attempt: int, now: float) -> list[Decision[T]]:
        """Handle the end of a complete replay."""
        out: list[Decision[T]] = []
        if not self._replay.answers(attempt):
            return out
        if not self._replay.verified:
            # An engine keeps its newest batches. One that has none from `last_id` on, and has sent none either
            # since we are connected, is another than the one before.
            if not self._waits:
                self._restart(out, epoch=self.epoch)
            else:
                self._give_up("the replay was empty", out)
            return out
        self._apply_held(out, until_gap=True)
        if not self._waits:
            self._end_replay()
        elif self._replay.answered or self._replay.moved(self.epoch, self.last_id) or self._replay.healing:
            # What is missing was lost on the way, or published after the answer was given.
            self._request_again(now, out)
        else:
            self._give_up("the replay ended early", out)
        return out

    def on_replay_failed(self, attempt: int, now: float) -> list[Decision[T]]:
        """Handle a replay that was not answered in time, had no end, or could not be read."""
        out: list[Decision[T]] = []
        if not self._replay.answers(attempt):
            return out
        if self._waits:
            self._end_filled_replay(out)
        if self.replaying:
            self._request_again(now, out)
        return out

    def on_no_history(self, attempt: int, reason: str) -> list[Decision[T]]:
        """Handle the answer that there is no history, so that another request is of no use; `reason` is for people."""
        out: list[Decision[T]] = []
        if not self._replay.answers(attempt):
            return out
        self._replay.attempt += 1
        if self._replay.healing:
            self._leave_as_it_is(out)
        elif self.last_id is None and not self._waits:
            # Nothing is known that could be wrong; whether anything is missing the first batch's id shows.
            self._end_replay()
        else:
            self._give_up(reason, out)
        return out

    def on_malformed(self, now: float) -> None:
        """Count a message that cannot be read and has no place in the sequence."""
        if self.quarantined_until is None or now >= self.quarantined_until:
            self._count_malformed(now, malformed=True)

    def on_tick(self, now: float) -> list[Decision[T]]:
        """Request the replay again when it is due, and what a quarantine dropped when that ends."""
        out: list[Decision[T]] = []
        if self.quarantined_until is not None and now >= self.quarantined_until:
            self.quarantined_until = None
            if self._can_replay and not (self.replaying or self._mixed):
                self._request(out)
        if self.retry_at is not None and now >= self.retry_at:
            self._request(out, failures=self._replay.failures)
        return out

    def _admit(self, batch: SequencedBatch[T], now: float, out: list[Decision[T]]) -> bool:
        """Return whether batches of the source are taken at all."""
        if self._refuse_rank(batch, out):
            return False
        if self.quarantined_until is not None and now < self.quarantined_until:
            self._drop(batch, DropReason.QUARANTINED, out)
            return False
        self.quarantined_until = None
        self._count_malformed(now, malformed=batch.malformed)
        return True

    def _refuse_rank(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> bool:
        """Refuse a batch that names another rank, and all that came before it; whether it did."""
        if batch.dp_rank is None or batch.dp_rank == self._dp_rank:
            self.misconfigured = MIXED if self._mixed else ""
            return False
        self.misconfigured = f"batches name rank {batch.dp_rank}, the registration {self._dp_rank}"
        self._drop(batch, DropReason.WRONG_RANK, out)
        self._drop_held(out)
        if self.replaying:
            self._end_replay()
            self._replay.attempt += 1
        if self.last_id is not None:
            self._begin_again(self.misconfigured, out)
        return True

    def _count_malformed(self, now: float, *, malformed: bool) -> None:
        self._malformed_in_row = self._malformed_in_row + 1 if malformed else 0
        if self._malformed_in_row >= QUARANTINE_AFTER:
            self._malformed_in_row = 0
            self.quarantined_until = now + QUARANTINE_SECONDS

    def _accept(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> None:
        """Take a batch that is new and of this incarnation."""
        expected = self._expected()
        if batch.cleared:
            self._drop_held(out, below=batch.event_id)
            self._end_replay()
            self._apply(batch, out)
            self._apply_held(out, until_gap=True)
            self._fill_gap(out)
        elif self.replaying:
            self._hold(batch, out)
            if self._rewinds and batch.event_id == expected:
                self._end_filled_replay(out)
        elif batch.event_id == expected:
            self._apply(batch, out)
            self._request_start(out)
        elif self.last_id is None and batch.event_id == 1 and self._new_publisher and not self._can_replay:
            self.unproven_start = True
            self._apply(batch, out)
        else:
            self.counters["gaps"] += 1
            self._hold(batch, out)
            self._fill_gap(out)

    def _on_duplicate(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> None:
        """Drop a live batch that is known, or that a publisher sends again as it goes back."""
        if self._rewinds and self._replay.healing and batch.event_id == 0:
            self._begin_again("all its batches come again", out)
            self._accept(batch, out)
            return
        self._drop(batch, DropReason.DUPLICATE, out)
        if self._rewinds and batch.event_id == self.last_id:
            self._replay.verified = True
            self._end_filled_replay(out)

    def _end_filled_replay(self, out: list[Decision[T]]) -> None:
        """End the replay if live batches alone continue what was applied."""
        if self.replaying and self._replay.verified and not self._replay.healing:
            self._apply_held(out, until_gap=True)
            if not self._waits:
                self._end_replay()
                self._replay.attempt += 1

    def _fill_gap(self, out: list[Decision[T]]) -> None:
        """Request what is missing before the first held batch, and what was dropped to make room."""
        if self._waits and self._can_replay:
            self._request(out)
        elif self._waits:
            self._give_up("there is no replay", out)

    def _restart(self, out: list[Decision[T]], *, epoch: int, cause: SequencedBatch[T] | None = None) -> None:
        """Forget everything after a restart of the engine, and learn its new incarnation from the beginning.

        Batches held so far are in that replay if they belong to the new life: it is requested after they came.
        """
        self._drop_held(out)
        self._end_replay()
        self.counters["restarts"] += 1
        self._begin_again("it restarted", out)
        self.epoch = epoch
        if cause is not None:
            self._accept(cause, out)
        elif self._can_replay:
            self._request(out)

    def _begin_again(self, reason: str, out: list[Decision[T]]) -> None:
        """Forget everything, to learn it from batch 0 on."""
        out.append(Reset(reason))
        self.last_id = None
        self._digests.clear()
        self._highest_live = -1
        self._replay.healing = False
        self._complete()

    def _is_mixed(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> bool:
        """Return whether there are two publishers, so that a live batch is dropped: then ids fall again and again."""
        if batch.epoch:
            return False
        if self._seen(batch):
            if self._rewinds:
                self._publishers.rewind(batch.event_id)
            return False
        self._publishers.note(batch.event_id, batch.event_id)
        mixed = self._publishers.mixed
        if mixed and not self._mixed:
            self._drop_held(out)
            self._end_replay()
            self._replay.attempt += 1
            self._begin_again(MIXED, out)
            self._lose("whatever two publishers send", out)
        if self._mixed and not mixed:
            # What is missing before this one, the first that counts, is seen as at any first contact.
            self._complete()
        self._mixed, self.misconfigured = mixed, MIXED if mixed else ""
        if mixed:
            self._drop(batch, DropReason.MIXED, out)
        return mixed

    def _request_start(self, out: list[Decision[T]]) -> None:
        """Request once more from 0 on, where a replay began with 1, now that more was published."""
        if self._began_at_one:
            self._request(out, everything=True)
            self._replay.healing = True

    def on_missing_start(self) -> None:
        """Note that a publisher taken to have begun with batch 1 had a batch 0: later batches refer to it."""
        if self.unproven_start:
            self.unproven_start = False
            self.history_incomplete, self.missing = True, "0..0"

    def _reaches(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> bool:
        """Return whether nothing that can still be had is missing before a replayed batch."""
        if self._expected() < batch.event_id:
            # Where the replay has a hole, what came live may fill it.
            self._apply_held(out, until_gap=True, below=batch.event_id)
        if self._expected() >= batch.event_id or not (self._replay.answered and self._replay.verified):
            return True
        # A round of replies has room for its first ones, so that what does not follow right there is nowhere.
        return not (self._replay.healing or self._replay.moved(self.epoch, self.last_id))

    def _request_again(self, now: float, out: list[Decision[T]]) -> None:
        """End an incomplete round, and request the rest: immediately if it moved the cursor, or later."""
        if self._replay.healing:
            self._replay.attempt += 1
            self._leave_as_it_is(out)
        elif self._replay.moved(self.epoch, self.last_id):
            self._request(out)
        else:
            failures = self._replay.failures + 1
            if not self._replay.schedule_retry(now):
                self._give_up(f"{failures} replays brought nothing", out)

    def _request(self, out: list[Decision[T]], *, everything: bool = False, failures: int = 0) -> None:
        """Begin a replay, or begin the running one again; `failures` counts rounds in a row that brought nothing."""
        self.counters["replays"] += 1
        self._replay.begin(epoch=self.epoch, last_id=self.last_id, failures=failures)
        out.append(RequestReplay(0 if everything or self.last_id is None else self.last_id, self.attempt))

    def _end_replay(self) -> None:
        if self._replay.healing:
            # It was tried; a start that is not shown by it stays missing.
            self._began_at_one = False
        self._replay.end()

    def _leave_as_it_is(self, out: list[Decision[T]]) -> None:
        """Give up a replay that was not needed: known blocks stay, and held batches continue from them."""
        self._end_replay()
        self._apply_held(out, until_gap=True)
        self._fill_gap(out)

    def _give_up(self, reason: str, out: list[Decision[T]]) -> None:
        """Give up a replay that cannot be verified, and continue from the live batches."""
        self._end_replay()
        if self._held:
            self._apply_held(out)
            if self._lacks:
                self._lose(f"{self._expected()}..{self._held.lacks_to}", out)
        else:
            after = f"whatever came after {self.last_id}" if self.last_id is not None else "everything until now"
            self._lose(f"{after}: {reason}", out)
        self._held.lack()

    def _apply_held(self, out: list[Decision[T]], *, until_gap: bool = False, below: int | None = None) -> None:
        """Apply held batches in order: up to the first gap, below an id, or all of them."""
        for event_id in sorted(self._held):
            expected = self._expected()
            if (until_gap and event_id > expected) or (below is not None and event_id >= below):
                return
            self._check_history(event_id, out)
            self._apply(self._held[event_id], out)

    def _check_history(self, event_id: int, out: list[Decision[T]]) -> None:
        """Demote what is held if batches are missing before `event_id`, or cannot be verified."""
        expected = self._expected()
        if event_id > expected:
            self._lose(f"{expected}..{event_id - 1}", out)
            if (expected, event_id) == (0, 1) and self.replaying and not self.epoch:
                self._began_at_one = True
        elif not self._replay.verified:
            self._lose(f"whatever came before {event_id}", out)
        self._replay.verified = True

    def _lose(self, missing: str, out: list[Decision[T]]) -> None:
        self.history_incomplete, self.fenced = True, False
        self.missing = missing
        if self.last_id is not None:
            self.counters["demotions"] += 1
            out.append(Demote(missing))

    def _complete(self) -> None:
        self.history_incomplete = self.unproven_start = self.fenced = False
        self.missing = ""
        self._began_at_one = False

    def _apply(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> None:
        held = self._held.release(batch.event_id)
        if held is not None and held is not batch:
            self._drop(held, DropReason.DUPLICATE, out)
        if batch.missing:
            self.history_incomplete, self.fenced, self.missing = True, False, batch.missing
        elif batch.cleared or batch.missing is not None:
            self._complete()
        self.counters["applied"] += 1
        self.counters["malformed"] += batch.malformed
        self.last_id = batch.event_id
        self._new_publisher = False
        self._digests.add(batch.event_id, batch.digest)
        self._trim()
        if self._held.lacks_to >= 0 and not self._lacks:
            self._held.lack()
        out.append(Apply(batch))

    def _hold(self, batch: SequencedBatch[T], out: list[Decision[T]]) -> None:
        self._held.hold(batch)
        if self._held.too_much:
            self._give_up("too much came during the replay", out)

    def _drop_held(self, out: list[Decision[T]], *, below: int | None = None) -> None:
        """Drop held batches, all or those below an id."""
        for batch in self._held.drop(below):
            self._drop(batch, DropReason.STALE, out)
        if below is None or self._held.lacks_to < below:
            self._held.lack()

    def _drop(self, batch: SequencedBatch[T], reason: DropReason, out: list[Decision[T]]) -> None:
        self.counters[reason] += 1
        out.append(Drop(batch.event_id, reason))

    def _has(self, event_id: int) -> bool:
        """Return whether the batch of this id, in this epoch, was applied or waits."""
        return event_id in self._held or (self.last_id is not None and event_id <= self.last_id)

    @property
    def _waits(self) -> bool:
        """Return whether live batches came that are to be applied: they are held, or come again with a replay."""
        return bool(self._held) or self._lacks

    @property
    def _lacks(self) -> bool:
        """Return whether live batches were dropped to make room, and have not come again."""
        return self._held.lacks_to >= self._expected()

    def _seen(self, batch: SequencedBatch[T]) -> bool:
        held = self._held.get(batch.event_id)
        known = held.digest if held is not None else self._digests.get(batch.event_id)
        return known == batch.digest

    def _expected(self) -> int:
        """Return the id that continues what was applied."""
        return self.last_id + 1 if self.last_id is not None else 0

    def _is_taken(self, event_id: int) -> bool:
        """Return whether another live batch had this id, or a higher one if the publisher cannot go back."""
        return self._has(event_id) or (not self._rewinds and event_id < self._held.highest_id)

    def _trim(self) -> None:
        """Keep the last digests, and those of replayed batches that are still to come live."""
        self._digests.forget(below=self._highest_live + 1, keep=DIGESTS_KEPT)
