"""Programs of others: each has one version, in one file, and is described as people write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvscout_bench import strangers
from kvscout_bench.strangers import ROOT, VERSIONS, DriverFailed, described, go_program, wheel_venv


def test_every_version_is_exact_and_of_a_wheel_or_a_go_module() -> None:
    assert len(VERSIONS) >= 10
    for requirement in VERSIONS.values():
        assert re.fullmatch(r"[a-z-]+==[\d.]+|[\w./-]+@v[\d.]+(\+incompatible)?", requirement), requirement


def test_no_other_file_of_benchmarks_and_tests_names_a_version() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("bench/kvscout_bench", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for requirement in VERSIONS.values()
        if requirement in path.read_text()
    }
    assert not found


def test_wheels_and_modules_are_described_alike() -> None:
    assert described("SMG").startswith("smg 1.")
    assert re.fullmatch(r"h2spec [\d.]+", described("H2SPEC"))


def test_without_go_the_message_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "_PEERS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DriverFailed, match="install Go, ghz is compiled with it"):
        go_program("GHZ")


def test_what_was_installed_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "_PEERS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / VERSIONS["SMG"].replace("==", "-")
    folder.mkdir()
    (folder / "complete").touch()
    assert wheel_venv(VERSIONS["SMG"]) == folder / "bin" / "python"
    version = VERSIONS["GHZ"].rpartition("@")[2]
    program = tmp_path / f"ghz-{version}" / "ghz"
    program.parent.mkdir()
    program.touch()
    assert go_program("GHZ") == program
