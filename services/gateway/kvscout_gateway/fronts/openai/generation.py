"""A request for output, in any dialect: tokens for routing, a request, an exchange, the engine's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.http import HttpAnswer, HttpCall, HttpRequest, Sink, SinkGone
from kvscout_common.observability import tracing
from kvscout_common.observability.log_lines import about_request
from kvscout_gateway.engines.answer import answer_read
from kvscout_gateway.engines.vllm import common_headers
from kvscout_gateway.fronts import headers as proxied
from kvscout_gateway.fronts.access import Caller, header
from kvscout_gateway.fronts.body import JsonBody, json_of, model_of, with_usage
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.json_request import request_of
from kvscout_gateway.fronts.outputs import tool_choice
from kvscout_gateway.fronts.refusals import event_of, refusal_of
from kvscout_gateway.fronts.reserved import changes_of
from kvscout_gateway.request.failures import RequestSummary
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import API_DIALECTS, ApiDialect
from kvscout_gateway.values.request import EngineAdapter, Request

MAX_READ_BYTES: Final = 64 * 1024
"""Longer answers are not read for their usage once more."""
REQUEST_ID_HEADER: Final = "X-Request-Id"
_REQUEST_ID_FIELD: Final = REQUEST_ID_HEADER.lower()
DEGRADED_HEADER: Final = "X-Kvscout-Degraded"
"""Header with the reason why a request was placed with less knowledge than usual."""


class ClientJson:
    """See `RequestBody`: the client's own body, for the engine's endpoint of the same name."""

    max_tokens: int | None = None
    """The engine knows when it is done: it reads the same body."""

    def __init__(self, call: HttpCall, body: JsonBody, *, with_key: bool, max_priority: int | None) -> None:
        """Take what a client sent.

        Args:
            call: The client's.
            body: Its body.
            with_key: The client's key is the engine's.
            max_priority: See `reserved.changes_of`.
        """
        self._api = API_DIALECTS[call.path]
        self._target = f"{call.path}?{call.query}" if call.query else call.path
        self._headers = call.headers
        self._body = body
        self.with_key = with_key
        self.request_id = header(call.headers, _REQUEST_ID_FIELD)
        """As the client named it; "" = it did not."""
        self.whole_answer = body.fields.get("stream") is not True
        self.demands_tool_call = tool_choice(body.fields) == "call"
        self.form, changes = with_usage(body, self._api)
        self._own = {**changes_of(body.fields, max_priority=max_priority), **changes}

    def dialect(self, adapter: EngineAdapter) -> Dialect:
        """See `RequestBody`: the client's, whatever else the engine speaks."""
        return self._api.answer

    async def write(
        self, adapter: EngineAdapter, to: Decision, request: Request, fields: Mapping[str, Any]
    ) -> HttpRequest:
        """See `RequestBody`."""
        own = dict(self._own)
        if "model" in self._body.fields:
            own["model"] = to.engine_model
        headers = common_headers(to, self.request_id or request.request_id)
        return HttpRequest(
            f"{to.endpoint}{self._target}",
            headers=proxied.to_engine(self._headers, headers, with_key=self.with_key),
            body=self._body.changed({**own, **fields}),
        )

    def settle(self) -> None:
        """See `RequestBody`."""
        self._body.settle()


