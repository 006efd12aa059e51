"""/metrics over HTTP, from threads of its own; what is shown is read on the event loop that owns it.

It faces whoever reaches the port: a connection has its time, connections are few, and where `--metrics-auth` is given
a token of `--auth-tokens` is needed that sees all tenants.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from kvscout_common.errors import PermissionDenied, Unauthenticated
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.identity import TokenTable
from kvscout_common.observability.rank_series import RankSeries
from kvscout_common.process.endings import report_panic
from kvscout_common.worker import ALL_TENANTS

log = logging.getLogger("kvscout.metrics")

SCRAPE_SECONDS = 10.0
"""Longest wait of a scrape for the event loop: Prometheus' own default timeout."""
READ_SECONDS = 5.0
"""Longest silence of a client."""
CONNECTION_SECONDS = 15.0
"""Longest life of a connection: one that sends a byte now and then is not silent."""
ACCEPT_AGAIN_SECONDS = 1.0
"""Rest after a connection could not be accepted because the process is out of descriptors, or the machine of memory."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
MAX_CONNECTIONS = 32
"""Open at once; further ones are closed."""


class _OnLoop(Collector):
    """Has a registry read on the event loop that owns what its collectors read."""

    def __init__(self, registry: CollectorRegistry, ranks: int, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._ranks = RankSeries(ranks)
        self._loop = loop
        self._reading = asyncio.Lock()

    def collect(self) -> Iterable[Metric]:
        """Samples of now, once the loop gets to it."""

        async def read() -> list[Metric]:
            try:
                async with self._reading:
                    page = list(self._registry.collect())
                    shown = []
                    # Of many ranks a family takes long enough that others should go on in between.
                    for family in self._ranks.bounded(page):
                        shown.append(family)
                        await asyncio.sleep(0)
                    return shown
            except BaseException as error:
                report_panic(error)
                raise

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(SCRAPE_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        try:
            self.server.origins.require(self.headers.items())
            self.server.admit(self.headers.get("Authorization"))
        except Unauthenticated as error:
            self._send(401, str(error).encode(), {"WWW-Authenticate": "Bearer"})
            return
        except PermissionDenied as error:
            self._send(403, str(error).encode(), {})
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.metrics)
        except TimeoutError:
            self._send(503, b"the service is too busy to say", {})
            return
        except Exception:
            log.exception("collecting the metrics failed")
            self._send(500, b"the service's log has the details", {})
            return
        headers = {"Content-Type": content_type}
        if gzip_accepted(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self._send(200, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who scrapes whenever it likes would fill the log."""


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        metrics: Collector,
        tokens: TokenTable | None,
        origins: WebOrigins,
    ) -> None:
        self.address_family = family
        self.origins = origins
        self.metrics = metrics
        self._tokens = tokens
        self._opened: dict[Any, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def admit(self, authorization: str | None) -> None:
        """Refuse who may not see all tenants.

        Raises:
            Unauthenticated: No token, or one that is unknown.
            PermissionDenied: A token for one tenant.
        """
        if self._tokens is not None:
            identity = self._tokens.identify_header(authorization or "")
            if identity.tenant != ALL_TENANTS:
                raise PermissionDenied("metrics are of all tenants, this token is not")

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._opened) >= MAX_CONNECTIONS:
                return False
            self._opened[request] = time.monotonic()
        return True

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            OSError: It could not be.
        """
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                # The connection waits on, and the server would ask for it again at once.
                log.warning("cannot accept connections: %s", error.strerror)
                time.sleep(ACCEPT_AGAIN_SECONDS)
            raise

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are too old; the server does this twice a second."""
        oldest = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            for request, opened_at in self._opened.items():
                if opened_at < oldest:
                    try:
                        # What its thread reads or writes fails; the thread closes it.
                        request.shutdown(socket.SHUT_RDWR)
                    except OSError as error:
                        log.debug("a connection has ended by itself: %s", error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            log.debug("a scrape broke off: %r", error)
        else:
            log.error("a scrape failed", exc_info=error)


def registry_of(collector: Collector) -> CollectorRegistry:
    """Return a Prometheus registry with one collector, which reads a service's state when scraped."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    tokens: TokenTable | None = None,
    *,
    worker_ranks: int,
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics from threads of its own; collectors are read on the running loop.

    Args:
        registry: What to expose.
        host: Address to bind.
        port: 0 = any free port.
        tokens: Who may read it; None = everybody.
        worker_ranks: Those with series of their own, see `RankSeries`.

    Returns:
        The port, and a function that stops serving.

    Raises:
        OSError: If the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    origins = WebOrigins(guarded=tokens is not None, host=host)
    server = _Server(family, address, _OnLoop(registry, worker_ranks, asyncio.get_running_loop()), tokens, origins)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_address[1], stop
