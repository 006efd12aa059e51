"""The scenario files, over every implementation of the block index."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.index_scenarios import IndexFactory, ScenarioRunner, scenario_files

FILES = scenario_files(Path(__file__).parent / "scenarios")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_gives_the_answers_it_names(path: Path, index_factory: IndexFactory) -> None:
    ScenarioRunner(index_factory).run(path.read_text(), path.name)


def test_there_are_scenarios() -> None:
    assert FILES
