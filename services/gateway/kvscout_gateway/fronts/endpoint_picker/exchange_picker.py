"""Picks by the gateway's own routing: each request is an exchange that others send, observed by this front.

What is booked for a request ends with its stream; where that shows no end, with its line in the proxy's access log, at
the latest with its lease.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvscout_common.errors import (
    FailedPrecondition,
    KvscoutError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.identity.identity import current_identity
from kvscout_common.observability import tracing
from kvscout_common.observability.log_lines import about_request
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT, WorkerSpec
from kvscout_gateway.engines.faults import EngineFailed, fault_of_status
from kvscout_gateway.engines.usage import output_tokens_of
from kvscout_gateway.engines.vllm import SOURCE_HEADER
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.access_log import Over
from kvscout_gateway.fronts.endpoint_picker.addresses import address_of, reachable
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest
from kvscout_gateway.fronts.headers import of_decision
from kvscout_gateway.fronts.json_request import request_of
from kvscout_gateway.fronts.random_workers import random_workers
from kvscout_gateway.fronts.stored_responses import name_in, named_by
from kvscout_gateway.members.catalog import TenantView
from kvscout_gateway.request.attempt import Attempt
from kvscout_gateway.request.exchange import Exchange
from kvscout_gateway.request.failures import RequestSummary
from kvscout_gateway.request.round_robin import eligible
from kvscout_gateway.request.routing import resolve
from kvscout_gateway.tokens.engine_comparison import Compared
from kvscout_gateway.values.dialects import COUNT_PATHS
from kvscout_gateway.values.request import Request

log = logging.getLogger("kvscout.gateway")

NAME_BYTES = 16
"""Random ones of a pick's name."""
QUEUE_SHARE = 0.75
"""Share of the time for a pick that it may wait in a queue: then it is refused, not sent where all are busy."""
NO_TIME = "there was no time left to ask a scheduler"
LOOKED_AT = 3
"""Workers for each fallback that is wanted: some drain, or are left alone."""


