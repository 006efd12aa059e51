"""compose.yaml and Dockerfile, as far as they can be judged without a Docker engine; `make e2e-compose` has one."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import nats
import pytest
import yaml
from packaging.requirements import Requirement
from support.free_ports import free_ports
from support.nats_server import nats_server

from kvscout_cli.topology import DEFAULT_PORTS
from kvscout_common.registry.workers_file import load_workers

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
    assert "KVSCOUT_HOST" in known


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
        assert stopped_after > int(service["environment"].get("KVSCOUT_GRACE_SECONDS", 0))


def test_the_bridges_name_all_engines_as_they_are_started() -> None:
    for bridge, engines in {"bridge": "mocker", "bridge-prefill": "prefill", "bridge-decode": "decode"}.items():
        (mounted,) = OURS[bridge]["volumes"]
        command, words = program(bridge)
        words = ["/dev/null" if word.startswith("/etc/kvscout/") else word for word in words]
        lease = command.make_context(bridge, words).params["lease_seconds"]
        assert lease >= 60, "it is replaced within its lease, on a busy machine, too"
        for worker in load_workers(ROOT / mounted.split(":")[0]):
            command, words = program(worker.worker_id)
            values = command.make_context(worker.worker_id, words).params
            assert worker.worker_id.startswith(engines)
            assert (worker.model, worker.block_size) == (values["model"], values["block_size"])
            assert worker.role.value == values["role"].value
            assert worker.http_endpoint == f"http://{worker.worker_id}:{values['port']}"


def test_every_container_has_bounds_and_a_health_check_that_a_busy_machine_passes() -> None:
    for name, service in SERVICES.items():
        assert {"mem_limit", "cpus", "pids_limit"} <= service.keys(), name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["cap_drop"] == ["ALL"], name
        health = service["healthcheck"]
        seconds = {key: int(health[key].removesuffix("s")) for key in ("interval", "timeout", "start_period")}
        assert seconds["timeout"] >= 15, name
        assert seconds["start_period"] >= 120, name
        assert health["retries"] * seconds["interval"] >= 30, name
        if name not in OURS:
            assert health["test"], f"{name}: the image has none of its own"


def test_nats_and_grafana_want_passwords_that_nobody_knows_beforehand(tmp_path: Path) -> None:
    text = (ROOT / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+_PASSWORD)([^}]*)\}", text))
    assert {name for name, _ in used} == {"NATS_PASSWORD", "GRAFANA_PASSWORD"}
    assert all(how.startswith(":?") for _, how in used), "a default would be everybody's password"
    script = tmp_path / "deploy/compose/make-env.sh"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "deploy/compose/make-env.sh").read_text())
    (tmp_path / ".env").write_text("GRAFANA_PASSWORD=mine\nNATS_PASSWORD=\n")
    for _ in range(2):
        subprocess.run(["sh", script], check=True)
    written = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert written["GRAFANA_PASSWORD"] == "mine"
    assert re.fullmatch(r"[a-z][0-9a-f]{40}", written["NATS_PASSWORD"])


async def test_nats_lets_in_who_has_the_password_and_its_monitoring_answers_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (monitoring,) = free_ports(1)
    text = (ROOT / "deploy/compose/nats.conf").read_text()
    assert 'http: "127.0.0.1:8222"' in text
    file = tmp_path / "nats.conf"
    file.write_text(text.replace("8222", str(monitoring)).replace("/data", str(tmp_path)))
    monkeypatch.setenv("NATS_PASSWORD", "k0123")
    async with nats_server(extra_flags=("--config", str(file)), jetstream=False) as server:
        for user in ({}, {"user": "kvscout", "pass": "wrong"}):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b"CONNECT %s\r\nPING\r\n" % json.dumps({"verbose": False, **user}).encode())
            assert await reader.readline() == b"-ERR 'Authorization Violation'\r\n"
            writer.close()
        client = await nats.connect(f"nats://kvscout:k0123@127.0.0.1:{server.port}")
        await client.jetstream().account_info()
        await client.close()
        _, writer = await asyncio.open_connection("127.0.0.1", monitoring)
        writer.close()


def test_images_are_named_by_their_digests_the_same_everywhere() -> None:
    named = re.findall(
        r"(?:_IMAGE:-|_IMAGE=)([^}\s]+)", (ROOT / "compose.yaml").read_text() + (ROOT / "Dockerfile").read_text()
    )
    foreign = {image for image in named if not image.startswith("kvscout:")}
    assert len(foreign) == 5
    for image in foreign:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
    assert len({image.partition("@")[0] for image in foreign}) == len(foreign), "one image, two digests"


def test_digests_are_those_that_the_registry_has_now_or_all_stay(tmp_path: Path) -> None:
    files = ("compose.yaml", "Dockerfile")
    for name in files:
        (tmp_path / name).write_text((ROOT / name).read_text())
    docker = tmp_path / "docker"
    command = (sys.executable, str(ROOT / "deploy/pin_images.py"), str(tmp_path))

    def pin(script: str) -> subprocess.CompletedProcess[str]:
        docker.write_text(f"#!/bin/sh\n{script}\n")
        docker.chmod(0o755)
        return subprocess.run(
            command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False, capture_output=True, text=True
        )

    refused = pin('case $4 in nats*) echo no such host >&2; exit 1;; *) echo sha256:$(printf "%064d" 7);; esac')
    assert refused.returncode
    assert "the digest of nats:" in refused.stderr
    assert "no such host" in refused.stderr
    assert all((tmp_path / name).read_text() == (ROOT / name).read_text() for name in files)
    done = pin('[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo sha256:$(printf "%064d" 7)')
    assert done.returncode == 0, done.stderr
    for name in files:
        before = (ROOT / name).read_text()
        assert (tmp_path / name).read_text() == re.sub(r"@sha256:\w{64}", f"@sha256:{7:064}", before) != before


def test_the_packages_of_an_image_are_pinned_with_their_hashes_as_the_project_wants_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = {
        "requirements": [
            *project["project"]["dependencies"],
            *(line for extra in ("otel", "picker", "text") for line in extras[extra]),
        ],
        "requirements-build": project["build-system"]["requires"],
    }
    for name, lines in wanted.items():
        text = re.sub(r"\\\n\s*", " ", (ROOT / f"deploy/{name}.lock").read_text())
        locked = [line.partition(" --hash=") for line in text.splitlines() if line and not line.startswith("#")]
        pins = {pin.name: pin for pin in (Requirement(words) for words, _, _ in locked)}
        assert all(re.match(r"sha256:[0-9a-f]{64}\b", hashes) for _, _, hashes in locked)
        for requirement in map(Requirement, lines):
            (pinned,) = pins[requirement.name.lower()].specifier
            assert (pinned.operator, requirement.specifier.contains(pinned.version)) == ("==", True), "run `make lock`"


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
        assert any(volume.startswith(f"{name}:") for volume in SERVICES[name]["volumes"]), "what it keeps"


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
