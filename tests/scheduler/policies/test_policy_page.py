"""The page of policies has all that a policy sees, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from kvscout_scheduler.policies.policy import Candidates

PAGE = Path(__file__).resolve().parents[3] / "docs" / "policies.md"


def test_the_page_names_every_column_and_nothing_that_there_is_not() -> None:
    _, _, section = PAGE.read_text().partition("### What a policy sees")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[1])}
    made = Candidates.__init__.__code__.co_varnames
    has = {name for name in vars(Candidates) if not name.startswith("_")}
    has |= {name for name in made if name not in ("self", "pool", "prompts")}
    inner = {"time_cost_inputs"}  # of `seconds(time_cost_inputs())`
    assert named | inner == has
