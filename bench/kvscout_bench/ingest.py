"""`kvscout bench ingest`: what it costs a real indexer process to take events in, part by part.

A part is a module beside this one that measures one way in which events come (`ingest_zmq`, ...): it has `NAME`, `ROWS`
(names of its rows) and `run`. To add one, add it to `PARTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvscout_bench import ingest_bridge, ingest_jetstream, ingest_zmq
from kvscout_bench.harness import Row
from kvscout_bench.selection import Selection


class Part(Protocol):
    """One way in which events come."""

    NAME: str
    ROWS: Sequence[str]

    def run(
        self, *, rounds: int, quick: bool, wanted: Callable[[str], bool], say: Callable[[str], None], peer: str = ""
    ) -> Iterator[Row]:
        """Measure; blocks.

        Args:
            rounds: Runs of each row.
            quick: Short runs that show that everything works, and judge nothing.
            wanted: Returns whether a row is selected.
            say: Reports progress, a line a call.
            peer: Measured too, in turns, as far as it takes events in that way; "" = none.

        Raises:
            DriverFailed: A process cannot be started, or fails.
        """
        ...


PEERS = ("dynamo",)
PARTS: tuple[Part, ...] = (ingest_zmq, ingest_jetstream, ingest_bridge)


@dataclass(frozen=True, slots=True)
class IngestBench(Selection):
    """Rows to run. Errors as of `Selection`."""

    @classmethod
    def known_peers(cls) -> Sequence[str]:
        """Return the names of the peers."""
        return PEERS

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return (row for part in PARTS for row in part.ROWS)

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measure part by part; blocks. Arguments and errors as of `Part.run`."""
        for part in PARTS:
            if any(self.wanted(row) for row in part.ROWS):
                say(part.NAME)
                yield from part.run(
                    rounds=self.rounds_to_run, quick=self.quick, wanted=self.wanted, say=say, peer=self.peer
                )
