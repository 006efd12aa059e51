"""Which pods are workers, and what is known of each before its engine is asked."""

from __future__ import annotations

from typing import Any

import pytest
from support.kubernetes_api import pod, pool

from kvscout_common.errors import ConfigError, InvalidArgument, Unavailable
from kvscout_common.kubernetes.objects import MAX_NOTES, MAX_PORTS, InferencePool, ObjectProblem, Pod
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.pod_selection import Selection
from kvscout_common.worker import EngineKind, EventEndpoint, Role, Transport, WorkerSpec

LLAMA = InferencePool.read(pool("llama", {"app": "vllm"}, 8000, 8001))


def workers(
    selection: str, pool_: InferencePool | None = None, ip: str = "10.0.0.7", **of_pod: Any
) -> list[WorkerSpec]:
    """The workers of a pod whose engine tells model m, blocks of 16."""
    found = Selection.parse(selection).workers(Pod.read(pod("p", ip, **of_pod)), pool_)
    facts = EngineFacts("", (), ("m",), 16)
    return [one.shared.worker(one.worker_id, one.http_endpoint, facts) for one in found]


@pytest.mark.parametrize(
    ("text", "namespace", "labels", "pool_name"),
    [
        ("app=vllm", "", "app=vllm", ""),
        ("app in (vllm, sglang),!canary?namespace=prod", "prod", "app in (vllm, sglang),!canary", ""),
        ("llm-d.ai/model=x?port=8000", "", "llm-d.ai/model=x", ""),
        ("pool/llama?role=decode", "", "", "llama"),
    ],
)
def test_a_selection_is_labels_or_a_pool(text: str, namespace: str, labels: str, pool_name: str) -> None:
    selection = Selection.parse(text)
    assert (selection.namespace, selection.labels, selection.pool) == (namespace, labels, pool_name)


@pytest.mark.parametrize(
    "text",
    ["", "?port=1", "pool/", "pool/a/b", "a=b?speed=1", "a=b?namespace=", "a=b?port=1&port=2", "a=b?event_port=x",
     "a=b?event_port=70000", "a=b?grpc_event_port=0",
     "a=b?worker_id=x", "a=b?role=king", "a=b?block_size=0.5", "a=b\n"],
)  # fmt: skip
def test_a_wrong_selection_is_refused_by_the_name_of_its_flag(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Selection.parse(text + "\x00" if text.endswith("\n") else text)
    assert str(refused.value.field).startswith("workers_k8s")


def test_a_pod_with_one_port_needs_nothing_but_its_selector() -> None:
    assert workers("app=vllm", ports={"": 8080}) == [
        WorkerSpec("default/p:8080", "m", 16, http_endpoint="http://10.0.0.7:8080")
    ]
    [six] = workers("app=vllm", ip="fd00::7")
    assert six.http_endpoint == "http://[fd00::7]:8000"


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ({}, 8000),
        ({"http": 9000, "zmq": 5557}, 9000),
        ({"api": 8000, "zmq": 5557}, 8000),
        ({"x": 1, "y": 2}, None),
    ],
)
def test_of_several_declared_ports_it_is_the_one_named_http_or_that_of_vllm(
    ports: dict[str, int], expected: int | None
) -> None:
    if expected is None:
        with pytest.raises(ObjectProblem, match="which of its ports 1, 2"):
            workers("app=vllm", ports=ports)
        assert workers("app=vllm?port=y", ports=ports)[0].http_endpoint.endswith(":2")
    else:
        assert workers("app=vllm", ports=ports)[0].http_endpoint.endswith(f":{expected}")


def test_a_sidecar_in_front_of_the_engine_may_declare_the_port() -> None:
    [one] = workers("app=vllm", ports={"": 8200}, sidecar_ports={"http": 8000})
    assert one.http_endpoint == "http://10.0.0.7:8000"


