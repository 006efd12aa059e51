"""Options that all benchmarks share: rows, rounds, peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvscout_common.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a benchmark, and how often they are measured.

    Raises:
        InvalidArgument: A value is out of range or names nothing.
    """

    rounds: int = 3
    only: tuple[str, ...] = ()
    """Parts of names of rows; empty: all."""
    quick: bool = False
    """Short: shows that everything works, judges nothing."""
    peer: str = ""
    """Measured too, in turns with ours; "": ours alone."""

    def __post_init__(self) -> None:
        if self.peer and self.peer not in self.known_peers():
            raise InvalidArgument(f"{self.peer!r} is none of {', '.join(self.known_peers())}", field="peer")
        if self.rounds < 1:
            raise InvalidArgument("must be at least 1", field="rounds")
        rows = list(self.rows())
        for part in self.only:
            if not any(part in row for row in rows):
                raise InvalidArgument(f"{part!r} is in no workload's name", field="only")

    @classmethod
    def rows(cls) -> Iterable[str]:
        """Return the names of all rows."""
        return ()

    @classmethod
    def known_peers(cls) -> Sequence[str]:
        """Return the names of the peers."""
        return ()

    @property
    def rounds_to_run(self) -> int:
        """Return the number of rounds: one in a quick run."""
        return 1 if self.quick else self.rounds

    def wanted(self, row: str) -> bool:
        """Return True if a row is selected."""
        return not self.only or any(part in row for part in self.only)
