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

from kvscout_bridge.main import main as bridge
from kvscout_cli.commands.health import command as health
from kvscout_common.registry.workers_file import load_workers
from kvscout_gateway.main import main as gateway
from kvscout_indexer.main import main as indexer
from kvscout_scheduler.main import main as scheduler
from kvscout_serve.main import main as serve

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
SCHEMAS = ROOT / "tests" / "data" / "kubernetes-schemas"
KUBE_VERSION = "1.33"
COMMANDS = {
    "kvscout-bridge": bridge,
    "kvscout-gateway": gateway,
    "kvscout-indexer": indexer,
    "kvscout-scheduler": scheduler,
    "kvscout serve": serve,
}
WORKER = {"worker_id": "vllm-0", "model": "m", "block_size": 16, "http_endpoint": "http://vllm-0.vllm:8000"}
LEAST = {"auth": {"allowAnonymous": True}}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.test/kvscout", "tag": "1.2.3"},
    "imagePullSecrets": [{"name": "pull"}],
    "workers": {"selections": ["app in (vllm, sglang),!canary", "pool/big?namespace=prod&role=decode"]},
    "inferencePool": {"create": True, "matchLabels": {"app": "vllm"}, "targetPorts": [8000, 8001]},
    "gateway": {
        "args": ["--conditional-disagg", "--tokenizer=/tokenizers"],
        "env": [{"name": "KVSCOUT_QUEUE_WAIT_SECONDS", "value": "30"}],
        "volumes": [{"name": "tokenizers", "persistentVolumeClaim": {"claimName": "tokenizers"}}],
        "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers", "readOnly": True}],
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "llm"},
        "priorityClassName": "high",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["a"]}
        ],
        "service": {
            "type": "LoadBalancer",
            "annotations": {"a": "b"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        },
        "endpointPicker": {"plaintext": True},
        "autoscaling": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}},
    },
    "commonLabels": {"cost-centre": "42"},
    "bridge": {"create": True, "workers": [WORKER]},
    "nats": {"servers": ["nats://nats.test:4222", "nats://b:4222"], "secret": "nats", "tls": True, "replicas": 3},
    "auth": {"secret": "tokens", "metrics": True},
    "tls": {"secret": "tls", "clientCertificates": True},
    "engineKey": {"secret": "engine"},
    "networkPolicy": {
        "gatewayFrom": [{"podSelector": {}}],
        "pickerFrom": [{"podSelector": {"matchLabels": {"app": "envoy"}}}],
        "metricsFrom": [{"namespaceSelector": {}}],
        "egress": {
            "create": True,
            "dns": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
            "to": [{"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}], "ports": [{"port": 8000}]}],
        },
    },
    "serviceMonitor": {"create": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"create": True, "labels": {"release": "prometheus"}},
    "grafanaDashboard": {"create": True},
    "ingress": {
        "create": True,
        "className": "nginx",
        "annotations": {"a": "b"},
        "hosts": ["llm.test"],
        "tls": [{"secretName": "llm", "hosts": ["llm.test"]}],
    },
    "httpRoute": {"create": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.test"]},
    "serviceAccount": {"annotations": {"a": "b"}},
}
EMBEDDED = LEAST | {"mode": "embedded", "gateway": {"replicas": 1}}
EMBEDDED_EVERYTHING = EVERYTHING | {"mode": "embedded"}
ALL = {
    "least": LEAST,
    "everything": EVERYTHING,
    "embedded": EMBEDDED,
    "embedded-everything": EMBEDDED_EVERYTHING,
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


def services(found: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return {name.partition("/")[2]: one["spec"] for (kind, name), one in found.items() if kind == "Service"}


def selected(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def flags(container: Any) -> dict[str, list[str]]:
    """Values of each flag."""
    given: dict[str, list[str]] = {}
    for argument in container["args"]:
        name, _, value = argument.partition("=")
        given.setdefault(name, []).append(value)
    return given


def test_helm_finds_nothing_to_say() -> None:
    for values in ALL.values():
        linted = helm("lint", str(CHART), "--strict", "--kube-version", KUBE_VERSION, values=values)
        assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("values", ALL.values(), ids=ALL.keys())
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
    assert json.loads(checked.stdout)["summary"]["valid"] >= (7 if values is EMBEDDED else 11)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    wrong = rendered(LEAST).replace("readOnlyRootFilesystem", "readOnlyRootFileSystem")
    location = f"{SCHEMAS}/{{{{.ResourceKind}}}}.json"
    command = [tool("kubeconform"), "-strict", "-schema-location", location]
    checked = subprocess.run(command, input=wrong, capture_output=True, text=True, check=False)
    assert checked.returncode and "readOnlyRootFileSystem" in checked.stdout


@pytest.mark.parametrize("values", ALL.values(), ids=ALL.keys())
def test_services_know_all_flags_that_they_are_given(values: dict[str, Any]) -> None:
    pods = [one["spec"]["template"]["spec"] for (kind, _), one in objects(values).items() if kind == "Deployment"]
    apart = {"kvscout-gateway", "kvscout-indexer", "kvscout-scheduler"}
    there = {"kvscout serve"} if "mode" in values else apart
    assert {" ".join(spec["containers"][0]["command"]) for spec in pods} - {"kvscout-bridge"} == there
    assert len(pods) == len(there) + ("bridge" in values)
    for spec in pods:
        [container] = spec["containers"]
        known = {option for parameter in COMMANDS[" ".join(container["command"])].params for option in parameter.opts}
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
        [embedded] = [flags(one) for one in containers(objects(values | EMBEDDED)) if one["name"] == "gateway"]
        assert ("--router-replica-sync" in embedded) is there
        assert not {"--indexer", "--scheduler"} & embedded.keys()
        # Indexers ask bridges for lost events.
        for caller in ("gateway", "indexer"):
            assert ({"--token-file", "--tls-ca", "--tls-client-cert"} <= given[caller].keys()) is there


def test_rights_are_to_read_pods_and_pools_where_they_are_selected_and_no_others() -> None:
    def rules(values: dict[str, Any]) -> dict[str, Any]:
        return {name: one["rules"] for (kind, name), one in objects(values).items() if kind == "Role"}

    read = ["get", "list", "watch"]
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": read}
    pools = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": read}
    groups = ["llm-d.ai", "inference.networking.x-k8s.io"]
    objectives = {"apiGroups": groups, "resources": ["inferenceobjectives"], "verbs": read}
    assert rules(LEAST) == {}
    assert rules(LEAST | {"workers": {"selections": ["app=vllm"]}}) == {"llm/kvscout-workers": [pods]}
    assert rules(EVERYTHING) == {
        f"{namespace}/kvscout-workers": [pods, pools, objectives] for namespace in ("llm", "prod")
    }
    for values, mounted in ((LEAST, False), (EVERYTHING, True)):
        deployment = objects(values)["Deployment", "llm/kvscout-indexer"]
        assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is mounted


def test_the_pool_names_the_gateway_as_its_endpoint_picker_and_its_pods_as_workers() -> None:
    found = objects(EVERYTHING)
    spec = found["InferencePool", "llm/kvscout"]["spec"]
    service = found["Service", f"llm/{spec['endpointPickerRef']['name']}"]["spec"]
    assert spec["endpointPickerRef"]["port"]["number"] in [port["port"] for port in service["ports"]]
    for container in containers(found):
        # The bridge registers its own.
        assert ("pool/kvscout" in flags(container).get("--workers-k8s", ())) is (container["name"] != "bridge")
    assert found["HTTPRoute", "llm/kvscout"]["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "kvscout"}
    ]


def test_probes_ask_for_health_with_tls_as_well(tmp_path: Path) -> None:
    for container in containers(objects(LEAST)):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": container["ports"][0]["containerPort"]}
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / file).touch()
    for container in containers(objects(EVERYTHING)):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            program, subcommand, *arguments = container[probe]["exec"]["command"]
            assert (program, subcommand) == ("kvscout", "health")
            here = [argument.replace("/etc/kvscout/tls", str(tmp_path)) for argument in arguments]
            asked = health.make_context("health", here).params
            assert asked["addresses"] == (f"localhost:{container['ports'][0]['containerPort']}",)
            assert asked["tls_server_name"] == f"kvscout-{container['name']}"
            assert asked["tls_ca"] and asked["tls_client_cert"] and asked["tls_client_key"]
            assert asked["timeout"] < container[probe]["timeoutSeconds"]


def test_what_clients_reach_beyond_the_cluster_has_neither_metrics_nor_the_endpoint_picker() -> None:
    for values in (LEAST, EVERYTHING):
        found = services(objects(values))
        assert [port["name"] for port in found["kvscout-gateway"]["ports"]] == ["grpc", "http"]
        assert found["kvscout-gateway-metrics"]["ports"][0]["port"] == 9093
        assert [name for name, one in found.items() if one.get("type", "ClusterIP") != "ClusterIP"] == (
            ["kvscout-gateway"] if values is EVERYTHING else []
        )
        monitored = [name for name, one in found.items() if any(port["name"] == "metrics" for port in one["ports"])]
        helpers = ["kvscout-indexer", "kvscout-scheduler"]
        assert set(monitored) - {"kvscout-bridge"} == {"kvscout-gateway-metrics", *helpers}
    assert [port["name"] for port in found["kvscout-picker"]["ports"]] == ["picker"]


def test_prometheus_presents_a_token_where_metrics_want_one() -> None:
    for values, there in ((LEAST | {"serviceMonitor": {"create": True}}, False), (EVERYTHING, True)):
        found = objects(values)
        assert all(("--metrics-auth" in flags(container)) is there for container in containers(found))
        [endpoint] = found["ServiceMonitor", "llm/kvscout"]["spec"]["endpoints"]
        assert endpoint.get("authorization") == ({"credentials": {"name": "tokens", "key": "token"}} if there else None)


def test_disruptions_are_limited_whoever_says_how_many_replicas_there_are() -> None:
    values = LEAST | {"gateway": {"replicas": 1}, "indexer": {"autoscaling": {"enabled": True}}}
    found = objects(values)
    for name in ("gateway", "indexer", "scheduler"):
        spec = found["PodDisruptionBudget", f"llm/kvscout-{name}"]["spec"]
        assert spec["maxUnavailable"] == 1
        labels = found["Deployment", f"llm/kvscout-{name}"]["spec"]["template"]["metadata"]["labels"]
        assert selected(spec["selector"]["matchLabels"], labels)
    assert "replicas" not in found["Deployment", "llm/kvscout-indexer"]["spec"]
    scaler = found["HorizontalPodAutoscaler", "llm/kvscout-indexer"]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "kvscout-indexer"}


def test_another_version_of_the_chart_changes_no_pod(tmp_path: Path) -> None:
    def templates(chart: Path) -> list[Any]:
        made = helm("template", "kvscout", str(chart), "--kube-version", KUBE_VERSION, values=values)
        assert made.returncode == 0, made.stderr
        documents = [one for one in yaml.safe_load_all(made.stdout) if one]
        assert any(newer in one["metadata"]["labels"].values() for one in documents) is (chart != CHART)
        return [one["spec"]["template"] for one in documents if one["kind"] == "Deployment"]

    newer = "kvscout-9.9.9"
    values = LEAST | {"image": {"tag": "1"}}
    later = tmp_path / "helm"
    shutil.copytree(CHART, later)
    chart = later / "Chart.yaml"
    chart.write_text(chart.read_text().replace("ersion: 0.2.0", "ersion: 9.9.9"))
    assert templates(later) == templates(CHART)


def test_labels_of_ones_own_are_on_everything_and_select_nothing() -> None:
    found = objects(EVERYTHING | {"commonLabels": {"cost-centre": "42", "app.kubernetes.io/name": "mine"}})
    for name, one in found.items():
        assert one["metadata"]["labels"]["cost-centre"] == "42", name
        assert one["metadata"]["labels"]["app.kubernetes.io/name"] == "kvscout", name
    deployment = found["Deployment", "llm/kvscout-gateway"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert (labels["team"], labels["cost-centre"]) == ("llm", "42")
    assert deployment["selector"]["matchLabels"].keys() == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/component",
    }
    [spread] = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == deployment["selector"]["matchLabels"]
    assert deployment["template"]["spec"]["priorityClassName"] == "high"


def test_an_image_is_named_by_its_digest_or_by_its_tag() -> None:
    digest = "sha256:" + "0" * 64
    for image, expected in (
        ({}, "kvscout:0.2.0"),
        ({"tag": "1"}, "kvscout:1"),
        ({"digest": digest}, f"kvscout@{digest}"),
    ):
        for container in containers(objects(LEAST | {"image": image})):
            assert container["image"] == expected


def test_the_bridge_reads_the_engines_that_it_is_given_and_is_reached_where_it_says(tmp_path: Path) -> None:
    found = objects(EVERYTHING)
    file = tmp_path / "workers.yaml"
    file.write_text(found["ConfigMap", "llm/kvscout-bridge-workers"]["data"]["workers.yaml"])
    [worker] = load_workers(file)
    assert (worker.worker_id, worker.http_endpoint) == (WORKER["worker_id"], WORKER["http_endpoint"])
    [container] = [one for one in containers(found) if one["name"] == "bridge"]
    port = services(found)["kvscout-bridge"]["ports"][0]["port"]
    assert flags(container)["--advertise"] == [f"kvscout-bridge.llm.svc:{port}"]
    assert found["Deployment", "llm/kvscout-bridge"]["spec"]["strategy"] == {"type": "Recreate"}


def test_pods_reach_one_another_names_and_what_is_listed() -> None:
    policy = objects(EVERYTHING)["NetworkPolicy", "llm/kvscout-egress"]["spec"]
    own, names, engines = policy["egress"]
    assert policy["policyTypes"] == ["Egress"]
    assert own == {"to": [{"podSelector": policy["podSelector"]}]}
    assert names["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    assert engines["ports"] == [{"port": 8000}]
    assert ("NetworkPolicy", "llm/kvscout-egress") not in objects(LEAST)


def test_alerts_and_dashboard_are_those_that_are_published() -> None:
    found = objects(EVERYTHING)
    rules = yaml.safe_load((ROOT / "deploy/prometheus/kvscout.rules.yaml").read_text())
    assert found["PrometheusRule", "llm/kvscout"]["spec"] == rules
    dashboard = found["ConfigMap", "llm/kvscout-dashboard"]
    assert dashboard["data"]["kvscout.json"] == (ROOT / "deploy/grafana/kvscout.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_routes_lead_to_the_gateways_where_there_is_no_pool() -> None:
    route = {"create": True, "parentRefs": [{"name": "gateway"}]}
    found = objects(LEAST | {"httpRoute": route, "ingress": {"create": True, "hosts": ["llm.test"]}})
    ports = {port["name"]: port["port"] for port in services(found)["kvscout-gateway"]["ports"]}
    [rule] = found["HTTPRoute", "llm/kvscout"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "kvscout-gateway", "port": ports["http"]}]
    [host] = found["Ingress", "llm/kvscout"]["spec"]["rules"]
    assert host["http"]["paths"][0]["backend"] == {"service": {"name": "kvscout-gateway", "port": {"name": "http"}}}


def test_the_test_of_a_release_asks_every_service_for_its_health(tmp_path: Path) -> None:
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / file).touch()
    for values in ALL.values():
        found = objects(values)
        pod = found["Pod", "llm/kvscout-test"]
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        [container] = pod["spec"]["containers"]
        here = [argument.replace("/etc/kvscout/tls", str(tmp_path)) for argument in container["args"]]
        asked = health.make_context("health", here).params["addresses"]
        serving = {
            f"{name}:{port['port']}"
            for name, one in services(found).items()
            for port in one["ports"]
            if port["name"] == "grpc"
        }
        assert set(asked) == serving
        for (kind, name), one in found.items():
            if kind == "Deployment":
                assert not selected(one["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"]), name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "auth.secret"),
        ({"auth": {"secret": "x", "allowAnonymous": True}}, "either secret or allowAnonymous"),
        (LEAST | {"inferencePool": {"create": True}}, "inferencePool.matchLabels"),
        (LEAST | {"tls": {"clientCertificates": True}}, "tls.clientCertificates"),
        (LEAST | {"nats": {"servers": ["nats://a:4222"], "tls": True}}, "nats.tls needs nats.secret"),
        (LEAST | {"nats": {"secret": "nats"}}, "nats.secret needs nats.servers"),
        ({"auth": {"allowAnonymous": True, "metrics": True}}, "auth.metrics needs auth.secret"),
        (LEAST | {"gateway": {"endpointPicker": {"plaintext": True}}}, "endpointPicker.plaintext needs"),
        (LEAST | {"bridge": {"create": True, "workers": [WORKER]}}, "bridge.create needs nats.servers"),
        (LEAST | {"nats": {"servers": ["nats://a:4222"]}, "bridge": {"create": True}}, "bridge.workers"),
        (LEAST | {"networkPolicy": {"egress": {"create": True}}}, "networkPolicy.egress.to"),
        (LEAST | {"ingress": {"create": True}}, "ingress.hosts"),
        (LEAST | {"mode": "embedded"}, "needs nats.servers: each has a scheduler of its own"),
        (EMBEDDED | {"gateway": {"replicas": 1, "autoscaling": {"enabled": True}}}, "needs nats.servers: each has"),
        (EMBEDDED | {"indexer": {"args": ["--threads=2"]}}, "gateway.args"),
        (LEAST | {"mode": "both"}, "mode"),
        (LEAST | {"httpRoute": {"create": True}}, "httpRoute.parentRefs"),
        (LEAST | {"indexer": {"autoscaling": {"enabled": True, "maxReplicas": 1}}}, "maxReplicas is less"),
        (LEAST | {"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": None}}}, "requests.cpu"),
        (LEAST | {"image": {"digest": "sha256:1"}}, "digest"),
        (LEAST | {"commonLabels": {"a": 1}}, "commonLabels"),
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
        for own in ({}, {"nameOverride": "c" * 45}, {"fullnameOverride": "d" * 45}):
            names: Sequence[str] = [name.partition("/")[2] for _, name in objects(EVERYTHING | own, release)]
            assert all(len(name) <= 63 and not name.endswith("-") for name in names)


def test_a_name_of_ones_own_stands_in_the_place_of_kvscouts() -> None:
    found = objects(LEAST | {"nameOverride": "router"}, "prod")
    assert ("Deployment", "llm/prod-router-gateway") in found
    labels = found["Deployment", "llm/prod-router-gateway"]["spec"]["selector"]["matchLabels"]
    assert labels["app.kubernetes.io/name"] == "router"
    assert ("Deployment", "llm/mine-gateway") in objects(LEAST | {"fullnameOverride": "mine"}, "prod")