def test_each_port_of_a_pool_is_a_worker_with_a_rank_of_its_own() -> None:
    first, second = workers("pool/llama?event_port=5557&replay_port=5657", LLAMA)
    assert (first.worker_id, second.worker_id) == ("default/p:8000", "default/p:8001")
    assert (second.dp_start_rank, second.dp_size) == (1, 1)
    assert second.event_endpoints == (EventEndpoint(1, "tcp://10.0.0.7:5558", "tcp://10.0.0.7:5658"),)
    # What a pod says is active counts, of those of the pool.
    [active] = workers("pool/llama", LLAMA, annotations={"llm-d.ai/active-ports": "8001,9999"})
    assert active.worker_id == "default/p:8001"


def test_what_stands_at_the_pod_counts_more_than_the_flag_and_the_flag_more_than_labels_of_others() -> None:
    labels = {"app": "vllm", "llm-d.ai/role": "prefill"}
    assert workers("app=vllm", labels=labels)[0].role is Role.PREFILL
    assert workers("app=vllm?role=decode", labels=labels)[0].role is Role.DECODE
    own = {"kvscout/role": "aggregated", "kvscout/block-size": "32", "kvscout/eagle": "true", "kvscout/model": "org/x"}
    [one] = workers("app=vllm?role=decode&block_size=8&tenant=t&labels.zone=a", labels=labels, annotations=own)
    assert (one.role, one.block_size, one.eagle, one.model) == (Role.AGGREGATED, 32, True, "org/x")
    assert (one.tenant, one.labels) == ("t", {"zone": "a"})


