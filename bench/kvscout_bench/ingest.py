"""`kvscout bench ingest`: what it costs a real indexer process to take events in, part by part.

A part is a module beside this one that measures one way in which events come (`ingest_zmq`, ...): it has `NAME`, `ROWS`
(names of its rows) and `run`. To add one, add it to `PARTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvscout_bench import ingest_bridge, ingest_jetstream, ingest_zmq
from kvscout_bench.harness import Row
from kvscout_common.errors import InvalidArgument


class Part(Protocol):
    """One way in which events come."""

    NAME: str
    ROWS: Sequence[str]

    def run(
        self, *, rounds: int, quick: bool, wanted: Callable[[str], bool], say: Callable[[str], None]
    ) -> Iterator[Row]:
        """Measures; blocks.

        Args:
            rounds: Runs of each row.
            quick: Short runs that show that everything works, and judge nothing.
            wanted: Whether a row is asked for.
            say: Is told what is going on.

        Raises:
            DriverFailed: A process cannot be started, or fails.
        """
        ...


PARTS: tuple[Part, ...] = (ingest_zmq, ingest_jetstream, ingest_bridge)


@dataclass(frozen=True, slots=True)
class IngestBench:
    """What to run.

    Raises:
        InvalidArgument: A value is out of range or names nothing.
    """

    rounds: int = 3
    only: tuple[str, ...] = ()
    """Parts of names of rows; empty: all."""
    quick: bool = False
    """Short: shows that everything works, judges nothing."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidArgument("must be at least 1", field="rounds")
        for part in self.only:
            if not any(part in row for each in PARTS for row in each.ROWS):
                raise InvalidArgument(f"{part!r} is in no workload's name", field="only")

    def wanted(self, row: str) -> bool:
        """Whether a row is asked for."""
        return not self.only or any(part in row for part in self.only)

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measures part by part; blocks. Arguments and errors as of `Part.run`."""
        for part in PARTS:
            if any(self.wanted(row) for row in part.ROWS):
                say(part.NAME)
                rounds = 1 if self.quick else self.rounds
                yield from part.run(rounds=rounds, quick=self.quick, wanted=self.wanted, say=say)
