"""The Helm chart: rendered by Helm, its objects valid for Kubernetes, its flags known to the services."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvscout_gateway.main import main as gateway
from kvscout_indexer.main import main as indexer
from kvscout_scheduler.main import main as scheduler

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
SCHEMAS = ROOT / "tests" / "data" / "kubernetes-schemas"
KUBE_VERSION = "1.33"
COMMANDS = {"kvscout-gateway": gateway, "kvscout-indexer": indexer, "kvscout-scheduler": scheduler}
LEAST = {"auth": {"allowAnonymous": True}}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.test/kvscout", "tag": "1.2.3"},
    "imagePullSecrets": [{"name": "pull"}],
    "workers": {"selections": ["app in (vllm, sglang),!canary", "pool/big?namespace=prod&role=decode"]},
    "inferencePool": {"create": True, "matchLabels": {"app": "vllm"}, "targetPorts": [8000, 8001]},
    "gateway": {
        "args": ["--conditional-disagg", "--tokenizer=/tokenizers"],
        "env": [{"name": "kvscout_queue_wait_seconds", "value": "30"}],
        "volumes": [{"name": "tokenizers", "persistentVolumeClaim": {"claimName": "tokenizers"}}],
        "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers", "readOnly": True}],
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "endpointPicker": {"plaintext": True},
    },
    "nats": {"servers": ["nats://nats.test:4222", "nats://b:4222"], "secret": "nats", "tls": True, "replicas": 3},
    "auth": {"secret": "tokens"},
    "tls": {"secret": "tls", "clientCertificates": True},
    "engineKey": {"secret": "engine"},
    "networkPolicy": {"gatewayFrom": [{"podSelector": {}}], "metricsFrom": [{"namespaceSelector": {}}]},
    "serviceMonitor": {"create": True, "labels": {"release": "prometheus"}},
    "serviceAccount": {"annotations": {"a": "b"}},
}


def tool(name: str) -> str:
    """Where it is; beside Python, or on the path."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: `make chart-tools` builds it where Go is")
    return found


def helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("helm"), *arguments, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(values: dict[str, Any], release: str = "kvscout") -> str:
    made = helm("template", release, str(CHART), "--namespace", "llm", "--kube-version", KUBE_VERSION, values=values)
    assert made.returncode == 0, made.stderr
    return made.stdout


def objects(values: dict[str, Any], release: str = "kvscout") -> dict[tuple[str, str], Any]:
    documents = [one for one in yaml.safe_load_all(rendered(values, release)) if one]
    found = {(one["kind"], f"{one['metadata']['namespace']}/{one['metadata']['name']}"): one for one in documents}
    assert len(found) == len(documents), "two objects of one name"
    return found


def containers(found: dict[tuple[str, str], Any]) -> list[Any]:
    return [
        one["spec"]["template"]["spec"]["containers"][0] for (kind, _), one in found.items() if kind == "Deployment"
    ]


def flags(container: Any) -> dict[str, list[str]]:
    """Values of each flag."""
    given: dict[str, list[str]] = {}
    for argument in container["args"]:
        name, _, value = argument.partition("=")
        given.setdefault(name, []).append(value)
    return given


def test_helm_finds_nothing_to_say() -> None:
    for values in (LEAST, EVERYTHING):
        linted = helm("lint", str(CHART), "--strict", "--kube-version", KUBE_VERSION, values=values)
        assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("values", [LEAST, EVERYTHING], ids=["least", "everything"])
