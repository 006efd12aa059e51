"""The backends of active load, for tests that hold for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from kvscout_common.hashing import native_available
from kvscout_scheduler.costs.cost import BlockFormat, ScoreInputs
from kvscout_scheduler.costs.targets import StepTimes, Times
from kvscout_scheduler.costs.time_cost import TimeCostInputs
from kvscout_scheduler.load.active_load import ActiveLoad, Cheapest, Draw, Limits, ReferenceLoad, Scores, SlotLoad
from kvscout_scheduler.values.overlaps import AnyOverlaps
from support.scheduler_invariants import check_load

MakeLoad = Callable[..., ActiveLoad]
T = TypeVar("T")


def backends() -> list[Any]:
    """Both classes, the native one where it is there."""
    made = [pytest.param(ReferenceLoad, id="reference")]
    if native_available():
        from kvscout_scheduler.load.native import NativeLoad

        made.append(pytest.param(NativeLoad, id="native"))
    return made


@dataclass(frozen=True, eq=False)
class Pair:
    """One request's allocations, in each backend."""

    slot: int
    each: list[Any]


class SideBySide:
    """All backends as one: told the same, and asserted to say the same."""

    def __init__(self, *, track_blocks: bool = True) -> None:
        self.track_blocks = track_blocks
        self._backends: list[ActiveLoad] = [make.values[0](track_blocks=track_blocks) for make in backends()]

    @property
    def requests(self) -> Sequence[int]:
        return self._same(lambda backend: list(backend.requests))

    @property
    def prefill_tokens(self) -> Sequence[int]:
        return self._same(lambda backend: list(backend.prefill_tokens))

    @property
    def decode_blocks(self) -> Sequence[int]:
        return self._same(lambda backend: list(backend.decode_blocks))

    def at(self, slot: int) -> SlotLoad:
        return self._same(lambda backend: backend.at(slot))

    def ensure_slot(self, slot: int) -> None:
        for backend in self._backends:
            backend.ensure_slot(slot)

    def limit(self, slot: int, limits: Limits) -> None:
        for backend in self._backends:
            backend.limit(slot, limits)

    def busy(self) -> int:
        return self._same(lambda backend: backend.busy())

    def full(self) -> int:
        return self._same(lambda backend: backend.full())

    def arrange(self, slot_of: Mapping[tuple[str, int], int], order: Sequence[int]) -> None:
        for backend in self._backends:
            backend.arrange(slot_of, order)

    def add(
        self, slot: int, block_format: BlockFormat, hashes: bytes, *, private_blocks: int = 0, prefill_tokens: int = 0
    ) -> Pair:
        more = {"private_blocks": private_blocks, "prefill_tokens": prefill_tokens}
        return Pair(slot, [backend.add(slot, block_format, hashes, **more) for backend in self._backends])

    def complete_prefill(self, allocation: Pair) -> None:
        for backend, each in zip(self._backends, allocation.each, strict=True):
            backend.complete_prefill(each)

    def add_private(self, allocation: Pair, blocks: int) -> None:
        for backend, each in zip(self._backends, allocation.each, strict=True):
            backend.add_private(each, blocks)

    def remove(self, allocation: Pair) -> None:
        for backend, each in zip(self._backends, allocation.each, strict=True):
            backend.remove(each)
        self.at(allocation.slot)

    def shared(self, block_format: BlockFormat, hashes: bytes) -> dict[int, int]:
        return self._same(lambda backend: backend.shared(block_format, hashes))

    def score(self, question: ScoreInputs, overlaps: AnyOverlaps, slots: int | None) -> Scores:
        scores = [backend.score(question, overlaps, slots) for backend in self._backends]
        for column in COLUMNS:
            assert_same([list(getattr(each, column)) for each in scores])
        return SameScores(scores)

    def cheapest(
        self,
        question: ScoreInputs,
        overlaps: AnyOverlaps,
        slots: int | None,
        times: TimeCostInputs | None,
        home: int,
        draw: Draw,
    ) -> Cheapest:
        drawn: list[int] = []

        def once(ties: int) -> int:
            if not drawn:
                drawn.append(draw(ties))
            return drawn[0]

        return self._same(lambda backend: backend.cheapest(question, overlaps, slots, times, home, once))

    def check_invariants(self, allocations: Iterable[Pair]) -> None:
        pairs = list(allocations)
        for number, backend in enumerate(self._backends):
            check_load(backend, [pair.each[number] for pair in pairs])
        for column in (self.requests, self.prefill_tokens, self.decode_blocks):
            assert min(column, default=0) >= 0

    def _same(self, ask: Callable[[ActiveLoad], T]) -> T:
        return assert_same([ask(backend) for backend in self._backends])


class SameScores:
    """Scores of all backends, whose columns are equal."""

    def __init__(self, scores: list[Scores]) -> None:
        self._scores = scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scores[-1], name)

    def seconds(self, question: TimeCostInputs) -> Sequence[float]:
        costs = [each.seconds(question) for each in self._scores]
        assert_same([list(each) for each in costs])
        return costs[-1]

    def response_times(self, question: TimeCostInputs, steps: StepTimes) -> Sequence[Times]:
        return assert_same([list(each.response_times(question, steps)) for each in self._scores])


COLUMNS = ("device_blocks", "effective_blocks", "cached_tokens", "prefill_tokens", "decode_blocks", "costs")


def assert_same(answers: list[T]) -> T:
    """The answer, which must be that of all."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]
