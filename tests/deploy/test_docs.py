"""What the pages say of the code is so: flags with defaults and variables, tests that are named; none is left out."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The program that writes the tables of flags."""
    spec = spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_flags_is_what_the_programs_declare(generate: ModuleType) -> None:
    assert generate.PAGE.read_text() == generate.page(), "run `make docs-flags`"


def test_every_flag_has_its_default_its_effect_and_a_variable_and_every_number_its_unit(generate: ModuleType) -> None:
    table = generate.tables()
    for command in generate.programs().values():
        for name, option in generate.flags(command).items():
            assert f"`{option.opts[0]}" in table
            assert option.help and option.help.endswith("."), name
            assert option.envvar, name
            assert generate.unit_of(name, option) or not isinstance(option.type, click.types.FloatParamType), name


def test_a_number_whose_unit_nobody_tells_is_refused(generate: ModuleType) -> None:
    with pytest.raises(LookupError, match="--things count"):
        generate.unit_of("things", click.Option(["--things"], type=int))


def test_an_old_page_is_told_of_and_not_touched(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "tuning.md"
    page.write_text(f"By hand.\n\n{generate.MARKER}\n\n| an old table |\n")
    before = page.read_text()
    monkeypatch.setattr(generate, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert "make docs-flags" in capsys.readouterr().err
    assert page.read_text() == before
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    assert page.read_text() == generate.page()
    assert page.read_text().startswith("By hand.\n")


def test_every_failure_is_shown_by_a_test_that_there_is() -> None:
    text = (DOCS / "failure-modes.md").read_text()
    tables = [table.splitlines() for table in text.split("\n\n") if table.startswith("| failure")]
    rows = [line for table in tables for line in table[2:] if line.startswith("| ")]
    assert len(rows) > 50
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        for name in named:
            assert f"def {name}(" in tests, name


def test_every_page_is_where_a_newcomer_finds_it() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not re.search(rf": {re.escape(page)}$", nav, re.MULTILINE)} == set()


PAGES = (*sorted(DOCS.glob("*.md")), ROOT / "README.md", *sorted(ROOT.glob("services/*/README.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_page_begins_with_a_box_that_says_what_to_do(page: Path) -> None:
    box = re.match(r"# .+\n\n> \[!TIP\]\n((?:>.*\n)+)\n", page.read_text())
    assert box, "the title is followed by `> [!TIP]` and at most eight lines that say what to do"
    lines = [line for line in box[1].splitlines() if line.strip("> ") and not line.startswith("> ```")]
    assert 1 <= len(lines) <= 8
