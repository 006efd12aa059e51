"""docs/metrics.md has every metric that the services show and no other; rules and dashboard ask for those alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/kvscout.rules.yaml"
NAME = re.compile(r"\b(?:kvscout|grpc_server)_[a-z_]+\b")
SUFFIXES = ("_total", "_bucket", "_count", "_sum")
MADE = re.compile(
    r"\b(?:(?:Counter|Gauge|Histogram)(?:Metric(?:Family)?)?|RankFamily|_refused)[(,]\s*f?\"((?:kvscout|grpc_server)_[a-z_]+)",
    re.DOTALL,
)
TABLED = re.compile(r'^\s*(?:"\w+": \()?"(kvscout_[a-z_]+)"(?:: \(|, ")', re.MULTILINE)
FAMILIES = {"kvscout_replica_": ROOT / "services/scheduler/kvscout_scheduler/replicas/replicas.py"}
"""Metrics whose names are put together."""


def base(name: str) -> str:
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def in_code() -> set[str]:
    found = set()
    for folder in ("common", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "prometheus_client" in text and "kvscout_mocker" not in str(path):
                found |= {*MADE.findall(text), *TABLED.findall(text)}
    for prefix, path in FAMILIES.items():
        counts = re.search(r"counts = \{(.*?)\n        \}\n", path.read_text(), re.DOTALL)
        assert counts is not None
        found.discard(prefix)
        found |= {prefix + name for name in re.findall(r'^            "(\w+)": \(', counts[1], re.MULTILINE)}
    return found


def documented() -> set[str]:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    return {base(name) for name in NAME.findall(rows)}


def test_the_page_has_every_metric_and_no_other() -> None:
    shown = in_code()
    assert len(shown) > 60
    assert documented() ^ shown == set()


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    dashboard = json.loads((ROOT / "deploy/grafana/kvscout.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = [rule["expr"] for rule in rules] + targets
    assert len(rules) == 9
    assert len(targets) > 15
    known = documented()
    for expression in asked:
        names = {base(name) for name in NAME.findall(expression)}
        assert names <= known, expression
    page = (ROOT / "docs/metrics.md").read_text()
    assert all(f"`{rule['alert']}`" in page for rule in rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_when_they_should_and_not_before() -> None:
    for command in ("check", "test"):
        file = RULES if command == "check" else RULES.with_name("kvscout.rules.test.yaml")
        done = subprocess.run(["promtool", command, "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
