"""An extension that was built from other sources than those beside it is noticed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from kvscout_native import sources


@pytest.fixture
def crate(tmp_path: Path) -> Path:
    crate = tmp_path / "native"
    (crate / "src/index").mkdir(parents=True)
    for name in ("Cargo.toml", "Cargo.lock", "src/lib.rs", "src/index/trie.rs"):
        (crate / name).write_text(name)
    return crate


def build(crate: Path) -> Path:
    built_from = crate / "_built_from"
    built_from.write_text(sources.digest(crate))
    return built_from


def make_newer(path: Path, than: Path) -> None:
    later = than.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))


def test_what_was_just_built_is_not_stale(crate: Path) -> None:
    assert not sources.is_stale(crate, build(crate))


@pytest.mark.parametrize("name", ["Cargo.lock", "src/index/trie.rs", "src/index/new.rs"])
def test_a_source_that_changed_or_came_after_the_build_makes_it_stale(crate: Path, name: str) -> None:
    built_from = build(crate)
    (crate / name).write_text("other")
    make_newer(crate / name, built_from)
    assert sources.is_stale(crate, built_from)


def test_a_source_that_was_only_touched_does_not(crate: Path) -> None:
    built_from = build(crate)
    make_newer(crate / "src/lib.rs", built_from)
    assert not sources.is_stale(crate, built_from)


def test_nothing_is_judged_without_sources_or_without_a_digest(crate: Path, tmp_path: Path) -> None:
    assert not sources.is_stale(crate, tmp_path / "none")
    assert not sources.is_stale(tmp_path / "site-packages", build(crate))


def test_the_warning_says_what_mends_it(crate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built_from = build(crate)
    monkeypatch.setattr(sources, "CRATE", crate)
    monkeypatch.setattr(sources, "BUILT_FROM", built_from)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sources.warn_if_stale()
    (crate / "src/lib.rs").write_text("other")
    make_newer(crate / "src/lib.rs", built_from)
    with pytest.warns(RuntimeWarning, match="make native"):
        sources.warn_if_stale()
