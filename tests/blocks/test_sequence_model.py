"""Random loss, duplication, reconnects and restarts: in the end the index side equals the engine.

The engine's truth is a set of blocks that its batches add to, remove from or clear. The channel loses and repeats
batches, sockets reconnect, the engine restarts with and without epochs, replays are answered late, in chunks or not
at all; all but the first two of their replies, and their end, may be lost. Engines drop batches that nobody ever gets.
Sources with epochs may answer with their state, send it live, and have it asked for once more where history is
incomplete; the state of a third party, of any age and maybe of a former life, may come before anything else.

Once quiet, what the decisions applied must equal the truth; where history was out of reach, it must be a part of it,
and say so.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import NamedTuple

import pytest
from support.seeds import test_seed

from kvscout_blocks.source.decisions import Apply, Decision, Demote, RequestReplay, Reset, SequencedBatch
from kvscout_blocks.source.held import HeldBudget
from kvscout_blocks.source.sequence import SourceSequence

SEQUENCES = int(os.environ.get("KVSCOUT_SEQUENCES", "400"))
BLOCKS = 8


class Change(NamedTuple):
    """What one batch does."""

    add: frozenset[int]
    remove: frozenset[int]
    cleared: bool


Batch = SequencedBatch[Change]


class State(NamedTuple):
    """A cut of an engine."""

    epoch: int
    last_id: int | None
    blocks: frozenset[int]
    last_digest: int | None
    second_hand: bool = False


class Engine:
    """Publishes changes; remembers the last `buffer` of them."""

    def __init__(self, rng: random.Random, buffer: int, epochs: bool) -> None:
        self.rng = rng
        self.epochs = epochs
        self.lives = 0
        self.cuts: list[State] = []
        """Some of its states, of all its lives."""
        self.past: deque[Batch] = deque(maxlen=buffer)
        self.drops = 0.0
        """How often its queue is full: a batch has its number, and is neither sent nor replayed."""
        self.restart()

    def restart(self) -> None:
        self.lives += 1
        self.next_id = 0
        self.truth: set[int] = set()
        self.past.clear()

    def publish(self) -> Batch | None:
        """The next batch; None: it was dropped."""
        rng = self.rng
        add = frozenset(rng.sample(range(BLOCKS), rng.randint(0, 2)))
        remove = frozenset(rng.sample(range(BLOCKS), rng.randint(0, 2)))
        change = Change(add, remove - add, rng.random() < 0.01)
        self.truth = change_of(self.truth, change)
        batch = SequencedBatch(
            self.next_id,
            rng.getrandbits(64),
            change,
            size_bytes=1,
            epoch=self.lives if self.epochs else 0,
            cleared=change.cleared,
        )
        self.next_id += 1
        if batch.event_id and rng.random() < self.drops:  # at the first one a queue is empty
            return None
        self.past.append(batch)
        if rng.random() < 0.1:
            self.cuts.append(self.state())
        return batch

    def state(self) -> State:
        last = self.past[-1] if self.past else None
        last_id = self.next_id - 1 if self.next_id else None
        digest = last.digest if last is not None else None
        return State(self.lives if self.epochs else 0, last_id, frozenset(self.truth), digest)


def change_of(blocks: set[int], change: Change) -> set[int]:
    return (set() if change.cleared else blocks) - change.remove | change.add


class World:
    """An engine, a bad channel, the machine, and what it made of it."""

    def __init__(self, seed: int, *, whole: bool = False) -> None:
        """`whole`: all of the history is always at hand."""
        self.rng = rng = random.Random(seed)
        self.engine = Engine(rng, 10_000 if whole else rng.choice([5, 10_000, 10_000]), rng.random() < 0.3)
        if not (whole or self.engine.epochs):
            self.engine.drops = rng.choice([0.0, 0.0, 0.05])
        self.can_replay = whole or rng.random() < 0.85
        self.budget = HeldBudget(rng.choice([1, 3, 10, 10_000]))
        """In batches: where it is spent, what was held comes again."""
        self.machine: SourceSequence[Change] = SourceSequence(can_replay=self.can_replay, budget=self.budget)
        self.applied: set[int] = set()
        self.channel: deque[Batch] = deque()
        self.loss = rng.choice([0.0, 0.05, 0.3])
        self.cuts = rng.choice([0.0, 0.3, 0.9])
        """How often a replay loses replies."""
        self.replay: deque[Batch | State | None] | None = None
        self.now = 0.0
        self.states: bool = self.engine.epochs and rng.random() < 0.7
        """Whether the engine's publisher keeps its state."""
        self.others: State | None = None
        """What a third party has, until the first replay."""
        if self.can_replay and rng.random() < 0.4:
            for _ in range(rng.randint(1, 30)):
                self.engine.publish()
            if rng.random() < 0.3:
                self.engine.restart()
            if self.engine.cuts:
                self.others = rng.choice(self.engine.cuts)._replace(second_hand=True)
            self.carry_out(self.machine.expect_state())

    def carry_out(self, decisions: list[Decision[Change]]) -> None:
        for decision in decisions:
            match decision:
                case Apply(batch):
                    self.applied = change_of(self.applied, batch.content)
                case Reset() | Demote():
                    self.applied = set()
                case RequestReplay(first_id):
                    self.replay = self.through_router([*self.answer_to(first_id), None])

    def through_router(self, replies: list[Batch | State | None]) -> deque[Batch | State | None]:
        """What is left of replies (None = their end): a full socket drops the next ones, never the first two."""
        if len(replies) > 2 and self.rng.random() < self.cuts:
            first = self.rng.randrange(2, len(replies))
            del replies[first : self.rng.randint(first, len(replies))]
        return deque(replies)

    def answer_to(self, first_id: int) -> list[Batch | State]:
        """What a replay brings now: where a state is at hand, never less than all."""
        if self.others is not None:
            others, self.others = self.others, None
            return [others]
        past = self.engine.past
        oldest = past[0].event_id if past else self.engine.next_id
        if self.states and (first_id == 0 or first_id < oldest or first_id >= self.engine.next_id):
            return [self.engine.state()]
        return [batch for batch in past if batch.event_id >= first_id]

    def load(self, attempt: int | None, state: State) -> None:
        if not self.machine.wants_state(attempt, epoch=state.epoch, last_id=state.last_id):
            return
        self.applied = set(state.blocks)
        self.carry_out(
            self.machine.on_state(
                attempt,
                epoch=state.epoch,
                last_id=state.last_id,
                second_hand=state.second_hand,
                last_digest=state.last_digest,
            )
        )

    def publish(self) -> None:
        batch = self.engine.publish()
        if batch is not None and self.rng.random() >= self.loss:
            self.channel.extend([batch] * (2 if self.rng.random() < 0.05 else 1))

    def deliver(self) -> None:
        if self.channel:
            self.carry_out(self.machine.on_batch(self.channel.popleft(), self.now))

    def answer(self) -> None:
        """One message of the running replay."""
        if self.replay is None or self.machine.retry_at is not None:
            return
        attempt = self.machine.attempt
        if self.rng.random() < 0.02:
            self.replay = None
            self.carry_out(self.machine.on_replay_failed(attempt, self.now))
            return
        if not self.replay:
            # Its end was lost: silence.
            self.replay = None
            self.carry_out(self.machine.on_replay_failed(attempt, self.now))
            return
        reply = self.replay.popleft()
        if isinstance(reply, State):
            self.load(attempt, reply)
            if reply.second_hand and attempt == self.machine.attempt:
                # The rest of the replay is the source's own, from there on.
                last_id = self.machine.last_id
                self.replay = self.through_router([*self.answer_to(last_id if last_id is not None else 0), None])
        elif reply is not None:
            self.carry_out(self.machine.on_replay(attempt, reply, self.now))
        else:
            self.replay = None
            self.carry_out(self.machine.on_replay_end(attempt, self.now))

    def reconnect(self) -> None:
        """The channel breaks: what it still holds is read first, what is published meanwhile is lost."""
        while self.channel:
            self.deliver()
        if self.rng.random() < 0.5:
            self.engine.restart()
        for _ in range(self.rng.randint(0, 6)):
            self.engine.publish()
        self.replay = None
        self.carry_out(self.machine.on_reconnect())

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.4:
            self.publish()
        elif kind < 0.7:
            self.deliver()
        elif kind < 0.96:
            self.answer()
        elif kind < 0.98:
            self.now += 1.0
            self.carry_out(self.machine.on_tick(self.now))
        elif kind < 0.985 and self.states:
            self.send_state()
        elif kind < 0.99:
            self.carry_out(self.machine.on_heal())
        else:
            self.reconnect()

    def send_state(self) -> None:
        """The publisher sends its state amid its batches; those under way may be overtaken."""
        self.load(None, self.engine.state())

    def quiet(self) -> None:
        """No more loss: last batches go through and every replay is answered."""
        self.loss = self.engine.drops = 0.0
        for _ in range(4):
            # A replay may lose its newest replies and not its end: the next batch shows that they are missing. So may
            # the one that follows when such a batch shows that the publisher had restarted.
            self.publish()
            self.drain()

    def drain(self) -> None:
        while self.channel or self.replay is not None or self.machine.retry_at is not None:
            self.deliver()
            self.answer()
            self.now += 1.0
            self.carry_out(self.machine.on_tick(self.now))
            if self.replay is None and self.machine.retry_at is None and self.states:
                self.carry_out(self.machine.on_heal())

    def check(self) -> None:
        assert not self.machine.replaying
        assert self.machine.held == self.budget.used == self.budget.lacking == 0
        assert self.machine.last_id == self.engine.next_id - 1
        if not self.machine.history_incomplete:
            assert self.applied == self.engine.truth
        elif self.states and self.can_replay:
            raise AssertionError("its publisher has a state and history is incomplete")
        else:
            assert self.applied <= self.engine.truth
            assert self.machine.missing


def test_after_any_loss_the_applied_state_is_the_engines() -> None:
    for seed in range(test_seed(), test_seed() + SEQUENCES):
        world = World(seed)
        try:
            for _ in range(world.rng.randint(10, 150)):
                world.step()
            world.quiet()
            world.check()
        except Exception as error:
            raise AssertionError(f"KVSCOUT_TEST_SEED={seed} KVSCOUT_SEQUENCES=1: {error!r}") from error


@pytest.mark.parametrize("seed", range(50))
def test_with_its_whole_history_at_hand_nothing_is_ever_incomplete(seed: int) -> None:
    world = World(seed, whole=True)
    for _ in range(100):
        world.step()
        # Too few replays fail here for one to be given up.
        assert not world.machine.history_incomplete
    world.quiet()
    assert world.applied == world.engine.truth
