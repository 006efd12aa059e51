"""Which pods are workers, as `--workers-k8s` says, and what each of them is.

::

    app=vllm                                          pods by their labels, as kubectl -l takes them
    app in (vllm, sglang),!canary?namespace=prod&port=8000
    pool/llama?role=decode                            the pods and ports of an InferencePool

Of a worker, one thing is known from several places; the first that says it counts:

1. what stands at the pod itself for kvscout: annotations or labels `kvscout/FIELD`, such as `kvscout/role: prefill`;
2. the parameters of the flag, which all of its pods share;
3. labels and annotations of llm-d, SGLang's gateway and AIBrix; targetPorts of the pool;
4. the ports that its containers declare;
5. what its engine answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from kvscout_common.endpoints import MAX_PORT, bracketed
from kvscout_common.errors import ConfigError
from kvscout_common.kubernetes.objects import MAX_PORTS, InferencePool, ObjectProblem, Pod
from kvscout_common.plain_text import text_problem
from kvscout_common.registry.worker_template import WorkerTemplate, fields_of
from kvscout_common.worker import MAX_RANKS

FLAG: Final = "workers_k8s"
POOL: Final = "pool/"
OWN: Final = "kvscout/"
PLACES: Final = ("namespace", "port", "event_port", "replay_port", "grpc_event_port")
"""Parameters that are no fields of a worker."""
OF_PODS: Final = frozenset(
    {
        "role",
        "model",
        "block_size",
        "engine",
        "device_class",
        "bootstrap_port",
        "dp_start_rank",
        "dp_size",
        "topic",
        "total_kv_blocks",
        "max_num_batched_tokens",
        "total_slots",
        "eagle",
        "copies",
        "can_fallback",
        "port",
        "event_port",
        "replay_port",
        "grpc_event_port",
    }
)
"""Fields that a pod may set itself: nothing that leads to another address than its own, nor to another tenant."""
HTTP_PORT: Final = 8000
"""Default port of vLLM."""
_LLM_D_ROLES: Final = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "both": "aggregated",
    "prefill-decode": "aggregated",
    "encode-prefill-decode": "aggregated",
}
_ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
_AIBRIX_EVENTS: Final = {"event_port": "5557", "replay_port": "5558"}


@dataclass(frozen=True, slots=True)
class PodWorker:
    """One worker, as far as it is known without its engine: a pod and one of its ports."""

    worker_id: str
    http_endpoint: str
    shared: WorkerTemplate


@dataclass(frozen=True, slots=True)
class Selection:
    """One value of the flag."""

    text: str
    namespace: str
    """"" = where this process is."""
    labels: str
    """A label selector; "" = those of the pool."""
    pool: str
    """Name of an InferencePool; "" = none."""
    places: Mapping[str, str]
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read `SELECTOR` or `pool/NAME`, perhaps with `?parameters`.

        Raises:
            ConfigError: It is none, or a parameter is wrong.
        """
        what, _, query = text.partition("?")
        what = what.strip()
        if not what or text_problem(what):
            raise ConfigError(f"{text!r} is neither a label selector nor pool/NAME", field=FLAG)
        pairs = parse_qsl(query, keep_blank_values=True)
        places = {key: value for key, value in pairs if key in PLACES}
        if any(not value or text_problem(value) for value in places.values()) or len(places) < sum(
            key in PLACES for key, _ in pairs
        ):
            raise ConfigError(f"{text!r} has one of {', '.join(PLACES)} empty or twice", field=FLAG)
        fields = fields_of(text, urlencode([pair for pair in pairs if pair[0] not in PLACES]), FLAG)
        WorkerTemplate(fields, FLAG)
        for name in ("event_port", "replay_port", "grpc_event_port"):
            if name in places and not _port(places[name]):
                raise ConfigError(f"{name} of {text!r} must be between 1 and {MAX_PORT}", field=FLAG)
        pool = what.removeprefix(POOL) if what.startswith(POOL) else ""
        if what == POOL or "/" in pool:
            raise ConfigError(f"{text!r} names no pool", field=FLAG)
        return cls(text, places.pop("namespace", ""), "" if pool else what, pool, places, fields)

    def workers(self, pod: Pod, pool: InferencePool | None) -> list[PodWorker]:
        """Return what a pod with an address has to offer.

        Args:
            pod: One of those selected.
            pool: What the selection names, if it does.

        Raises:
            ObjectProblem: The pod says something wrong, or not which of its ports is meant.
            ConfigError: One of its fields has a wrong value.
        """
        own = _own_fields(pod)
        found = _of_others(pod)
        found.update(self.places)
        found.update(self.fields)
        found.update(own)
        ports = self._ports(pod, pool, own, found)
        events, replay = _port(found.pop("event_port", "0")), _port(found.pop("replay_port", "0"))
        stream = _port(found.pop("grpc_event_port", "0"))
        found.pop("port", None)
        if "bootstrap_port" in found:
            found["bootstrap_host"] = pod.ip
        host = bracketed(pod.ip)
        workers = []
        for place, port in enumerate(ports):
            values = dict(found)
            if stream:
                values["dp_start_rank"] = first = _count(values, "dp_start_rank", place)
                values["event_endpoints"] = [{"dp_rank": first, "endpoint": f"grpc://{host}:{stream}"}]
            elif events:
                first, size = _count(values, "dp_start_rank", place), _count(values, "dp_size", 1)
                values["dp_start_rank"] = first
                values["event_endpoints"] = [
                    {"dp_rank": rank, "endpoint": f"tcp://{host}:{events + rank}"}
                    | ({"replay_endpoint": f"tcp://{host}:{replay + rank}"} if replay else {})
                    for rank in range(first, first + size)
                ]
            shared = WorkerTemplate(values, f"pod {pod.key}")
            workers.append(PodWorker(f"{pod.key}:{port}", f"http://{host}:{port}", shared))
        return workers

    def _ports(
        self, pod: Pod, pool: InferencePool | None, own: Mapping[str, str], found: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return where its HTTP servers are; of several, each has its own data-parallel rank."""
        if "port" in own or "port" in self.places or (pool is None and "port" in found):
            return _listed(pod, str(found["port"]))
        active = next((pod.notes[name] for name in _ACTIVE_PORTS if name in pod.notes), None)
        if pool is not None:
            serving = set(pool.ports) if active is None else set(_listed(pod, active))
            return tuple(port for port in pool.ports if port in serving)
        if active is not None:
            return _listed(pod, active)
        declared = [port.number for port in pod.ports]
        named = [port.number for port in pod.ports if port.name == "http"]
        if named or len(declared) == 1:
            return ((named or declared)[0],)
        if not declared or HTTP_PORT in declared:
            return (HTTP_PORT,)
        raise ObjectProblem(f"which of its ports {', '.join(map(str, declared[:8]))} speaks HTTP? Give it: ?port=…")


def _own_fields(pod: Pod) -> dict[str, Any]:
    """Return what stands at the pod for kvscout."""
    found: dict[str, Any] = {}
    for name, value in pod.notes.items():
        if name.startswith(OWN):
            field = name.removeprefix(OWN).replace("-", "_")
            if field not in OF_PODS:
                raise ObjectProblem(f"{name} is nothing that a pod can say")
            found[field] = {"true": True, "false": False}.get(value, value)
    return found


def _of_others(pod: Pod) -> dict[str, Any]:
    """Return what stands at the pod for others, in our words."""
    notes, found = pod.notes, dict[str, Any]()
    role = notes.get("llm-d.ai/role")
    if role is not None:
        if role not in _LLM_D_ROLES:
            raise ObjectProblem(f"llm-d.ai/role {role!r} is not a role that takes prompts")
        found["role"] = _LLM_D_ROLES[role]
    for name, field in (
        ("sglang.ai/bootstrap-port", "bootstrap_port"),
        ("smg.ai/worker-ports", "port"),
        ("model.aibrix.ai/port", "port"),
        ("model.aibrix.ai/name", "model"),
    ):
        if name in notes:
            found[field] = notes[name]
    if notes.get("model.aibrix.ai/kv-events-enabled") == "true":
        found.update(_AIBRIX_EVENTS)
    return found


def _listed(pod: Pod, text: str) -> tuple[int, ...]:
    """Return the ports from numbers and names of declared ones, with commas between."""
    found = []
    for one in text.split(",")[: MAX_PORTS + 1]:
        named = next((port.number for port in pod.ports if port.name == one.strip()), 0)
        if not (port := named or _port(one.strip())):
            raise ObjectProblem(f"{one.strip()!r} is neither a port nor the name of one of its ports")
        found.append(port)
    if len(found) > MAX_PORTS:
        raise ObjectProblem(f"names more than {MAX_PORTS} ports")
    return tuple(dict.fromkeys(found))


def _count(values: Mapping[str, Any], field: str, default: int) -> int:
    """Return a number of ranks, or of the first of them."""
    text = str(values.get(field, default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9) or (field == "dp_size" and int(text) > MAX_RANKS):
        raise ObjectProblem(f"{field} {text!r} is not a number of ranks")
    return int(text)


def _port(text: Any) -> int:
    """Return a port; 0 = it is none."""
    shown = str(text)
    return int(shown) if shown.isascii() and shown.isdecimal() and len(shown) <= 5 and int(shown) <= MAX_PORT else 0
