"""Programs that nobody of this project wrote, in the versions of `bench/strangers.env`: wheels in venvs, Go modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvscout_common.errors import FailedPrecondition

ROOT: Final = Path(__file__).resolve().parents[2]
"""The source tree."""
_FILE: Final = ROOT / "bench" / "strangers.env"
_PEERS: Final = ROOT / ".kvscout" / "peers"


class DriverFailed(FailedPrecondition):
    """A driver or a peer cannot be installed, built or started, ended early, or refused a command."""


def _versions() -> Mapping[str, str]:
    lines = (line.strip() for line in _FILE.read_text().splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: requirement for name, _, requirement in pairs}


VERSIONS: Final = _versions()
"""Requirement of pip, or module@version of Go, by name."""


def described(name: str) -> str:
    """Return name and version as people write them."""
    return VERSIONS[name].rpartition("/")[2].replace("==", " ").replace("@v", " ").removesuffix("+incompatible")


def wheel_venv(*wheels: str) -> Path:
    """Return the Python of a venv that has these wheels, made first if it is not there.

    Args:
        wheels: Requirements with versions; the first one names the venv.

    Raises:
        DriverFailed: They cannot be installed.
    """
    folder = _PEERS / wheels[0].replace("==", "-")
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *wheels]
        if subprocess.run(install, stdout=sys.stderr, check=False).returncode:
            raise DriverFailed(f"{wheels[0]} cannot be installed into {folder}; pip's messages are above")
        complete.touch()
    return python


def go_program(name: str) -> Path:
    """Return the program of a Go module, compiled first if it is not there.

    Args:
        name: Of the module in `VERSIONS`.

    Raises:
        DriverFailed: There is no Go, or it does not compile.
    """
    module, _, version = VERSIONS[name].partition("@")
    program = module.rpartition("/")[2]
    folder = _PEERS / f"{program}-{version.removesuffix('+incompatible')}"
    if not (folder / program).exists():
        go = shutil.which("go")
        if go is None:
            raise DriverFailed(f"go is not on PATH: install Go, {program} is compiled with it")
        environment = {**os.environ, "GOBIN": str(folder)}
        if subprocess.run([go, "install", VERSIONS[name]], env=environment, check=False).returncode:
            raise DriverFailed(f"{module} does not compile; go's messages are above")
    return folder / program
