"""Every path that needs no placement by its prompt: to any healthy worker of its model, as it came, and back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from kvscout_common.errors import InvalidArgument, NotFound, Unavailable
from kvscout_common.http.http import Charge, Headers, HttpAnswer, HttpCall, HttpRequest
from kvscout_common.http.json_fields import INLINE_BYTES
from kvscout_common.known_names import or_known
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.faults import EngineFailed
from kvscout_gateway.fronts import headers as proxied
from kvscout_gateway.fronts.access import Caller, header
from kvscout_gateway.fronts.body import JsonBody
from kvscout_gateway.fronts.client_body import ClientBody, read_body
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.random_workers import random_workers
from kvscout_gateway.fronts.stored_responses import named_by

log = logging.getLogger("kvscout.gateway")

MAX_TRIES: Final = 2


class Passthrough:
    """Passes requests on."""

    def __init__(self, context: FrontContext, *, passes_keys: Callable[[], bool]) -> None:
        """Pass requests on.

        Args:
            context: Collaborators of the fronts.
            passes_keys: Tells whether clients' keys are the engines'.
        """
        self._context = context
        attempts = context.exchanges.context
        self._engines, self._health, self._observations = attempts.engines, attempts.health, attempts.observations
        self._passes_keys = passes_keys

    async def answer(self, call: HttpCall, caller: Caller) -> None:
        """Answer one request.

        Raises:
            InvalidArgument: The body cannot be read, or names no model where it should.
            NotFound: No worker has the model.
            Unavailable: No worker answers.
            SinkGone: Its client has gone.
        """
        with self._context.exchanges.admit(caller.tenant):
            charge = self._context.charge(caller.tenant)
            await self._answer(call, caller, await call.body(charge), charge)

    async def _answer(self, call: HttpCall, caller: Caller, body: bytes, charge: Charge) -> None:
        if call.path in self._context.client_paths:
            read = await read_body(call.headers, body, max_priority=caller.identity.max_priority, charge=charge)
        else:
            read = ClientBody(body, _model_of(call.headers, body))
        named = named_by(caller.tenant, call.method, call.path)
        if named is not None:
            headers = proxied.to_engine(call.headers, (), with_key=self._passes_keys())
            workers: Sequence[WorkerSpec] = (await self._context.stored.worker_of(named, headers),)
        else:
            workers = self._workers(caller.tenant, read.model)
        for tries, spec in enumerate(workers, 1):
            try:
                await self._send(call, read, spec, caller)
                return
            except EngineFailed as error:
                error.worker_id = spec.worker_id
                again = error.rule.retried and error.unreachable  # else the engine may have begun with it
                if tries >= min(MAX_TRIES, len(workers)) or not again:
                    if error.detail:
                        self._engines.warnings.warning(spec.worker_id, "%s: %s", spec.worker_id, error)
                    raise error.error() from error

    def _workers(self, tenant: str, model: str) -> Sequence[WorkerSpec]:
        """Return the workers to try, in an order that spreads requests; who fails what others run comes last."""
        view = self._context.catalog.tenant(tenant)
        specs = view.serving(model).specs if model else tuple(view.specs.values())
        if not specs:
            missing = f"no worker serves {model!r}{or_known(model, view.models)}" if model else "there are no workers"
            raise NotFound(missing, field="model")
        able = random_workers(self._health, tenant, specs, specs)
        if not able:
            raise Unavailable(
                f"no worker of {model!r} that answers clients can be reached now", retry_after_seconds=1.0
            )
        return able

    async def _send(self, call: HttpCall, body: ClientBody, spec: WorkerSpec, caller: Caller) -> None:
        with_key = self._passes_keys()
        request_id = header(call.headers, "x-request-id") or f"pass-{uuid.uuid4().hex}"
        target = f"{call.path}?{call.query}" if call.query else call.path
        request = HttpRequest(
            f"{spec.http_endpoint}{target}",
            method=call.method,
            headers=proxied.to_engine(call.headers, (("X-Request-Id", request_id),), with_key=with_key),
            body=body.data,
        )
        liveness = self._observations.of(caller.tenant, WorkerRank(spec.worker_id, spec.dp_start_rank)).liveness
        engine = self._engines.call(
            spec.http_endpoint,
            uncached_tokens=0,
            liveness=liveness,
            whole_answer=body.whole_answer,
            clients_key=with_key,
        )
        answer: HttpAnswer | None = None
        passed = False
        try:
            answer = await engine.send(request)
            headers = proxied.to_client(answer.headers)
            if self._context.shows_decision(caller.identity):
                headers.append((proxied.WORKER_HEADER, proxied.as_value(spec.worker_id)))
            await call.start(answer.status, headers)
            async for chunk in engine.chunks(answer):
                passed = True
                await call.write(chunk)
            await call.end()
        except EngineFailed as error:
            if not passed:
                raise
            # The client sees what happened: its connection breaks off, too.
            log.warning("%s did not complete its response to %s: %s", spec.worker_id, call.path[:100], error)
        finally:
            engine.end()
            if answer is not None:
                answer.abort()


def _model_of(headers: Headers, body: bytes) -> str:
    """Return the model that an operator's request names; "" = it names none."""
    if len(body) > INLINE_BYTES or "json" not in header(headers, "content-type").lower():
        return ""
    try:
        model = JsonBody(body).get("model")
    except InvalidArgument:
        return ""  # it is the engine's to refuse
    return model if isinstance(model, str) else ""
