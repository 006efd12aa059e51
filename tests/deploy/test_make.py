"""Each target of the Makefile installs what it needs, and nothing else; what takes long shows how far it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = ROOT / "deploy/progress.py"
SIDE_BY_SIDE = (
    "PROGRESS_LINES=1 make --no-print-directory -j2 .venv/stamps/runtime .venv/stamps/native .venv/stamps/develop \n"
)
TARGETS = re.findall(r"(?m)^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text())
NEITHER_PYTHON_NOR_VENV = {"help", "clients", "check-dist", "check-fresh-clone", "image-sbom", "real-vllm-scheduler"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make looks at in a clone, and no environment."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "deploy", "native/Cargo.toml", "native/Cargo.lock"):
        source, target = ROOT / name, tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    (tmp_path / "clone/native/src").mkdir()
    (tmp_path / "clone/native/src/lib.rs").touch()
    return tmp_path / "clone"


def recipes(clone: Path, *arguments: str, cargo: bool = True) -> str:
    """The commands that make would run."""
    tools = clone.parent / ("cargo" if cargo else "plain")
    if not tools.exists():
        tools.mkdir()
        if cargo:
            (tools / "cargo").write_text("#!/bin/sh\n")
            (tools / "cargo").chmod(0o755)
        for name in ("sh", "make", "grep", "awk", "find", "mkdir", "touch"):
            (tools / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is missing"))
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=clone,
        env={"PATH": str(tools)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def stamp(clone: Path, *names: str) -> None:
    """Say that something is installed."""
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.symlink_to(sys.executable)
    for name in names:
        (clone / ".venv/stamps").mkdir(exist_ok=True)
        (clone / ".venv/stamps" / name).touch()


@pytest.mark.parametrize("target", sorted(set(TARGETS) - NEITHER_PYTHON_NOR_VENV))
def test_every_target_makes_the_environment_first_where_there_is_none(clone: Path, target: str) -> None:
    # `setup` calls make itself, for what runs side by side.
    commands = recipes(clone, target).removeprefix(SIDE_BY_SIDE)
    assert commands.startswith("sh deploy/make-venv.sh .venv\n")
    assert commands.count("make-venv.sh") == 1


def test_the_extension_is_built_while_what_tests_need_is_installed(clone: Path) -> None:
    assert recipes(clone, "setup").startswith(SIDE_BY_SIDE)


def test_a_demo_installs_neither_what_tests_need_nor_a_browser(clone: Path) -> None:
    commands = recipes(clone, "demo")
    assert "'.[embedded]'" in commands
    assert "build_rust" in commands
    assert "[dev" not in commands
    assert "chromium" not in commands


def test_tests_need_all_of_it_and_where_no_cargo_is_everything_but_the_extension(clone: Path) -> None:
    for cargo in (True, False):
        commands = recipes(clone, "test", cargo=cargo)
        assert "'.[dev,docs,embedded,otel]'" in commands
        assert "install-chromium.sh" in commands
        assert ("build_rust" in commands) == cargo
        assert ("cargo test" in commands) == cargo


def test_who_does_not_want_the_extension_does_not_get_it(clone: Path) -> None:
    commands = recipes(clone, "test", "KVSCOUT_NATIVE=0")
    assert "build_rust" not in commands
    assert "cargo test" not in commands


def test_where_the_extension_is_required_it_is_built_or_fails(clone: Path) -> None:
    assert "build_rust" in recipes(clone, "test", "KVSCOUT_REQUIRE_NATIVE=1", cargo=False)


def test_what_is_installed_is_installed_again_when_that_changes_which_says_what_it_is(clone: Path) -> None:
    stamp(clone, "runtime", "native", "develop")
    assert "progress.py" not in recipes(clone, "setup")
    later = (clone / ".venv/stamps/develop").stat().st_mtime + 10
    source = clone / "native/src/lib.rs"
    os.utime(source, (later, later))
    commands = recipes(clone, "test", "TESTS=tests/common")
    assert "build_rust" in commands
    assert "pip install --disable-pip-version-check --progress-bar off --editable" not in commands
    os.utime(clone / "pyproject.toml", (later, later))
    assert "'.[embedded]'" in recipes(clone, "demo")
    assert "'.[dev,docs,embedded,otel]'" in recipes(clone, "test")


def progress(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in Python under progress.py."""
    return subprocess.run(
        [sys.executable, PROGRESS, "doing it", sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_command_that_does_well_shows_its_name_and_how_long_it_took() -> None:
    done = progress("print('a detail')")
    assert done.returncode == 0
    assert re.fullmatch(r"doing it \.\.\.\n\[\d+:\d\d\] doing it: done\n", done.stdout)


def test_a_command_that_fails_shows_all_that_it_wrote_and_its_exit_code() -> None:
    done = progress("import sys; print('out'); sys.stdout.flush(); print('the cause', file=sys.stderr); sys.exit(7)")
    assert done.returncode == 7
    assert "out\nthe cause\n" in done.stdout
    assert "doing it: failed with exit code 7" in done.stdout


def test_a_terminal_shows_how_far_cargo_and_pip_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRESS.parent)
    shown = __import__("progress").Progress("doing it")
    said = (
        (b"Collecting a>=1\n  Downloading a", "Collecting a>=1, package 1"),
        (b"-1.whl (2 kB)\nCollecting b\n", "Collecting b, package 2"),
        (b"Installing collected packages: a, b\n    Found existing installation: a 0\n", "Installing 2 packages"),
        (b"    Uninstalling a-0:\n      Successfully uninstalled a-0\n", "Installing 2 packages"),
        (b"    Building [====>   ] 34/57: pyo3-ffi, mio\r", "Building 34/57: pyo3-ffi, mio"),
        (b"\x1b[K    Building [=====>  ] 35/57: m", "Building 34/57: pyo3-ffi, mio"),
        (b"io\r", "Building 35/57: mio"),
    )
    for chunk, line in said:
        shown.read(chunk)
        assert shown.state(80) == f"[0:00] doing it: {line}"
    assert len(shown.state(20)) == 20
