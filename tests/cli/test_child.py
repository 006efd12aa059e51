"""The step between the supervisor and its program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvscout_cli.child

CHILD = Path(kvscout_cli.child.__file__)


def run_child(parent: int, *program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(CHILD), str(parent), *program], capture_output=True, text=True, check=False
    )


def test_it_becomes_the_program_with_its_arguments_and_environment() -> None:
    done = run_child(os.getpid(), sys.executable, "-c", "import sys, os; print(sys.argv[1:], os.getppid())", "a b")
    assert (done.returncode, done.stdout.strip()) == (0, f"['a b'] {os.getpid()}")


def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    done = run_child(os.getpid() + 1, sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has ended" in done.stderr
