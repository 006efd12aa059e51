"""The systemd units: what systemd says of them, and whether their programs read what they are given."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
SERVICES = ("bridge", "gateway", "indexer", "scheduler", "serve")
INSTALLED = "/opt/kvscout/bin/"


def command(service: str) -> click.Command:
    """Its program."""
    main: click.Command = import_module(f"kvscout_{service}.main").main
    return main


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    units = [tmp_path / f"kvscout-{service}.service" for service in SERVICES]
    for unit in units:
        text = (UNITS / unit.name).read_text()
        unit.write_text(text.replace(INSTALLED, f"{sysconfig.get_path('scripts')}/"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], check=False, capture_output=True, text=True
    )
    ours = [line for line in verified.stderr.splitlines() if "kvscout" in line]
    assert not ours
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_starts_its_program_waits_until_it_serves_and_outwaits_its_grace(service: str) -> None:
    unit = (UNITS / f"kvscout-{service}.service").read_text()
    defaults: dict[str | None, Any] = {one.name: one.default for one in command(service).params}
    program = "kvscout serve" if service == "serve" else f"kvscout-{service}"
    assert f"ExecStart={INSTALLED}{program}\n" in unit
    assert f"ExecStartPost={INSTALLED}kvscout health localhost:{defaults['port']} --wait 60\n" in unit
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop is not None
    assert int(stop[1]) > defaults["grace_seconds"]


def test_each_variable_of_the_environment_file_is_read_by_a_service() -> None:
    named = set(re.findall(r"^#?(KVSCOUT_\w+)=", (UNITS / "kvscout.env").read_text(), re.MULTILINE))
    assert len(named) > 5
    read = {name for service in SERVICES for flag in command(service).params for name in (flag.envvar or ())}
    assert named <= read
