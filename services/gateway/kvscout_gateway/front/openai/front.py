"""The HTTP front: which path, for whom; every decision is made below."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvscout.v1 import types_pb2
from kvscout_common import tracing
from kvscout_common.errors import InvalidArgument, NotFound, PermissionDenied
from kvscout_common.identity import TokenTable
from kvscout_common.tenant_limits import Limit
from kvscout_common.transport.http import HttpCall, HttpRefused, SinkGone, SinkStalled
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.front.dashboard.front import EVENTS, METHOD, PAGE, DashboardFront
from kvscout_gateway.front.openai.access import Caller, caller_of, header
from kvscout_gateway.front.openai.body import JsonBody, parsed
from kvscout_gateway.front.openai.generation import COMPLETIONS, Generation
from kvscout_gateway.front.openai.models import Models
from kvscout_gateway.front.openai.passthrough import Passthrough
from kvscout_gateway.front.openai.refusals import JSON_HEADERS, WrongMethod, refusal_of, shaped
from kvscout_gateway.front.openai.thresholds import change_of, shown
from kvscout_gateway.front.shadow.front import ShadowFront
from kvscout_gateway.front.wishes import CHAT

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

MODELS: Final = "/v1/models"
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
        self._dashboard = dashboard
        self._shadow = shadow

    async def handle(self, call: HttpCall) -> None:
        """Answers one request, whatever it is."""
        try:
            if call.path in ("/health", "/ready"):
                await self._health(call)
                return
            if call.path == PAGE and self._dashboard is not None:
                await self._dashboard.show(call)
                return
            await self._answer(call, caller_of(call.headers, self._tokens))
        except SinkGone:
            pass  # nobody is there to be told
        except SinkStalled:
            pass  # its connection is closed
        except HttpRefused as refused:
            body = shaped(refused.status, str(refused), "invalid_request_error")
            await call.respond(refused.status, JSON_HEADERS, body)
        except Exception as error:
            await call.respond(*refusal_of(error))

    async def _answer(self, call: HttpCall, caller: Caller) -> None:
        route = _route(call.path)
        caller.require(_rpc_of(route, call.method))
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
            self._gateway.exchanges.require_open()
            await self._generation.run(call, caller, await _json(call))
        elif route == MODELS:
            await self._tell_models(call, caller, path.removeprefix(MODELS).strip("/"))
        elif route == THRESHOLDS:
            await self._thresholds(call, caller)
        elif route == EVENTS:
            if self._dashboard is None:
                raise NotFound("there is no dashboard: the gateway runs with --no-dashboard")
            await self._dashboard.watch(call, caller)
        elif route == "/metrics":
            await self._tell_metrics(call, caller)
        else:
            exchanges = self._gateway.exchanges
            exchanges.require_open()
            with exchanges.limits.hold(Limit.REQUESTS, caller.tenant):
                await self._passthrough.run(call, caller, await call.body())

    async def _health(self, call: HttpCall) -> None:
        """Health: the process answers. Ready: it takes requests."""
        draining = self._gateway.exchanges.draining
        ready = call.path == "/health" or not draining
        status = "ok" if ready else "draining"
        await call.respond(200 if ready else 503, JSON_HEADERS, json.dumps({"status": status}).encode())

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
        change = change_of(await _json(call), caller.tenant)
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
    return MODELS if path.startswith(f"{MODELS}/") else None


def _rpc_of(route: str | None, method: str) -> str:
    if route is None:
        return ENGINES_OWN
    known = ROUTES[route]
    if method not in known:
        raise WrongMethod(known)
    return known[method]


async def _json(call: HttpCall) -> JsonBody:
    body = await call.body()
    if not body:
        raise InvalidArgument("must not be empty", field="body")
    return await parsed(body)


async def _tell(call: HttpCall, document: Any) -> None:
    await call.respond(200, JSON_HEADERS, json.dumps(document).encode())