class PickerMetrics:
    """Metrics of the picker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.picks = Counter(
            "kvscout_endpoint_picks", "Requests of proxies, by outcome", ["outcome"], registry=registry
        )
        self.elsewhere = Counter(
            "kvscout_endpoint_picks_served_elsewhere", "Requests that a fallback served", registry=registry
        )
        self.left = Gauge(
            "kvscout_endpoint_picks_left",
            "Requests that were left, until their lease or their line in the access log",
            registry=registry,
        )
        self.logged = Counter(
            "kvscout_endpoint_picks_logged",
            "Requests that were left and whose end the access log reported",
            registry=registry,
        )


class ExchangePicker:
    """A `Picker`."""

    def __init__(
        self,
        context: FrontContext,
        config: EndpointPickerConfig,
        metrics: PickerMetrics,
        *,
        draw: random.Random,
    ) -> None:
        """Pick endpoints.

        Args:
            context: Collaborators of the fronts.
            config: The front's flags.
            metrics: Where it counts.
            draw: Which fallbacks are named is left to chance, so that the load of a lost worker spreads.
        """
        self._exchanges = context.exchanges
        self._context = context
        self.comparison = context.tokens.comparison
        self.stored = context.stored
        self._catalog = context.catalog
        self._health = context.exchanges.context.health
        self._config = config
        self.metrics = metrics
        self._draw = draw
        self._left: dict[str, ExchangePick] = {}
        """By name."""
        # Engines see the names: whoever does can still not end the picks that follow.
        self._names = map(secrets.token_hex, itertools.repeat(NAME_BYTES))

    @property
    def lease_seconds(self) -> float:
        """Return how long one of those lasts."""
        return self._config.lease_seconds

    async def pick(self, asked: PickRequest, *, without_upstreams: bool = False) -> ExchangePick:
        """See `Picker`."""
        with tracing.span("pick", tracing.SpanKind.SERVER, parent=asked.traceparent):
            about = RequestSummary(asked.path or "/", self._config.tenant, asked.model)
            failure_log = self._exchanges.failure_log
            try:
                with failure_log.watch(about):
                    return await self._pick(asked, without_upstreams=without_upstreams)
            except asyncio.CancelledError:
                if without_upstreams:
                    failure_log.failed(about, Unavailable("there was no time left to pick an endpoint"))
                raise

    async def _pick(self, asked: PickRequest, *, without_upstreams: bool) -> ExchangePick:
        tenant = self._tenant()
        view = self._catalog.tenant(tenant)
        if not asked.model and asked.size and len(view.models) == 1:
            # What runs there is the only model that it can mean, and takes its time.
            asked = asked._replace(model=next(iter(view.models)))
        if (named := named_by(tenant, asked.method, asked.path)) is not None:
            return self._any(asked, view, (await self.stored.worker_of(named),))
        if not asked.model:
            return self._any(asked, view, tuple(view.specs.values()))
        if asked.path in COUNT_PATHS:
            return self._any(asked, view, view.serving(asked.model).specs)
        request = await self._request_of(asked, tenant, view)
        wait_seconds = QUEUE_SHARE * self._config.pick_seconds
        request = self._context.terms.apply(request, asked.headers, current_identity(), asked.fields)
        request = replace(
            request,
            queue_wait_seconds=wait_seconds,
            fallback_reason=NO_TIME if without_upstreams else "",
        )
        if not asked.shows_output:
            request = replace(request, output=request.output._replace(unseen=True), unreported=True)
        with ExitStack() as stack:
            exchange = stack.enter_context(self._exchanges.begin(request))
            with about_request(exchange.request_id):
                try:
                    attempt, prefill = await self._exchanges.plan(exchange.request).place(exchange)
                except asyncio.CancelledError as error:
                    # Its time is over, and another pick follows; or its proxy has gone before it was sent anywhere.
                    self._exchanges.failure_log.leave_out(error)
                    raise
            first = _address_of(attempt)
            headers = {
                wire.DESTINATION: ",".join((first, *self._fallbacks(attempt.request, view, first))),
                wire.PICK: next(self._names),
            }
            if prefill is not None:
                headers[wire.PREFILLER] = _address_of(prefill)
                prefill.sent()
            if attempt.decision.rank_header is not None:
                headers[wire.RANK] = str(attempt.decision.rank_header)
            if attempt.decision.pull is not None:
                headers[SOURCE_HEADER] = attempt.decision.pull.address
            attempt.sent()
            compared = self.comparison.begin(request.prompt)
            shows_decision = self._context.response_headers == "all"
            return ExchangePick(
                self,
                headers,
                held=stack.pop_all(),
                exchange=exchange,
                attempt=attempt,
                prefill=prefill,
                compared=compared,
                answer_headers=dict(of_decision(attempt.decision)) if shows_decision else wire.NO_HEADERS,
            )

    def prefill_seconds(self, attempt: Attempt) -> float:
        """Return how long a prompt is taken to be computed that nobody shows the end of."""
        return attempt.decision.uncached_tokens / self._exchanges.context.engines.timeouts.prefill_tokens_per_second

    def worker_at(self, request: Request, address: str) -> str:
        """Return the id of the worker of a request's model that has an address; "" = there is none."""
        specs = self._catalog.serving(request).specs
        return next((spec.worker_id for spec in specs if address_of(spec.http_endpoint) == address), "")

    def keep(self, pick: ExchangePick) -> None:
        """Keep a pick whose end only an access log will report."""
        self._left[pick.name] = pick
        self.metrics.left.inc()
        if self._exchanges.draining:
            pick.over()

    def let_go(self, pick: ExchangePick) -> None:
        """Drop a pick that is over, if it was kept."""
        if self._left.pop(pick.name, None) is not None:
            self.metrics.left.dec()

    def end(self, over: Over) -> None:
        """See `access_log.Ender`."""
        pick = self._left.get(over.name)
        if pick is None or pick.tenant != self._tenant():
            return
        self.metrics.logged.inc()
        if over.status:
            pick.answering(over.status, "", None)
            pick.ended(None)
        else:
            pick.aborted()

    def forget(self) -> None:
        """End all whose end nobody will report: this gateway is leaving."""
        for pick in list(self._left.values()):
            pick.over()

    def _tenant(self) -> str:
        if self._config.tenant:
            return self._config.tenant
        identity = current_identity()
        if not identity.may_call("Route"):
            raise PermissionDenied(f"role {identity.role} may not call Route")
        return DEFAULT_TENANT if identity.tenant == ALL_TENANTS else identity.tenant

    async def _request_of(self, asked: PickRequest, tenant: str, view: TenantView) -> Request:
        specs = view.serving(asked.model).specs
        # A worker that only schedulers know is found out about when it was picked.
        allowed = reachable(specs, asked.subset)
        if not allowed and (specs or asked.subset is not None):
            why = "that the proxy allows" if asked.subset is not None else "with an IP address in its HTTP endpoint"
            raise Unavailable(f"there is no worker of model {asked.model!r} {why}", retry_after_seconds=1.0)
        request = await request_of(
            self._context, asked.path, asked.headers, asked.fields, size=asked.size, tenant=tenant, model=asked.model
        )
        request = await self.stored.pinned(request, asked.fields)
        if len(allowed) == len(specs):
            return request
        allowed_ids = tuple(spec.worker_id for spec in allowed)
        if request.pinned and request.pinned not in allowed_ids:
            raise Unavailable(f"{request.undivided}, and the proxy does not allow it", retry_after_seconds=1.0)
        return replace(request, allowed=allowed_ids)

    def _any(self, asked: PickRequest, view: TenantView, among: Sequence[WorkerSpec]) -> ExchangePick:
        """Pick one of some workers, whatever is in the prompt; nothing is booked."""
        some = reachable(among, asked.subset)
        specs = random_workers(self._health, self._tenant(), some, tuple(view.specs.values()), draw=self._draw)
        if not specs:
            raise Unavailable("no worker that serves clients may take the request", retry_after_seconds=1.0)
        # Several workers may have one address.
        addresses = list(dict.fromkeys(address_of(spec.http_endpoint) for spec in specs))[: 1 + self._config.fallbacks]
        return ExchangePick(self, {wire.DESTINATION: ",".join(addresses)})

    def _fallbacks(self, request: Request, view: TenantView, first: str) -> list[str]:
        """Return the addresses of some other workers that could take a request, ejected ones at the end: not all
        are looked at, there may be a thousand."""
        wanted = self._config.fallbacks
        request = resolve(request, view)
        specs = view.serving(request.model).specs
        some = self._draw.sample(specs, min(len(specs), 1 + LOOKED_AT * wanted))
        fit = eligible(request, some)
        fit = self._health.well_first(request.tenant, fit, specs)
        others = dict.fromkeys(address_of(spec.http_endpoint) for spec in fit)
        return [address for address in others if address not in ("", first)][:wanted]


