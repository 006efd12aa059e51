"""Every path that needs no placement by its prompt: to any healthy worker of its model, as it came, and back."""

from __future__ import annotations

import logging
import random
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvscout_common.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable
from kvscout_common.transport.http import FailureKind, HttpAnswer, HttpCall, HttpFailed, HttpRequest
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.failure import EngineFailed, Fault
from kvscout_gateway.front.openai import proxied
from kvscout_gateway.front.openai.access import Caller, header
from kvscout_gateway.front.openai.body import JsonBody

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

log = logging.getLogger("kvscout.gateway")

PATHS: Final = re.compile(
    r"/(?:v[0-9]{1,2}(?:/[A-Za-z0-9_.-]+)+|tokenize|detokenize|pooling|classify|score|rerank|invocations|generate)"
)
"""What clients may reach on an engine. The rest of its paths are its operators': to sleep, to load adapters, to forget
its cache, to end. Nothing is unescaped here, so nothing else can be meant."""
_OPERATORS: Final = re.compile(r"\.\.|/(?:un)?load_lora_adapter")
_PART_WITH_MODEL: Final = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
MAX_TRIES: Final = 2


class Passthrough:
    """Passes requests on."""

    def __init__(self, gateway: Gateway, *, passes_keys: Callable[[], bool]) -> None:
        """Passes requests on.

        Args:
            gateway: Whose workers.
            passes_keys: Whether clients' keys are the engines'.
        """
        self._gateway = gateway
        self._passes_keys = passes_keys

    async def run(self, call: HttpCall, caller: Caller, body: bytes) -> None:
        """Answers one request.

        Raises:
            PermissionDenied: The path is for operators, or for nobody.
            NotFound: No worker has the model.
            Unavailable: No worker answers.
            SinkGone: Its client has gone.
        """
        if not caller.is_admin and (not PATHS.fullmatch(call.path) or _OPERATORS.search(call.path)):
            raise PermissionDenied(f"{call.path[:200]} is for operators: it needs an API key of the role admin")
        workers = self._workers(caller.tenant, _model_of(call, body))
        for tries, spec in enumerate(workers, 1):
            try:
                await self._send(call, body, spec, caller.tenant)
                return
            except EngineFailed as error:
                if tries >= min(MAX_TRIES, len(workers)) or not _never_arrived(error):
                    raise Unavailable(error.message, retry_after_seconds=error.retry_after_seconds) from error

    def _workers(self, tenant: str, model: str) -> Sequence[WorkerSpec]:
        """Who may be asked, in an order that spreads requests; who fails what others run comes last."""
        view = self._gateway.catalog.tenant(tenant)
        specs = view.serving(view.resolve(model, "").model).specs if model else tuple(view.specs.values())
        if not specs:
            raise NotFound(f"no worker serves {model!r}" if model else "there are no workers", field="model")
        able = [spec for spec in specs if spec.http_endpoint and not spec.draining]
        if not able:
            raise Unavailable(f"no worker of {model!r} can be reached over HTTP now", retry_after_seconds=1.0)
        return self._gateway.health.well_first(tenant, random.sample(able, len(able)), specs)

    async def _send(self, call: HttpCall, body: bytes, spec: WorkerSpec, tenant: str) -> None:
        gateway = self._gateway
        request_id = header(call.headers, "x-request-id") or f"pass-{uuid.uuid4().hex}"
        target = f"{call.path}?{call.query}" if call.query else call.path
        request = HttpRequest(
            f"{spec.http_endpoint}{target}",
            method=call.method,
            headers=proxied.to_engine(call.headers, (("X-Request-Id", request_id),), with_key=self._passes_keys()),
            body=body,
        )
        pulse = gateway.observations.of(tenant, WorkerRank(spec.worker_id, spec.dp_start_rank)).pulse
        engine = gateway.engines.call(spec.http_endpoint, uncached_tokens=0, pulse=pulse, at_once=True)
        answer: HttpAnswer | None = None
        passed = False
        try:
            answer = await engine.send(request)
            await call.start(answer.status, proxied.to_client(answer.headers))
            async for piece in answer.chunks():
                passed = True
                await call.write(piece)
            await call.end()
        except HttpFailed as error:
            if not passed:
                raise EngineFailed(f"{spec.http_endpoint}: {error}") from error
            # The client sees what happened: its connection breaks off, too.
            log.debug("%s broke off its answer to %s: %s", spec.http_endpoint, call.path, error)
        finally:
            engine.end()
            if answer is not None:
                answer.abort()


def _never_arrived(error: EngineFailed) -> bool:
    """Whether the engine cannot have begun with the request: there was no connection."""
    cause = error.__cause__
    return error.fault is Fault.WORKER and isinstance(cause, HttpFailed) and cause.kind is FailureKind.UNREACHABLE


def _model_of(call: HttpCall, body: bytes) -> str:
    """The model that a request names; "" = it names none."""
    if not body:
        return ""
    kind = header(call.headers, "content-type").lower()
    if kind.startswith("multipart/"):
        found = _PART_WITH_MODEL.search(body)
        return found[1].decode(errors="replace") if found else ""
    if kind and "json" not in kind:
        return ""
    model = JsonBody(body).get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidArgument("must be the name of a model", field="model")
    return model or ""
