"""Pods, InferencePools and InferenceObjectives, as far as kvscout reads them; the rest is dropped immediately.

Whoever may write a pod writes what stands here: of everything there is a bound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvscout_common.endpoints import MAX_PORT
from kvscout_common.plain_text import text_problem

MAX_PORTS: Final = 64
"""Largest number of ports of one pod, or one pool."""
MAX_SELECTOR_LABELS: Final = 64
MAX_PRIORITY: Final = 2**31 - 1
"""Highest priority of an objective."""
MAX_NOTES: Final = 64
"""Labels and annotations of one pod that are kept."""
TERMINAL_PHASES: Final = ("Succeeded", "Failed")
_KEPT_PREFIXES: Final = (
    "kvscout/",
    "llm-d.ai/",
    "inference.networking.k8s.io/",
    "sglang.ai/",
    "smg.ai/",
    "model.aibrix.ai/",
)
"""Labels and annotations that say something of a worker."""


class ObjectProblem(ValueError):
    """An object that cannot be read, or says something wrong; a sentence."""


@dataclass(frozen=True, slots=True)
class ContainerPort:
    """A port that a container of a pod declares; `name` may be ""."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    namespace: str
    name: str
    uid: str
    ip: str
    """"" = it has none yet."""
    ready: bool
    deleting: bool
    ended: bool
    """Its containers will not run again; its address may be another pod's by now."""
    restarts: int
    """Restarts of all of its containers."""
    ports: tuple[ContainerPort, ...]
    notes: Mapping[str, str]
    """Those of its labels and annotations that say something of a worker; an annotation comes before a label."""

    @classmethod
    def read(cls, document: Any) -> Pod:
        """Read an object of the API.

        Raises:
            ObjectProblem: It is no pod.
        """
        meta, spec, status = (_mapping(document, part) for part in ("metadata", "spec", "status"))
        sidecars = [one for one in _mappings(spec, "initContainers") if one.get("restartPolicy") == "Always"]
        restarts = [one.get("restartCount") for one in _mappings(status, "containerStatuses")]
        return cls(
            namespace=_name(meta, "namespace"),
            name=_name(meta, "name"),
            uid=_name(meta, "uid"),
            ip=_address(status.get("podIP")),
            ready=any(
                one.get("type") == "Ready" and one.get("status") == "True" for one in _mappings(status, "conditions")
            ),
            deleting=bool(meta.get("deletionTimestamp")),
            ended=status.get("phase") in TERMINAL_PHASES,
            restarts=sum(count for count in restarts if isinstance(count, int)),
            ports=_ports([*_mappings(spec, "containers"), *sidecars]),
            notes={**_notes(meta, "labels"), **_notes(meta, "annotations")},
        )

    @property
    def key(self) -> str:
        """Return a key that is unique among the existing objects."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class InferencePool:
    """Selection of pods and their ports; each port is a separate data-parallel rank."""

    namespace: str
    name: str
    selector: str
    """As the API takes it."""
    ports: tuple[int, ...]

    @classmethod
    def read(cls, document: Any) -> InferencePool:
        """Read an object of the API, `inference.networking.k8s.io/v1`.

        Raises:
            ObjectProblem: It is no pool.
        """
        meta, spec = _mapping(document, "metadata"), _mapping(document, "spec")
        labels = _mapping(_mapping(spec, "selector"), "matchLabels")
        if not labels or len(labels) > MAX_SELECTOR_LABELS:
            raise ObjectProblem(f"spec.selector.matchLabels has {len(labels)} labels")
        if not all(isinstance(text, str) and not text_problem(text) for text in (*labels, *labels.values())):
            raise ObjectProblem("spec.selector.matchLabels has something else than texts")
        ports: list[Any] = [port.get("number") for port in _mappings(spec, "targetPorts")]
        if not ports or len(ports) > MAX_PORTS or not all(isinstance(p, int) and 0 < p <= MAX_PORT for p in ports):
            raise ObjectProblem("spec.targetPorts names no port, or something else")
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return cls(_name(meta, "namespace"), _name(meta, "name"), selector, tuple(ports))

    @property
    def key(self) -> str:
        """Return a key that is unique among the existing objects."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class InferenceObjective:
    """Name of a priority for the requests to one InferencePool of its namespace."""

    namespace: str
    name: str
    priority: int
    """Higher first."""
    pool: str
    """Name of the pool."""

    @classmethod
    def read(cls, document: Any) -> InferenceObjective:
        """Read an object of the API, `v1alpha2` of `llm-d.ai` or `inference.networking.x-k8s.io`.

        Raises:
            ObjectProblem: It is no objective.
        """
        meta, spec = _mapping(document, "metadata"), _mapping(document, "spec")
        priority = spec.get("priority") if spec.get("priority") is not None else 0
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
            raise ObjectProblem(f"spec.priority is not a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        pool = _mapping(spec, "poolRef").get("name")
        if not isinstance(pool, str) or not pool or text_problem(pool):
            raise ObjectProblem("spec.poolRef.name is not a name")
        return cls(_name(meta, "namespace"), _name(meta, "name"), priority, pool)

    @property
    def key(self) -> str:
        """Return a key that is unique among the existing objects."""
        return f"{self.namespace}/{self.name}"


def _mapping(document: Any, key: str) -> Mapping[str, Any]:
    part = document.get(key) if isinstance(document, Mapping) else None
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise ObjectProblem(f"{key} is not a mapping")
    return part


def _mappings(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    part = document.get(key)
    return [one for one in part if isinstance(one, Mapping)] if isinstance(part, list) else []


def _name(meta: Mapping[str, Any], key: str) -> str:
    name = meta.get(key)
    if not isinstance(name, str) or not name or text_problem(name):
        raise ObjectProblem(f"metadata.{key} is not a name")
    return name


def _address(text: Any) -> str:
    if not text:
        return ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise ObjectProblem("status.podIP is not an address") from error


def _ports(containers: list[Mapping[str, Any]]) -> tuple[ContainerPort, ...]:
    found = []
    for container in containers:
        for port in _mappings(container, "ports"):
            number, name = port.get("containerPort"), port.get("name", "")
            tcp = port.get("protocol", "TCP") == "TCP"
            if tcp and isinstance(number, int) and 0 < number <= MAX_PORT and isinstance(name, str):
                found.append(ContainerPort(name[:63], number))
    return tuple(found[:MAX_PORTS])


def _notes(meta: Mapping[str, Any], key: str) -> dict[str, str]:
    found = {
        name: value
        for name, value in _mapping(meta, key).items()
        if name.startswith(_KEPT_PREFIXES)
        and isinstance(value, str)
        and not (text_problem(name) or text_problem(value))
    }
    if len(found) > MAX_NOTES:
        raise ObjectProblem(
            f"metadata.{key} has {len(found):,} that say something of a worker; at most {MAX_NOTES} can"
        )
    return found