class ExchangePick:
    """A `Pick`; what is held for it ends when it does."""

    def __init__(
        self,
        picker: ExchangePicker,
        headers: Mapping[str, str],
        *,
        held: ExitStack | None = None,
        exchange: Exchange | None = None,
        attempt: Attempt | None = None,
        prefill: Attempt | None = None,
        compared: Compared | None = None,
        answer_headers: Mapping[str, str] = wire.NO_HEADERS,
    ) -> None:
        """Hold a pick.

        Args:
            picker: Made it.
            headers: To be set.
            held: Its exchange, entered; None = nothing is booked.
            exchange: The same.
            attempt: Where it goes.
            prefill: Where its prompt is computed; None = there as well.
            compared: What of its tokens is compared with the engine's.
            answer_headers: To be set in the response.
        """
        self._picker = picker
        self.headers = headers
        self.answer_headers = answer_headers
        self._held = held
        self._exchange = exchange
        self._attempt = attempt
        self._prefill = prefill
        self._compared = compared
        self.name = headers.get(wire.PICK, "")
        self.tenant = attempt.request.tenant if attempt is not None else ""
        self._in_chunks: bool | None = None
        self._has_output = False
        self._moving: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def answering(self, status: int, served: str, in_chunks: bool | None) -> None:
        """See `Pick`."""
        self._in_chunks = in_chunks
        attempt, exchange = self._attempt, self._exchange
        if attempt is None or exchange is None:
            return
        if self._prefill is not None:
            # The worker that answers asked it before.
            self._prefill.free()
        first = self.headers[wire.DESTINATION].partition(",")[0]
        if served and served != first:
            self._picker.metrics.elsewhere.inc()
            moved = EngineFailed(
                "the proxy went to another worker", detail=f"{first}: the proxy went to {served} in its place"
            )
            exchange.failed(attempt, moved, is_answer=False)
            self._attempt = None
            self._moving = asyncio.get_running_loop().create_task(self._move(exchange, attempt, served))
        elif status >= HTTPStatus.BAD_REQUEST:
            fault = fault_of_status(status, retry_after=False)
            failed = EngineFailed(
                f"engine answered {status}", detail=f"{first} answered {status}", fault=fault, answer=(status, (), b"")
            )
            exchange.failed(attempt, failed, is_answer=True)

    def first_output(self, head: bytes) -> None:
        """See `Pick`."""
        self._has_output = True
        if self._attempt is None:
            return
        self._begins(self._attempt)
        if self._attempt.request.api.stores:
            decision = self._attempt.decision
            self._picker.stored.learn(self.tenant, name_in(head), decision.worker.worker_id, decision.session_id)

    def ended(self, account: Mapping[str, Any] | None) -> None:
        """See `Pick`."""
        try:
            if self._attempt is not None and account:
                # An embedding has none, and ends with what would be its first one.
                least = 1 if self._attempt.request.output.max_tokens == 1 else 0
                self._attempt.generated(output_tokens_of(account) or least)
            if self._attempt is not None and account is not None and not self._attempt.request.prompt.unknown:
                usage = self._attempt.request.api.answer.usage({"usage": account})
                self._attempt.ended(usage)
                if self._compared is not None:
                    self._picker.comparison.end(self._compared, self._attempt.decision, usage)
        finally:
            self.over()

    def aborted(self) -> None:
        """See `Pick`."""
        self.over(asyncio.CancelledError())

    def left(self) -> None:
        """See `Pick`."""
        if self._held is None:
            return
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self._picker.lease_seconds, self.over))
        if self._prefill is not None:
            self._timers.append(loop.call_later(self._picker.prefill_seconds(self._prefill), self._prefill.free))
        self._picker.keep(self)

    def over(self, error: BaseException | None = None) -> None:
        """Let go of what is held; again, nothing."""
        held, self._held = self._held, None
        if held is None:
            return
        for timer in self._timers:
            timer.cancel()
        self._picker.let_go(self)
        kind = type(error) if error is not None else None
        if self._moving is None or self._moving.done():
            held.__exit__(kind, error, None)
            return
        # What is being booked meanwhile is freed as well.
        self._moving.add_done_callback(lambda _: held.__exit__(kind, error, None))
        self._moving.cancel()

    async def _move(self, exchange: Exchange, attempt: Attempt, served: str) -> None:
        """Book the request where it runs, instead of where it was meant to."""
        attempt.free()
        worker_id = self._picker.worker_at(exchange.request, served)
        if not worker_id:
            return
        request = replace(attempt.request, pinned=worker_id, allowed=(), running=True)
        try:
            try:
                moved = await exchange.place(request)
            except (Unavailable, ResourceExhausted) as error:
                # It is left out there, or busy; the request runs all the same, and is booked as one that does.
                moved = await exchange.place(
                    replace(request, fallback_reason=f"the proxy went to {served} itself: {error}")
                )
        except KvscoutError as error:
            log.debug("%s runs at %s, unbooked: %s", exchange.request_id, served, error)
            return
        moved.sent()
        self._attempt = moved
        if self._has_output:
            self._begins(moved)

    def _begins(self, attempt: Attempt) -> None:
        whole = attempt.request.output.unseen if self._in_chunks is None else not self._in_chunks
        attempt.first_output(whole_answer=whole)


def _address_of(attempt: Attempt) -> str:
    address = address_of(attempt.decision.endpoint)
    if not address:
        raise FailedPrecondition(
            f"worker {attempt.decision.worker.worker_id!r} has no HTTP endpoint with an IP address"
        )
    return address