def test_every_object_is_what_kubernetes_takes(values: dict[str, Any]) -> None:
    location = f"{SCHEMAS}/{{{{.ResourceKind}}}}.json"
    checked = subprocess.run(
        [tool("kubeconform"), "-strict", "-summary", "-output", "json", "-schema-location", location],
        input=rendered(values),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["summary"]["valid"] >= 11


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    wrong = rendered(LEAST).replace("readOnlyRootFilesystem", "readOnlyRootFileSystem")
    location = f"{SCHEMAS}/{{{{.ResourceKind}}}}.json"
    command = [tool("kubeconform"), "-strict", "-schema-location", location]
    checked = subprocess.run(command, input=wrong, capture_output=True, text=True, check=False)
    assert checked.returncode and "readOnlyRootFileSystem" in checked.stdout


@pytest.mark.parametrize("values", [LEAST, EVERYTHING], ids=["least", "everything"])
def test_services_know_all_flags_that_they_are_given(values: dict[str, Any]) -> None:
    pods = [one["spec"]["template"]["spec"] for (kind, _), one in objects(values).items() if kind == "Deployment"]
    assert {spec["containers"][0]["command"][0] for spec in pods} == COMMANDS.keys()
    for spec in pods:
        [container] = spec["containers"]
        known = {option for parameter in COMMANDS[container["command"][0]].params for option in parameter.opts}
        assert flags(container).keys() <= known
        paths = [value for values in flags(container).values() for value in values if value.startswith("/etc/kvscout/")]
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
        assert all(path.rpartition("/")[0] in mounts for path in paths)
        assert set(mounts.values()) == {volume["name"] for volume in spec.get("volumes", ())}


def test_gateways_find_their_helpers_where_these_serve() -> None:
    found = objects(EVERYTHING)
    [given] = [flags(one) for one in containers(found) if one["name"] == "gateway"]
    for kind in ("indexer", "scheduler"):
        service = found["Service", f"llm/kvscout-{kind}"]["spec"]
        [url] = given[f"--{kind}"]
        assert url == f"dns://kvscout-{kind}:{service['ports'][0]['port']}"
        assert service["clusterIP"] == "None"
        deployment = found["Deployment", f"llm/kvscout-{kind}"]["spec"]
        assert service["selector"] == deployment["selector"]["matchLabels"]
        assert service["selector"].items() <= deployment["template"]["metadata"]["labels"].items()


def test_schedulers_share_what_they_know_where_there_is_nats_and_who_calls_others_shows_its_token() -> None:
    for values, there in ((LEAST, False), (EVERYTHING, True)):
        given = {one["name"]: flags(one) for one in containers(objects(values))}
        assert [name for name in given if "--router-replica-sync" in given[name]] == ["scheduler"] * there
        # Indexers ask bridges for lost events.
        for caller in ("gateway", "indexer"):
            assert ({"--token-file", "--tls-ca", "--tls-client-cert"} <= given[caller].keys()) is there


def test_rights_are_to_read_pods_and_pools_where_they_are_selected_and_no_others() -> None:
    def rules(values: dict[str, Any]) -> dict[str, Any]:
        return {name: one["rules"] for (kind, name), one in objects(values).items() if kind == "Role"}

    read = ["get", "list", "watch"]
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": read}
    pools = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": read}
    assert rules(LEAST) == {}
    assert rules(LEAST | {"workers": {"selections": ["app=vllm"]}}) == {"llm/kvscout-workers": [pods]}
    assert rules(EVERYTHING) == {"llm/kvscout-workers": [pods, pools], "prod/kvscout-workers": [pods, pools]}
    for values, mounted in ((LEAST, False), (EVERYTHING, True)):
        deployment = objects(values)["Deployment", "llm/kvscout-indexer"]
        assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is mounted


def test_the_pool_names_the_gateway_as_its_endpoint_picker_and_its_pods_as_workers() -> None:
    found = objects(EVERYTHING)
    spec = found["InferencePool", "llm/kvscout"]["spec"]
    service = found["Service", f"llm/{spec['endpointPickerRef']['name']}"]["spec"]
    assert spec["endpointPickerRef"]["port"]["number"] in [port["port"] for port in service["ports"]]
    for container in containers(found):
        assert "pool/kvscout" in flags(container)["--workers-k8s"]


def test_probes_ask_for_health_and_with_tls_whether_somebody_listens() -> None:
    for values, kind in ((LEAST, "grpc"), (EVERYTHING, "tcpSocket")):
        for container in containers(objects(values)):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert kind in container[probe]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "auth.secret"),
        ({"auth": {"secret": "x", "allowAnonymous": True}}, "either secret or allowAnonymous"),
        (LEAST | {"inferencePool": {"create": True}}, "inferencePool.matchLabels"),
        (LEAST | {"tls": {"clientCertificates": True}}, "tls.clientCertificates"),
        (LEAST | {"worker": {"selections": ["a=b"]}}, "worker"),
        (LEAST | {"workers": {"selections": "a=b"}}, "workers"),
        (LEAST | {"gateway": {"httpPort": 0}}, "httpPort"),
        (LEAST | {"inferencePool": {"failureMode": "FailOften"}}, "failureMode"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_their_names(values: dict[str, Any], words: str) -> None:
    made = helm("template", "x", str(CHART), "--kube-version", KUBE_VERSION, values=values)
    assert made.returncode and words in made.stderr


def test_every_value_has_its_place_in_the_schema() -> None:
    def same(values: Any, schema: Any, path: str) -> None:
        if schema.get("additionalProperties", True):
            return
        assert schema["properties"].keys() - {"global"} == values.keys(), path
        for key, value in values.items():
            same(value, schema["properties"][key], f"{path}.{key}")

    schema = json.loads((CHART / "values.schema.json").read_text())
    same(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")


def test_names_fit_whatever_the_release_is_called() -> None:
    for release in ("a" * 53, "my-kvscout-" + "b" * 42, "x"):
        names: Sequence[str] = [name.partition("/")[2] for _, name in objects(EVERYTHING, release)]
        assert all(len(name) <= 63 and not name.endswith("-") for name in names)
