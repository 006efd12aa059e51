"""Policies as another package would bring them, found through entry points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvscout_scheduler.policies import Candidates


class LastRank:
    """Always the last rank."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return len(costs) - 1

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return "the last"


class Raising(LastRank):
    """Has a defect that not every request meets."""

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if rng.random() < 0.5:
            raise RuntimeError("out of ideas")
        return super().pick(candidates, costs, rng)


class AlwaysRaising(LastRank):
    """Has a defect that every request meets."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        raise KeyError("no such column")


def install(folder: Path) -> None:
    """Makes them a package for processes that have this folder, and that of this module, on their path."""
    package = folder / "kvscout_policies_of_tests-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvscout-policies-of-tests\nVersion: 1\n")
    entries = "".join(f"{name} = {__name__}:{made.__name__}\n" for name, made in POLICIES.items())
    (package / "entry_points.txt").write_text(f"[kvscout.policies]\n{entries}")


POLICIES = {"last-rank": LastRank, "raising": Raising, "always-raising": AlwaysRaising}
