"""The HTTP front: which path, for whom; every decision is made below."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvscout.v1 import types_pb2
from kvscout_common.errors import InvalidArgument, NotFound, PermissionDenied
from kvscout_common.http.http import HttpCall, HttpRefused, SinkGone, SinkStalled
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.identity import ANONYMOUS, TokenTable
from kvscout_common.observability import tracing
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.client_paths import HEALTH, MODELS, model_named
from kvscout_gateway.fronts.dashboard.front import EVENTS, METHOD, PAGE, DashboardFront
from kvscout_gateway.fronts.json_request import CHAT
from kvscout_gateway.fronts.access import Caller, caller_of, header
from kvscout_gateway.fronts.body import JsonBody, parsed
from kvscout_gateway.fronts.openai.generation import COMPLETIONS, Generation
from kvscout_gateway.fronts.openai.models import Models
from kvscout_gateway.fronts.openai.passthrough import Passthrough
from kvscout_gateway.fronts.refusals import JSON_HEADERS, WrongMethod, refusal_of, refusal_of_http
from kvscout_gateway.fronts.openai.thresholds import change_of, shown
from kvscout_gateway.fronts.shadow.front import ShadowFront

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

THRESHOLDS: Final = "/busy_threshold"
ROUTES: Final[Mapping[str, Mapping[str, str]]] = {
    COMPLETIONS: {"POST": "Generate"},
    CHAT: {"POST": "Generate"},
    MODELS: {"GET": "ListWorkers"},
    THRESHOLDS: {"GET": "ListBusyThresholds", "POST": "GetBusyThresholds"},
    EVENTS: {"GET": METHOD},
    "/metrics": {"GET": "GetStatus"},
}
"""By path and method, the rpc whose roles may ask; those below `/v1/models` are as it. All others are engines'.
`/health`, `/ready` and the dashboard's page are open."""
ENGINES_OWN: Final = "Generate"
"""The same, of paths that are passed on."""
PASSED_METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Methods of paths that are passed on. What follows the head of any other one (CONNECT above all) some HTTP servers
read as the next request: a client could hide one in a body that no rule here would see."""


class OpenAiFront:
    """Answers HTTP requests."""

    def __init__(
        self,
        gateway: Gateway,
        generation: Generation,
        passthrough: Passthrough,
        metrics: CollectorRegistry,
        tokens: TokenTable | None,
        *,
        dashboard: DashboardFront | None = None,
        shadow: ShadowFront | None = None,
    ) -> None:
        """Answers requests.

        Args:
            gateway: What it is the front of.
            generation: For what is placed.
            passthrough: For everything else.
            metrics: Shown at /metrics.
            tokens: Clients' API keys; None = everybody may do everything.
            dashboard: For browsers; None = there is none.
            shadow: Has the user's own balancer answer what is the engines'; None = this gateway decides.
        """
        self._gateway = gateway
        self._generation = generation
        self._passthrough = passthrough
        self._models = Models(gateway)
        self._metrics = metrics
        self._tokens = tokens
        config = gateway.config
        self._origins = WebOrigins(guarded=tokens is not None, host=config.server.host, allowed=config.cors_origins)
        self._dashboard = dashboard
        self._shadow = shadow

    async def handle(self, call: HttpCall) -> None:
        """Answers one request, whatever it is."""
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
            if call.path == PAGE and self._dashboard is not None:
                await self._dashboard.show(call)
                return
            caller = caller_of(call.headers, self._tokens)
            if caller.identity is not ANONYMOUS:
                call.trust()
            await self._answer(call, caller)
        except SinkGone:
            pass  # nobody is there to be told
        except SinkStalled:
            pass  # its connection is closed
        except HttpRefused as refused:
            await call.respond(*refusal_of_http(refused))
        except Exception as error:
            await call.respond(*refusal_of(error, in_full=caller is not None and caller.is_admin))

    async def _answer(self, call: HttpCall, caller: Caller) -> None:
        route = _route(call.path)
        caller.require(_rpc_of(route, call.method))
        if route is None:
            self._gateway.config.client_paths.require(call.path, is_admin=caller.is_admin)
        if not tracing.enabled() or route not in (COMPLETIONS, CHAT, None):
            await self._answer_route(call, caller, route)
            return
        # Paths of engines, and how they are asked for, are whatever clients like: they have one name together.
        name = f"{call.method} {route}" if route else "passed on"
        parent = header(call.headers, tracing.TRACEPARENT)
        with tracing.span(name, tracing.Kind.SERVER, parent=parent) as span:
            span.tell(tenant=caller.tenant)
            await self._answer_route(call, caller, route)

    async def _answer_route(self, call: HttpCall, caller: Caller, route: str | None) -> None:
        path = call.path
        if self._shadow is not None and route in (COMPLETIONS, CHAT, MODELS, None):
            await self._shadow.run(call, caller)
        elif route in (COMPLETIONS, CHAT):
            with self._gateway.exchanges.admit(caller.tenant):
                await self._generation.run(call, caller, await self._json(call, caller))
        elif route == MODELS:
            await self._tell_models(call, caller, model_named(path))
        elif route == THRESHOLDS:
            await self._thresholds(call, caller)
        elif route == EVENTS:
            if self._dashboard is None:
                raise NotFound("there is no dashboard: the gateway runs with --no-dashboard")
            await self._dashboard.watch(call, caller)
        elif route == "/metrics":
            await self._tell_metrics(call, caller)
        else:
            with self._gateway.exchanges.admit(caller.tenant):
                charge = self._gateway.charge(caller.tenant)
                await self._passthrough.run(call, caller, await call.body(charge), charge)

    async def _health(self, call: HttpCall) -> None:
        """Health: the process answers. Ready: it takes requests, and will."""
        ready = call.path == HEALTH or not self._gateway.leaving
        status = "ok" if ready else "draining"
        await call.respond(200 if ready else 503, JSON_HEADERS, json.dumps({"status": status}).encode())

    async def _json(self, call: HttpCall, caller: Caller) -> JsonBody:
        charge = self._gateway.charge(caller.tenant)
        body = await call.body(charge)
        if not body:
            raise InvalidArgument("must not be empty", field="body")
        return await parsed(body, charge)

    async def _tell_models(self, call: HttpCall, caller: Caller, name: str) -> None:
        cards = await self._models.cards(caller.tenant)
        if not name:
            await _tell(call, {"object": "list", "data": cards})
            return
        found = next((card for card in cards if card["id"] == name), None)
        if found is None:
            raise NotFound(f"the model {name!r} does not exist", field="model")
        await _tell(call, found)

    async def _thresholds(self, call: HttpCall, caller: Caller) -> None:
        gateway, seconds = self._gateway, self._gateway.config.scheduler_timeout_seconds
        if call.method == "GET":
            everything = types_pb2.ListBusyThresholdsRequest(tenant=caller.tenant)
            listed, _ = await gateway.schedulers.call(
                lambda stub: stub.ListBusyThresholds, everything, timeout_seconds=seconds
            )
            await _tell(call, {"thresholds": [shown(one) for one in listed.thresholds]})
            return
        change = change_of(await self._json(call, caller), caller.tenant)
        if isinstance(change, types_pb2.SetBusyThresholdsRequest):
            caller.require("SetBusyThresholds")
            await _tell(call, shown((await gateway.fanout.set_busy_thresholds(change)).thresholds))
            return
        read, _ = await gateway.schedulers.call(lambda stub: stub.GetBusyThresholds, change, timeout_seconds=seconds)
        await _tell(call, shown(read.thresholds))

    async def _tell_metrics(self, call: HttpCall, caller: Caller) -> None:
        if caller.identity.tenant != ALL_TENANTS:
            raise PermissionDenied("metrics are of all tenants, this API key is not")
        encode, content_type = choose_encoder(header(call.headers, "accept"))
        await call.respond(200, (("Content-Type", content_type),), encode(self._metrics))


def _route(path: str) -> str | None:
    """The entry of `ROUTES` that a path belongs to; None = it is an engine's."""
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


async def _tell(call: HttpCall, document: Any) -> None:
    await call.respond(200, JSON_HEADERS, json.dumps(document).encode())
