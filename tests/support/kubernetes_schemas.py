"""Writes tests/data/kubernetes-schemas anew from a cluster: what the chart's objects are checked against offline.

    PYTHONPATH=tests python tests/support/kubernetes_schemas.py SERVER TOKEN [CRD.yaml …]

One file a kind, whole in itself, strict: a field that Kubernetes does not know is an error. Descriptions are left out.
InferencePool and HTTPRoute come from their CRDs; ServiceMonitor and PrometheusRule, of the Prometheus operator, are
written by hand: the fields that the chart uses.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parents[1] / "data" / "kubernetes-schemas"
KINDS = {
    "api/v1": ("ConfigMap", "Pod", "Service", "ServiceAccount"),
    "apis/apps/v1": ("Deployment",),
    "apis/autoscaling/v2": ("HorizontalPodAutoscaler",),
    "apis/policy/v1": ("PodDisruptionBudget",),
    "apis/networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "apis/rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
DROPPED = ("description", "default", "example", "title")
REF = "#/components/schemas/"


def strict(node: Any) -> Any:
    """A schema without what nobody checks, and with nothing allowed that it does not name."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    if len(node.get("allOf", ())) == 1:
        node = node["allOf"][0]
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            kept[key] = {name: strict(one) for name, one in value.items() if name != "managedFields"}
        elif key == "$ref":
            kept[key] = "#/definitions/" + value.removeprefix(REF)
        elif not key.startswith("x-") and not (key in DROPPED and not isinstance(value, dict)) and key != "default":
            kept[key] = strict(value)
    if node.get("x-kubernetes-int-or-string"):
        kept = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    if "properties" in kept and "additionalProperties" not in kept:
        kept["additionalProperties"] = False
    return kept


def referred(node: Any) -> set[str]:
    """Names of the definitions that a schema refers to."""
    if isinstance(node, list):
        return set().union(*map(referred, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].removeprefix("#/definitions/")} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(referred, node.values()))


def whole(name: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """One kind with all that it refers to."""
    found: dict[str, Any] = {}
    left = {name}
    while left:
        one = left.pop()
        found[one] = strict(schemas[one])
        left |= referred(found[one]) - found.keys()
    top = found.pop(name)
    return {**top, "definitions": dict(sorted(found.items()))}


def write(kind: str, schema: dict[str, Any]) -> None:
    """One file."""
    schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
    text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
    (HERE / f"{kind.lower()}.json").write_text(text + "\n")
    print(f"{kind}: {len(text):,} bytes")


def main(server: str, token: str, *crds: str) -> None:
    """Reads the cluster and the CRDs."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    HERE.mkdir(parents=True, exist_ok=True)
    for group, kinds in KINDS.items():
        request = urllib.request.Request(f"{server}/openapi/v3/{group}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, context=context) as response:
            schemas = json.load(response)["components"]["schemas"]
        for kind in kinds:
            [name] = [
                name
                for name, schema in schemas.items()
                if any(one["kind"] == kind for one in schema.get("x-kubernetes-group-version-kind", ()))
            ]
            write(kind, whole(name, schemas))
    for path in crds:
        spec = yaml.safe_load(Path(path).read_text())["spec"]
        write(spec["names"]["kind"], strict(spec["versions"][0]["schema"]["openAPIV3Schema"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
