"""What of a benchmark is to be run, and how often: the options that benchmarks of services share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvscout_common.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Selection:
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
        rows = list(self.rows())
        for part in self.only:
            if not any(part in row for row in rows):
                raise InvalidArgument(f"{part!r} is in no workload's name", field="only")

    @classmethod
    def rows(cls) -> Iterable[str]:
        """Names of all rows that there are."""
        return ()

    @property
    def rounds_to_run(self) -> int:
        """One, if it is to be quick."""
        return 1 if self.quick else self.rounds

    def wanted(self, row: str) -> bool:
        """Whether a row is asked for."""
        return not self.only or any(part in row for part in self.only)
