"""/metrics over HTTP, made on the event loop that owns what is shown, and for at most a quarter of its time.

It faces whoever reaches the port: connections are few, and where `--metrics-auth` is given a token of `--auth-tokens`
is needed that sees all tenants.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from kvscout_common.errors import PermissionDenied, Unauthenticated
from kvscout_common.http.factory import serve_http
from kvscout_common.http.http import HttpCall, HttpLimits, HttpServer
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.identity import TokenTable
from kvscout_common.observability.rank_series import PAUSE, RankSeries
from kvscout_common.worker import ALL_TENANTS

log = logging.getLogger("kvscout.metrics")

SCRAPE_SECONDS: Final = 10.0
"""Longest time that a page may take: Prometheus' own default timeout."""
CONNECTION_SECONDS = 15.0
"""Longest time from a connection, or its last answer, to a complete request."""
MAX_CONNECTIONS = 32
"""Open at once; with more, idle ones are closed."""
REST: Final = 3.0
"""Times the time that the last page took: no page is made for so long after it, however often it is requested."""
MAX_REST_SECONDS: Final = 5.0
_TEXT: Final = (("Content-Type", "text/plain; charset=utf-8"),)


class _Families(Collector):
    """Metrics that were read."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class MetricsPage:
    """The metrics of a registry as a page. All that request it while one is made wait for the next, and share it.

    Args:
        registry: What is shown.
        worker_ranks: Those with series of their own, see `RankSeries`.
    """

    def __init__(self, registry: CollectorRegistry, worker_ranks: int) -> None:
        self._registry = registry
        self._ranks = RankSeries(worker_ranks)
        self._making = asyncio.Lock()
        self._begun_at = self._next_at = 0.0
        self._families = _Families(())
        self._bodies: dict[tuple[str, bool], bytes] = {}
        """Bodies of the last page, by content type and whether they are compressed."""

    async def answer(self, call: HttpCall) -> None:
        """Answer with the page as it is now, in the format that is requested."""
        asked = {name.lower(): value for name, value in call.headers}
        encode, content_type = choose_encoder(asked.get("accept", ""))
        packed = gzip_accepted(asked.get("accept-encoding", ""))
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                body = await self._body(encode, content_type, packed=packed)
        except TimeoutError:
            await call.respond(503, _TEXT, b"the service is too busy to say\n")
            return
        except Exception:
            log.exception("collecting the metrics failed")
            await call.respond(500, _TEXT, b"the service's log has the details\n")
            return
        encoding = (("Content-Encoding", "gzip"),) if packed else ()
        await call.respond(200, (("Content-Type", content_type), *encoding), body)

    async def _body(self, encode: Callable[[Collector], bytes], content_type: str, *, packed: bool) -> bytes:
        came = time.monotonic()
        async with self._making:
            if self._begun_at < came:
                await self._read()
            body = self._bodies.get((content_type, packed))
            if body is None:
                body = await asyncio.to_thread(_encoded, encode, self._families, packed=packed)
                self._bodies[content_type, packed] = body
            return body

    async def _read(self) -> None:
        await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
        self._begun_at = time.monotonic()
        self._bodies.clear()
        shown = []
        # Of many ranks a family takes long enough that others should go on in between.
        for family in self._ranks.bounded(self._registry.collect()):
            if family is not PAUSE:
                shown.append(family)
            await asyncio.sleep(0)
        self._families = _Families(shown)
        ended = time.monotonic()
        self._next_at = ended + min(REST * (ended - self._begun_at), MAX_REST_SECONDS)


def _encoded(encode: Callable[[Collector], bytes], families: Collector, *, packed: bool) -> bytes:
    body = encode(families)
    return gzip.compress(body, compresslevel=1) if packed else body


def registry_of(collector: Collector) -> CollectorRegistry:
    """Return a Prometheus registry with one collector, which reads a service's state when scraped."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


async def serve_metrics(
    page: MetricsPage, host: str, port: int, tokens: TokenTable | None = None
) -> tuple[HttpServer, int]:
    """Serve /metrics, on the running loop.

    Args:
        page: What is shown.
        host: Address to bind.
        port: 0 = any free port.
        tokens: Who may read it; None = everybody.

    Returns:
        The server, and its port.

    Raises:
        OSError: If the port is taken.
    """
    origins = WebOrigins(guarded=tokens is not None, host=host)

    async def handle(call: HttpCall) -> None:
        try:
            origins.require(call.headers)
            if tokens is not None:
                _admit(call, tokens)
        except Unauthenticated as error:
            await call.respond(401, (*_TEXT, ("WWW-Authenticate", "Bearer")), f"{error}\n".encode())
        except PermissionDenied as error:
            await call.respond(403, _TEXT, f"{error}\n".encode())
        else:
            if call.path == "/metrics" and call.method in ("GET", "HEAD"):
                await page.answer(call)
            else:
                await call.respond(404, _TEXT, b"only GET /metrics is here\n")

    limits = HttpLimits(connections=MAX_CONNECTIONS, body_bytes=0, idle_seconds=CONNECTION_SECONDS)
    server = serve_http(handle, limits)
    return server, await server.listen(host, port)


def _admit(call: HttpCall, tokens: TokenTable) -> None:
    """Refuse who may not see all tenants."""
    given = next((value for name, value in call.headers if name.lower() == "authorization"), "")
    if tokens.identify_header(given).tenant != ALL_TENANTS:
        raise PermissionDenied("metrics show all tenants, but this token is for one tenant")
    call.trust()
