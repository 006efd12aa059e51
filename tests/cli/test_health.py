"""`kvscout health` beside real gRPC and HTTP servers."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvscout_cli.commands import health as command
from kvscout_cli.main import main
from kvscout_cli.topology import DEFAULT_PORTS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def kvscout_health(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["health", *arguments])


@contextmanager
def service(
    status: Any = SERVING, credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[str, health.HealthServicer]]:
    """Address and servicer of a gRPC server with the health service alone."""
    servicer = health.HealthServicer()
    servicer.set("", status)
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = (
        server.add_insecure_port("127.0.0.1:0")
        if credentials is None
        else server.add_secure_port("127.0.0.1:0", credentials)
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        server.stop(None).wait()


@contextmanager
def engine(status: int) -> Iterator[str]:
    """URL of an HTTP health check that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/health"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silence() -> Iterator[str]:
    """Address of a listener that never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    """Address at which nobody listens, and nobody else can meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_who_serves_is_healthy_and_who_does_not_is_not() -> None:
    with service() as (well, _), service(NOT_SERVING) as (starting, _), engine(200) as url:
        both = kvscout_health(well, url)
        assert (both.exit_code, both.stdout) == (0, f"{well} SERVING\n{url} SERVING\n")
        one = kvscout_health(well, starting)
        assert (one.exit_code, one.stdout) == (1, f"{well} SERVING\n{starting} NOT_SERVING\n")
    with engine(503) as url:
        assert (kvscout_health(url).exit_code, kvscout_health(url).stdout) == (1, f"{url} HTTP 503\n")


def test_who_does_not_answer_is_told_with_the_address() -> None:
    with nobody() as gone:
        result = kvscout_health(gone)
        assert result.exit_code == 3
        assert f"error: {gone} does not answer" in result.stderr
    with silence() as address:
        result = kvscout_health(address, "--timeout", "0.3")
        assert result.exit_code == 3
        assert f"{address} does not answer within 0.3 s" in result.stderr
        result = kvscout_health(f"http://{address}/health", "--timeout", "0.3")
        assert (result.exit_code, "does not answer: timed out" in result.stderr) == (3, True)


def test_it_waits_until_all_serve() -> None:
    with service(NOT_SERVING) as (address, servicer):
        timer = threading.Timer(0.3, servicer.set, ("", SERVING))
        timer.start()
        result = kvscout_health(address, "--wait", "30")
        timer.join()
        assert (result.exit_code, result.stdout) == (0, f"{address} SERVING\n")


def test_one_service_of_a_server_is_asked_by_its_name() -> None:
    with service() as (address, servicer):
        servicer.set("kvscout.v1.Gateway", NOT_SERVING)
        assert kvscout_health(address, "--service", "kvscout.v1.Gateway").exit_code == 1
        result = kvscout_health(address, "--service", "kvscout.v1.Nobody")
        assert result.exit_code == 2
        assert "has no service 'kvscout.v1.Nobody'" in result.stderr


def test_a_server_with_tls_is_asked_by_the_name_in_its_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = authority.issue_cert("gateway.prod.svc")
    pem = (pair.private_key_pem.bytes(), b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    with service(credentials=grpc.ssl_server_credentials([pem])) as (address, _):
        flags = ("--tls-ca", str(tmp_path / "ca.pem"))
        assert kvscout_health(address, *flags, "--tls-server-name", "gateway.prod.svc").exit_code == 0
        assert kvscout_health(address, *flags).exit_code == 3
        assert kvscout_health(address).exit_code == 3


def test_without_an_address_whatever_listens_here_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [int(port) for port in re.findall(r":(\d+)", " ".join(command.HERE))]
    defaults = DEFAULT_PORTS
    assert ports == [*(defaults.gateway, defaults.indexer, defaults.scheduler, defaults.bridge, defaults.mocker_http)]
    with nobody() as gone, nobody() as other:
        with service() as (well, _):
            monkeypatch.setattr(command, "HERE", (gone, well))
            result = kvscout_health()
            assert (result.exit_code, result.stdout) == (0, f"{well} SERVING\n")
        monkeypatch.setattr(command, "HERE", (gone, other))
        result = kvscout_health()
        assert (result.exit_code, "nothing listens at" in result.stderr) == (3, True)