def test_labels_of_llm_d_sglangs_gateway_and_aibrix_are_understood() -> None:
    for told, role in (("both", Role.AGGREGATED), ("prefill-decode", Role.AGGREGATED), ("decode", Role.DECODE)):
        assert workers("a=b", labels={"llm-d.ai/role": told})[0].role is role
    with pytest.raises(ObjectProblem, match="'encode' is not a role that takes prompts"):
        workers("a=b", labels={"llm-d.ai/role": "encode"})
    notes = {"sglang.ai/bootstrap-port": "8998", "smg.ai/worker-ports": "30000,30001"}
    first, second = workers("a=b?role=prefill&engine=sglang", annotations=notes)
    assert (first.bootstrap_host, first.bootstrap_port) == ("10.0.0.7", 8998)
    assert (first.engine, second.http_endpoint) == (EngineKind.SGLANG, "http://10.0.0.7:30001")
    aibrix = {
        "model.aibrix.ai/name": "qwen",
        "model.aibrix.ai/port": "8010",
        "model.aibrix.ai/kv-events-enabled": "true",
    }
    [one] = workers("a=b", labels=aibrix)
    assert (one.model, one.http_endpoint) == ("qwen", "http://10.0.0.7:8010")
    assert one.event_endpoints == (EventEndpoint(0, "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),)


def test_ranks_behind_one_port_have_event_ports_that_count_on() -> None:
    [one] = workers("a=b?event_port=5557", annotations={"kvscout/dp-size": "3", "kvscout/dp-start-rank": "2"})
    assert [(e.dp_rank, e.endpoint) for e in one.event_endpoints] == [
        (rank, f"tcp://10.0.0.7:{5557 + rank}") for rank in (2, 3, 4)
    ]


def test_the_port_of_a_grpc_server_is_that_of_the_events_of_all_ranks() -> None:
    [one] = workers("a=b?grpc_event_port=50051", annotations={"kvscout/dp-size": "3", "kvscout/dp-start-rank": "2"})
    assert one.event_endpoints == (EventEndpoint(2, "grpc://10.0.0.7:50051"),)
    assert (one.transport, one.dp_size) == (Transport.SUBSCRIBE, 3)
    [told] = workers("a=b", annotations={"kvscout/grpc-event-port": "50052"})
    assert told.event_endpoints == (EventEndpoint(0, "grpc://10.0.0.7:50052"),)


@pytest.mark.parametrize(
    ("notes", "match"),
    [
        ({"kvscout/tenant": "other"}, "kvscout/tenant is nothing that a pod can say"),
        ({"kvscout/http-endpoint": "http://evil:1"}, "nothing that a pod can say"),
        ({"kvscout/blocksize": "16"}, "nothing that a pod can say"),
        ({"kvscout/port": "0"}, "'0' is neither a port"),
        ({"kvscout/port": ",".join(map(str, range(1, MAX_PORTS + 3)))}, "more than 64 ports"),
        ({"kvscout/dp-size": "99999", "kvscout/event-port": "5557"}, "not a number of ranks"),
        ({"kvscout/dp-start-rank": "x", "kvscout/event-port": "5557"}, "not a number of ranks"),
        ({"kvscout/role": "king"}, "role"),
        ({"kvscout/block-size": "-1"}, "block_size"),
        ({"kvscout/event-port": "65535", "kvscout/dp-start-rank": "9"}, "port between"),
    ],
)
def test_a_pod_that_says_something_wrong_is_told_so(notes: dict[str, str], match: str) -> None:
    with pytest.raises((ObjectProblem, InvalidArgument), match=match):
        workers("a=b", annotations=notes)


def test_what_an_engine_does_not_tell_has_to_be_given() -> None:
    [one] = Selection.parse("a=b?model=m").workers(Pod.read(pod("p", "10.0.0.7")), None)
    with pytest.raises(Unavailable, match="block size"):
        one.shared.worker(one.worker_id, one.http_endpoint, EngineFacts("", (), ("m",)))
    [sglang] = Selection.parse("a=b").workers(Pod.read(pod("p", "10.0.0.7")), None)
    told = EngineFacts("", (), ("m",), 16, engine=EngineKind.SGLANG)
    assert sglang.shared.engine is None
    assert sglang.shared.worker(sglang.worker_id, sglang.http_endpoint, told).engine is EngineKind.SGLANG


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": None}, {"metadata": []}, {"metadata": {"name": 7}}, {"metadata": {"name": "a" * 300}},
        {"metadata": {"name": "p", "namespace": "d", "uid": "\x00"}}, {"status": {"podIP": "not-an-address"}},
        {"status": {"podIP": ["10.0.0.1"]}}, {"spec": "x"},
    ],
)  # fmt: skip
def test_what_is_no_pod_is_no_pod(change: dict[str, Any]) -> None:
    with pytest.raises(ObjectProblem):
        Pod.read(pod("p", "10.0.0.7") | change)


def test_a_pod_says_only_so_much_of_itself() -> None:
    with pytest.raises(ObjectProblem, match=r"metadata.annotations has 65 that"):
        Pod.read(pod("p", "10.0.0.7", annotations={f"kvscout/x{n}": "" for n in range(MAX_NOTES + 1)}))


def test_odd_parts_of_a_pod_are_left_out() -> None:
    odd = pod("p", "10.0.0.7", labels={"kvscout/role": 7, "kvscout/model": "x" * 300, "other": "y"})
    odd["spec"]["containers"] += [None, {"ports": [None, {"containerPort": "80"}, {"containerPort": 2**40}]}]
    odd["status"]["containerStatuses"] = [{"restartCount": "many"}, None]
    odd["status"]["conditions"].append("Ready")
    read = Pod.read(odd)
    assert (read.notes, read.ports, read.restarts, read.ready) == ({}, (), 0, True)


@pytest.mark.parametrize("spec", [{}, {"selector": {}, "targetPorts": [{"number": 1}]},
     {"selector": {"matchLabels": {"a": 1}}, "targetPorts": [{"number": 1}]},
     {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []},
     {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": "80"}]}])  # fmt: skip
def test_what_is_no_pool_is_no_pool(spec: dict[str, Any]) -> None:
    with pytest.raises(ObjectProblem):
        InferencePool.read(pool("llama", {"a": "b"}, 1) | {"spec": spec})
