"""compose.yaml and Dockerfile, as far as they can be judged without a Docker engine; `make e2e-compose` has one."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvscout_cli.topology import DEFAULT_PORTS
from kvscout_common.workers_file import load_workers

ROOT = Path(__file__).resolve().parents[2]
STACK: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = STACK["services"]
OURS = {name: service for name, service in SERVICES.items() if "kvscout" in str(service.get("image"))}


def program(service: str) -> tuple[click.Command, list[str]]:
    """The command of a container, and its words."""
    name, *words = shlex.split(OURS[service]["command"])
    main: click.Command = import_module(f"{name.replace('-', '_')}.main").main
    return main, words


@pytest.mark.parametrize("service", sorted(OURS))
def test_the_flags_and_variables_of_each_service_are_its_programs_own(service: str) -> None:
    command, words = program(service)
    context = command.make_context(
        service, ["/dev/null" if word.startswith("/etc/kvscout/") else word for word in words]
    )
    assert context.params["host"] is not None
    known = {name for parameter in command.params for name in (parameter.envvar or ())}
    shared = {name for other in OURS for parameter in program(other)[0].params for name in (parameter.envvar or ())}
    assert set(OURS[service]["environment"]) <= shared
    assert "kvscout_host" in known


def test_it_has_two_of_each_service_and_everything_waits_for_what_it_needs() -> None:
    replicated = ("indexer", "scheduler", "gateway", "mocker", "prefill", "decode")
    assert {f"{name}-{number}" for name in replicated for number in (1, 2)} <= set(SERVICES)
    for name, service in SERVICES.items():
        for needed, how in service["depends_on"].items() if isinstance(service.get("depends_on"), dict) else ():
            assert how == {"condition": "service_healthy"}, (name, needed)
            assert needed in SERVICES
    named = shlex.split(OURS["gateway-1"]["command"])
    assert {address.partition(":")[0] for address in named if ":" in address} == {
        *("indexer-1", "indexer-2", "scheduler-1", "scheduler-2")
    }


def test_nothing_is_published_beyond_this_machine_and_nothing_of_ours_can_do_more_than_it_must() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    for service in OURS.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        stopped_after = int(service["stop_grace_period"].removesuffix("s"))
        assert stopped_after > int(service["environment"].get("kvscout_grace_seconds", 0))


def test_the_bridges_name_all_engines_as_they_are_started() -> None:
    for bridge, engines in {"bridge": "mocker", "bridge-prefill": "prefill", "bridge-decode": "decode"}.items():
        (mounted,) = OURS[bridge]["volumes"]
        for worker in load_workers(ROOT / mounted.split(":")[0]):
            command, words = program(worker.worker_id)
            values = command.make_context(worker.worker_id, words).params
            assert worker.worker_id.startswith(engines)
            assert (worker.model, worker.block_size) == (values["model"], values["block_size"])
            assert worker.role.value == values["role"].value
            assert worker.http_endpoint == f"http://{worker.worker_id}:{values['port']}"


def test_prometheus_looks_at_every_service_and_grafana_has_the_dashboard() -> None:
    scraped = yaml.safe_load((ROOT / "deploy/compose/prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    targets = {target for static in job["static_configs"] for target in static["targets"]}
    metrics = {"gateway": 9093, "indexer": 9091, "scheduler": 9092, "bridge": 9094}
    assert targets == {f"{name}:{metrics[name.split('-')[0]]}" for name in OURS if name.split("-")[0] in metrics}
    mounted = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in SERVICES[name]["volumes"]]
    assert all((ROOT / path).is_file() for path in mounted if path.startswith("./"))
    assert "title" in json.loads((ROOT / "deploy/grafana/kvscout.json").read_text())
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["observe"]


def test_the_image_has_no_secret_and_the_ports_of_its_health_check_are_those_of_the_programs() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept - {"dist/image"})
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER \d+:\d+$", dockerfile, re.MULTILINE)
    assert 'CMD ["kvscout", "health"]' in dockerfile
    for service in OURS:
        name = shlex.split(OURS[service]["command"])[0].removeprefix("kvscout-")
        (port,) = (p.default for p in program(service)[0].params if p.name == "port")
        assert port == getattr(DEFAULT_PORTS, "mocker_http" if name == "mocker" else name)
