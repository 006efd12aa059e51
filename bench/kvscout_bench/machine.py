"""The machine of a benchmark."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the toolchain. "": not found."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    kernel: str
    python: str
    rustc: str


@cache
def this_machine() -> Machine:
    """Return the machine this process runs on; starts `rustc` for its version."""
    return Machine(
        cpu=cpu_model(_text("/proc/cpuinfo")) or platform.processor(),
        cores=len(usable_cores()),
        memory_gib=round(memory_kib(_text("/proc/meminfo")) / 2**20, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        rustc=_rustc(),
    )


def usable_cores() -> tuple[int, ...]:
    """Return numbers of the cores that this process may use, ascending; 0 .. n-1 where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_model(cpuinfo: str) -> str:
    """Return the CPU's name in the text of `/proc/cpuinfo`; "" if it has none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def memory_kib(meminfo: str) -> int:
    """Return the memory's size in the text of `/proc/meminfo`; 0 if it has none."""
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            return int(value.split()[0])
    return 0


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text() if file.exists() else ""


def _rustc() -> str:
    rustc = shutil.which("rustc")
    if rustc is None:
        return ""
    return subprocess.run([rustc, "--version"], capture_output=True, text=True, check=False).stdout.strip()
