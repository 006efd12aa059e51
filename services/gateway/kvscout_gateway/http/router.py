"""The HTTP port's router: which path goes to which front, and who may ask."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from kvscout_common.errors import InvalidArgument, PermissionDenied
from kvscout_common.http.http import HttpCall, HttpRefused, SinkGone, SinkStalled
from kvscout_common.http.metrics_server import MetricsPage
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.identity import ANONYMOUS, TokenTable
from kvscout_common.observability import tracing
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.access import Caller, caller_of, header
from kvscout_gateway.fronts.client_paths import HEALTH, MODELS, ClientPaths, UnknownPath, model_named
from kvscout_gateway.fronts.dashboard.front import EVENTS, METHOD, PAGE
from kvscout_gateway.fronts.headers import JSON_HEADERS
from kvscout_gateway.fronts.refusals import WrongMethod, refusal_of, refusal_of_http
from kvscout_gateway.request.failures import FailureLog, RequestSummary
from kvscout_gateway.values.dialects import API_DIALECTS, errors_of

Answer: TypeAlias = Callable[[HttpCall, Caller], Awaitable[None]]
"""Answers one request of a caller whose role allows it."""

METRICS: Final = "/metrics"
THRESHOLDS: Final = "/busy_threshold"
ROUTES: Final[Mapping[str, Mapping[str, str]]] = {
    **{path: {"POST": "Generate"} for path in API_DIALECTS},
    MODELS: {"GET": "ListWorkers"},
    THRESHOLDS: {"GET": "ListBusyThresholds", "POST": "GetBusyThresholds"},
    EVENTS: {"GET": METHOD},
    METRICS: {"GET": "GetStatus"},
}
"""By path and method, the rpc whose roles may ask; those below `/v1/models` are as it. All others are engines'.
`/health`, `/ready` and the dashboard's page are open."""
ENGINES_OWN: Final = "Generate"
"""The same, of paths that are passed on."""
_NO_REQUEST: Final = (UnknownPath, PermissionDenied, WrongMethod)
"""Errors of what no engine would have been asked."""
PASSED_METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Methods of paths that are passed on. What follows the head of any other one (CONNECT above all) some HTTP servers
read as the next request: a client could hide one in a body that no rule here would see."""


class Router:
    """Answers HTTP requests."""

    def __init__(
        self,
        answers: Mapping[str, Answer],
        *,
        passed_on: Answer,
        page: Callable[[HttpCall], Awaitable[None]] | None,
        tokens: TokenTable | None,
        origins: WebOrigins,
        client_paths: ClientPaths,
        failure_log: FailureLog,
        leaving: Callable[[], bool],
    ) -> None:
        """Route requests.

        Args:
            answers: The front of each path of `ROUTES`.
            passed_on: That of all other paths, which are engines'.
            page: That of `PAGE`, which is open; None = it is a path like the others.
            tokens: Clients' API keys; None = everybody may do everything.
            origins: Pages of browsers that may ask.
            client_paths: Paths of engines that clients may ask for.
            failure_log: Told of requests that come to nothing before they are placed.
            leaving: Returns whether this process is about to stop.
        """
        self._answers = answers
        self._passed_on = passed_on
        self._page = page
        self._tokens = tokens
        self._origins = origins
        self._client_paths = client_paths
        self._failure_log = failure_log
        self._leaving = leaving

    async def handle(self, call: HttpCall) -> None:
        """Answer one request, whatever it is."""
        caller: Caller | None = None
        try:
            call.answer_headers = self._origins.answer_headers(call.headers)
            if not call.path.isascii() or not call.query.isascii():
                raise InvalidArgument("must be ASCII: escape other characters as %XX", field="path")
            if call.path != PAGE and not call.path.endswith("//"):
                call.path = call.path.removesuffix("/")
            if call.path in (HEALTH, "/ready"):
                await self._health(call)
                return
            self._origins.require(call.headers)
            preflight = self._origins.preflight(call.method, call.headers)
            if preflight is not None:
                call.answer_headers = ()
                await call.respond(204, preflight, b"")
                return
            if call.path == PAGE and self._page is not None:
                await self._page(call)
                return
            caller = caller_of(call.headers, self._tokens)
            if caller.identity is not ANONYMOUS:
                call.trust()
            await self._answer(call, caller)
        except SinkGone:
            pass  # the client has gone
        except SinkStalled:
            pass  # its connection is closed
        except HttpRefused as refused:
            self._record(call, caller, refused)
            await call.respond(*refusal_of_http(refused, shape=errors_of(call.path)))
        except Exception as error:
            self._record(call, caller, error)
            in_full = caller is not None and caller.is_admin
            await call.respond(*refusal_of(error, shape=errors_of(call.path), in_full=in_full))

    def _record(self, call: HttpCall, caller: Caller | None, error: Exception) -> None:
        """Record a request for output that came to nothing, or one that was to be passed on to an engine; what else
        browsers and scanners ask for is no failure."""
        is_output = call.path in API_DIALECTS
        if is_output or (caller is not None and _route(call.path) is None and not isinstance(error, _NO_REQUEST)):
            tenant = caller.tenant if caller is not None else ""
            self._failure_log.failed(
                RequestSummary(call.path, tenant, request_id=header(call.headers, "x-request-id")), error
            )

    def _answer(self, call: HttpCall, caller: Caller) -> Awaitable[None]:
        route = _route(call.path)
        caller.require(_rpc_of(route, call.method))
        if route is None:
            self._client_paths.require(call.path, is_admin=caller.is_admin)
        answer = self._passed_on if route is None else self._answers[route]
        if not tracing.enabled() or (route is not None and route not in API_DIALECTS):
            return answer(call, caller)
        # Paths of engines, and their methods, are whatever clients like: they have one name together.
        name = f"{call.method} {route}" if route else "passed on"
        return _traced(name, answer, call, caller)

    async def _health(self, call: HttpCall) -> None:
        """Health: the process answers. Ready: it takes requests, and will."""
        ready = call.path == HEALTH or not self._leaving()
        status = "ok" if ready else "draining"
        await call.respond(200 if ready else 503, JSON_HEADERS, json.dumps({"status": status}).encode())


async def _traced(name: str, answer: Answer, call: HttpCall, caller: Caller) -> None:
    parent = header(call.headers, tracing.TRACEPARENT)
    with tracing.span(name, tracing.SpanKind.SERVER, parent=parent) as span:
        span.record(tenant=caller.tenant)
        await answer(call, caller)


def _route(path: str) -> str | None:
    """Return the entry of `ROUTES` that a path belongs to; None = it is an engine's."""
    if path in ROUTES:
        return path
    return MODELS if model_named(path) else None


def _rpc_of(route: str | None, method: str) -> str:
    if route is None:
        if method not in PASSED_METHODS:
            raise WrongMethod(PASSED_METHODS)
        return ENGINES_OWN
    known = ROUTES[route]
    if method not in known:
        raise WrongMethod(known)
    return known[method]


def metrics_answer(page: MetricsPage) -> Answer:
    """Return what answers with the metrics of a registry."""

    async def answer(call: HttpCall, caller: Caller) -> None:
        if caller.identity.tenant != ALL_TENANTS:
            raise PermissionDenied("metrics show all tenants, but this API key is for one tenant")
        await page.answer(call)

    return answer