class Client:
    """See `Reply`: an HTTP client that waits for an answer."""

    def __init__(
        self, call: HttpCall, api: ApiDialect, *, whole_answer: bool, in_full: bool, shows_decision: bool
    ) -> None:
        self._call = call
        self._api = api
        self._in_full = in_full
        """Its errors may name addresses."""
        self._shows_decision = shows_decision
        self._whole_answer = whole_answer
        self._answer: HttpAnswer | None = None
        self._answered = False
        self.request_id = ""
        self.decision: Decision | None = None
        self.usage: Usage | None = None
        """Usage that the engine reported."""
        self.answer_id = ""
        """Name of a whole answer."""

    async def placed(self, decision: Decision) -> None:
        """See `Reply`."""
        self.decision = decision

    async def begin(self, answer: HttpAnswer) -> Sink:
        """See `Reply`."""
        self._answer = answer
        if self._whole_answer:
            return self
        self._call.ends_with_answer = True
        await self._call.start(answer.status, self._headers(answer))
        return self._call

    async def write(self, data: bytes) -> None:
        """See `Sink`: all of an answer that comes at once."""
        assert self._answer is not None
        self._answered = True
        if self._api.stores or len(data) <= MAX_READ_BYTES:
            document = await answer_read(data)
            self.usage = self._api.answer.usage(document)
            name = document.get("id")
            self.answer_id = name if isinstance(name, str) else ""
        await self._call.respond(self._answer.status, self._headers(self._answer), data)

    async def end(self) -> None:
        """End the answer."""
        if not self._whole_answer and self._answer is not None:
            self.usage = self._answer.report.usage
            await self._call.end()

    def stored(self) -> tuple[str, str, int]:
        """Return the name of the answer, as far as it has come, its worker and its session; "" and 0 = unknown."""
        streamed = self._answer is not None and not self._whole_answer
        name = self._answer.report.answer_id if streamed and self._answer is not None else self.answer_id
        if self.decision is None:
            return name, "", 0
        return name, self.decision.worker.worker_id, self.decision.session_id

    async def fail(self, error: Exception) -> None:
        """Tell the client that there will be no (further) answer."""
        shape = self._api.errors
        refusal = refusal_of(error, shape=shape, request_id=self.request_id, in_full=self._in_full)
        if self._answered:
            return
        report = self._answer.report if self._answer is not None and not self._whole_answer else None
        if report is None or not report.passed:
            await self._call.respond(refusal.status, (*refusal.headers, *self._named()), refusal.body)
            return
        if not report.error:  # else the engine's own words have been passed on
            await self._call.write(event_of(refusal, shape, events=report.events))
        await self._call.end()

    def _headers(self, answer: HttpAnswer) -> list[tuple[str, str]]:
        headers = proxied.to_client(answer.headers)
        if self.decision is not None and self._shows_decision:
            headers += proxied.of_decision(self.decision)
        if self.decision is not None and self.decision.degraded:
            reasons = self.decision.degraded_for(in_full=self._in_full)
            headers.append((DEGRADED_HEADER, proxied.as_value("; ".join(reasons))))
        return headers if header(headers, _REQUEST_ID_FIELD) else [*headers, *self._named()]

    def _named(self) -> tuple[tuple[str, str], ...]:
        return ((REQUEST_ID_HEADER, self.request_id),) if self.request_id else ()


class Generation:
    """Runs requests for output."""

    def __init__(
        self,
        context: FrontContext,
        *,
        passes_keys: Callable[[], bool],
    ) -> None:
        """Run requests.

        Args:
            context: Collaborators of the fronts.
            passes_keys: Tells whether clients' keys are the engines'.
        """
        self._context = context
        self._passes_keys = passes_keys

    async def answer(self, call: HttpCall, caller: Caller) -> None:
        """Answer one request.

        Raises:
            KvscoutError: It is not admitted, or cannot be read.
            SinkGone: Its client has gone.
        """
        with self._context.exchanges.admit(caller.tenant):
            await self._answer(call, caller, await json_of(call, self._context.charge(caller.tenant)))

    async def _answer(self, call: HttpCall, caller: Caller, body: JsonBody) -> None:
        tenant, model, comparison = caller.tenant, model_of(body.fields), self._context.tokens.comparison
        asked = RequestSummary(call.path, tenant, model, header(call.headers, _REQUEST_ID_FIELD))
        with self._context.exchanges.failure_log.watch(asked):
            request = await request_of(
                self._context, call.path, call.headers, body.fields, size=body.size, tenant=tenant, model=model
            )
            request = self._context.terms.apply(request, call.headers, caller.identity, body.fields)
        compared = comparison.begin(request.prompt)
        sent = ClientJson(call, body, with_key=self._passes_keys(), max_priority=caller.identity.max_priority)
        client = Client(
            call,
            request.api,
            whole_answer=sent.whole_answer,
            in_full=caller.is_admin,
            shows_decision=self._context.shows_decision(caller.identity),
        )
        client.request_id = sent.request_id or request.request_id
        request.body = sent
        stores = request.api.stores and body.fields.get("store") is not False
        if request.api.stores:
            headers = proxied.to_engine(call.headers, (), with_key=self._passes_keys())
            request = await self._context.stored.pinned(request, body.fields, headers)
        with about_request(client.request_id):
            try:
                with self._context.exchanges.begin(request, admitted=True) as exchange:
                    await exchange.run(client)
                await client.end()
            except SinkGone:
                raise
            except Exception as error:
                tracing.current().failed(error)
                await client.fail(error)
                return
            finally:
                if stores:
                    self._context.stored.learn(tenant, *client.stored())
        if compared is not None and client.decision is not None:
            comparison.end(compared, client.decision, client.usage)
