"""Generate: a client's message → an exchange → messages, as the transport makes them of what the engine sends."""

from __future__ import annotations

from typing import Any

from kvscout.v1 import gateway_pb2
from kvscout_common.http.http import Form, HttpAnswer, PrefixedSink, Sink
from kvscout_common.identity.identity import AccessRole, Identity
from kvscout_common.observability.log_lines import about_request
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.grpc import translate
from kvscout_gateway.fronts.grpc.logprobs import LogprobSink
from kvscout_gateway.request.attempt import AttemptContext
from kvscout_gateway.request.failures import RequestSummary
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import OPENAI
from kvscout_gateway.values.request import Request


async def generate(
    fronts: FrontContext,
    message: gateway_pb2.GenerateRequest,
    context: Any,
    identity: Identity,
) -> None:
    """Answer one call: bytes are written to its context, no chunk of output becomes an object on its way."""
    asked = RequestSummary("Generate", message.tenant or DEFAULT_TENANT, message.model, message.request_id)
    with fronts.exchanges.failure_log.watch(asked):
        await _answer(fronts, message, context, identity)


async def _answer(fronts: FrontContext, message: gateway_pb2.GenerateRequest, context: Any, identity: Identity) -> None:
    exchanges = fronts.exchanges
    request = translate.generate_request(message, fronts.max_prompt_tokens, max_priority=identity.max_priority)
    request.session = fronts.sessions.named(request.tenant, message.session)
    request = fronts.terms.apply(
        request,
        context.invocation_metadata() or (),
        identity,
        objective=message.objective,
        seconds_left=context.time_remaining(),
    )
    # A prompt is long, and an answer may take minutes.
    del message
    with exchanges.begin(request) as exchange, about_request(exchange.request_id):
        client = _Client(context, exchange.request_id, in_full=identity.role is AccessRole.ADMIN)
        with_logprobs = request.body.form is Form.BYTES
        await exchange.run(_WithLogprobs(client, exchanges.context, request) if with_logprobs else client)


class _Client:
    """See `Reply`. Where the request runs goes with the first chunk of output: messages that follow one another in
    bytes are one message."""

    def __init__(self, context: Any, request_id: str, *, in_full: bool) -> None:
        self._context = context
        self._in_full = in_full
        self._request_id = request_id
        self._sink = PrefixedSink(context, b"")

    async def placed(self, decision: Decision) -> None:
        """See `Reply`."""
        if self._sink.first:
            await self._context.write(self._sink.first)
        self._sink.first = gateway_pb2.GenerateResponse(
            route=translate.route_response(decision, in_full=self._in_full), request_id=self._request_id
        ).SerializeToString()

    async def begin(self, answer: HttpAnswer) -> Sink:
        """See `Reply`."""
        return self._sink


class _WithLogprobs:
    """See `Reply`: a client that wants log probabilities."""

    def __init__(self, client: _Client, context: AttemptContext, request: Request) -> None:
        self._client = client
        self._context = context
        self._body = request.body
        self._dialect = OPENAI

    async def placed(self, decision: Decision) -> None:
        """See `Reply`."""
        self._dialect = self._body.dialect(self._context.adapter_of(decision.spec))
        await self._client.placed(decision)

    async def begin(self, answer: HttpAnswer) -> Sink:
        """See `Reply`."""
        return LogprobSink(await self._client.begin(answer), self._dialect, self._body.max_tokens)
