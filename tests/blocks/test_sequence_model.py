"""Random loss, duplication, reconnects and restarts: in the end the index side equals the engine.

The engine's truth is a set of blocks that its batches add to, remove from or clear. The channel loses and
repeats batches, sockets reconnect, the engine restarts with and without epochs, replays are answered late,
in pieces or not at all. Once quiet, what the decisions applied must equal the truth; where history was out
of reach, it must be a part of it, and say so. `KVSCOUT_SEQUENCE_SEED` reruns one sequence.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import NamedTuple

import pytest

from kvscout_blocks.sequence import (
    Apply,
    Decision,
    Demote,
    RequestReplay,
    Reset,
    SequencedBatch,
    SourceSequence,
)

SEQUENCES = int(os.environ.get("KVSCOUT_SEQUENCES", "400"))
ONE_SEED = os.environ.get("KVSCOUT_SEQUENCE_SEED")
BLOCKS = 8


class Change(NamedTuple):
    """What one batch does."""

    add: frozenset[int]
    remove: frozenset[int]
    cleared: bool


Batch = SequencedBatch[Change]


class Engine:
    """Publishes changes; remembers the last `buffer` of them."""

    def __init__(self, rng: random.Random, buffer: int, epochs: bool) -> None:
        self.rng = rng
        self.epochs = epochs
        self.lives = 0
        self.past: deque[Batch] = deque(maxlen=buffer)
        self.restart()

    def restart(self) -> None:
        self.lives += 1
        self.next_id = 0
        self.truth: set[int] = set()
        self.past.clear()

    def publish(self) -> Batch:
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
        self.past.append(batch)
        return batch


def change_of(blocks: set[int], change: Change) -> set[int]:
    return (set() if change.cleared else blocks) - change.remove | change.add


class World:
    """An engine, a bad channel, the machine, and what it made of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.engine = Engine(rng, rng.choice([5, 10_000, 10_000]), rng.random() < 0.3)
        self.can_replay = rng.random() < 0.85
        self.machine: SourceSequence[Change] = SourceSequence(can_replay=self.can_replay)
        self.applied: set[int] = set()
        self.channel: deque[Batch] = deque()
        self.loss = rng.choice([0.0, 0.05, 0.3])
        self.replay: deque[Batch | None] | None = None
        self.now = 0.0

    def carry_out(self, decisions: list[Decision[Change]]) -> None:
        for decision in decisions:
            match decision:
                case Apply(batch):
                    self.applied = change_of(self.applied, batch.content)
                case Reset() | Demote():
                    self.applied = set()
                case RequestReplay(first_id):
                    answer = [batch for batch in self.engine.past if batch.event_id >= first_id]
                    self.replay = deque([*answer, None])

    def publish(self) -> None:
        batch = self.engine.publish()
        if self.rng.random() >= self.loss:
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
        reply = self.replay.popleft()
        if reply is not None:
            self.carry_out(self.machine.on_replay(attempt, reply))
        else:
            self.replay = None
            self.carry_out(self.machine.on_replay_end(attempt))

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
        else:
            self.reconnect()

    def quiet(self) -> None:
        """No more loss: a last batch goes through and every replay is answered."""
        self.loss = 0.0
        self.publish()
        while self.channel or self.replay is not None or self.machine.retry_at is not None:
            self.deliver()
            self.answer()
            self.now += 1.0
            self.carry_out(self.machine.on_tick(self.now))

    def check(self) -> None:
        assert not self.machine.replaying
        assert self.machine.held == 0
        assert self.machine.last_id == self.engine.next_id - 1
        if not self.machine.history_incomplete:
            assert self.applied == self.engine.truth
        else:
            assert self.applied <= self.engine.truth
            assert self.machine.missing


def test_after_any_loss_the_applied_state_is_the_engines() -> None:
    base = random.SystemRandom().randrange(2**32)
    seeds = [int(ONE_SEED)] if ONE_SEED else [base + n for n in range(SEQUENCES)]
    for seed in seeds:
        world = World(seed)
        try:
            for _ in range(world.rng.randint(10, 150)):
                world.step()
            world.quiet()
            world.check()
        except Exception as error:
            raise AssertionError(f"KVSCOUT_SEQUENCE_SEED={seed}: {error!r}") from error


@pytest.mark.parametrize("seed", range(50))
def test_with_its_whole_history_at_hand_nothing_is_ever_incomplete(seed: int) -> None:
    world = World(seed)
    world.can_replay = True
    world.machine = SourceSequence()
    world.engine.past = deque(world.engine.past)
    for _ in range(100):
        world.step()
        # Too few replays fail here for one to be given up.
        assert not world.machine.history_incomplete
    world.quiet()
    assert world.applied == world.engine.truth
