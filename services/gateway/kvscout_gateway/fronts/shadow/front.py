"""Passes requests on to the user's balancer, as they came, and has each generation scored beside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

from kvscout_common.errors import DeadlineExceeded, InternalError, InvalidArgument, KvscoutError, Unavailable
from kvscout_common.http.dialect import Usage
from kvscout_common.http.http import (
    Charge,
    Form,
    HttpAnswer,
    HttpCall,
    HttpFailed,
    HttpRequest,
    SinkStalled,
)
from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.answer import answer_read
from kvscout_gateway.engines.faults import EngineFailed, Fault
from kvscout_gateway.fronts import headers as proxied
from kvscout_gateway.fronts.access import Caller, header
from kvscout_gateway.fronts.body import model_of, parsed, with_usage
from kvscout_gateway.fronts.client_body import read_body
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.refusals import error_event
from kvscout_gateway.fronts.reserved import changes_of
from kvscout_gateway.fronts.shadow.config import ShadowConfig
from kvscout_gateway.fronts.shadow.report import ShadowReport
from kvscout_gateway.fronts.shadow.score import Score, ScoredRequest, Scores
from kvscout_gateway.request.failures import RequestSummary
from kvscout_gateway.values.dialects import API_DIALECTS

MAX_READ_BYTES: Final = 1024 * 1024
"""Bytes of an answer that comes as a whole: a longer one is passed on and not read for its usage."""


class ShadowFront:
    """Answers what the balancer is to answer."""

    def __init__(
        self,
        context: FrontContext,
        config: ShadowConfig,
        report: ShadowReport,
        *,
        passes_keys: Callable[[], bool],
    ) -> None:
        """Pass requests on.

        Args:
            context: Collaborators of the fronts.
            config: Address of the balancer.
            report: Compares its choices with the policy's.
            passes_keys: Returns whether clients' keys are the engines'.
        """
        self._context = context
        self._config = config
        self._passes_keys = passes_keys
        self.scores = Scores(context, report)

    async def answer(self, call: HttpCall, caller: Caller) -> None:
        """Answer one request.

        Raises:
            InvalidArgument: Its path is none, or its body cannot be read.
            Unavailable: The balancer does not answer.
            SinkGone: Its client has gone.
        """
        if not call.path.startswith("/"):
            # What stands there instead could name another host.
            raise InvalidArgument("must begin with /", field="path")
        with self._context.exchanges.admit(caller.tenant):
            await self._run(call, caller)

    async def _run(self, call: HttpCall, caller: Caller) -> None:
        charge = self._context.charge(caller.tenant)
        body = await call.body(charge)
        generation = await _generation_of(call, caller, body, charge)
        max_priority = caller.identity.max_priority
        if generation is None:
            if call.path in self._context.client_paths:
                body = (await read_body(call.headers, body, max_priority=max_priority, charge=charge)).data
            await _Passing(self._context, self._config, call).run(self._request(call, body))
            return
        form, own = with_usage(generation.body, generation.api)
        changes = {**changes_of(generation.body.fields, max_priority=max_priority), **own}
        score = self.scores.begin(generation)
        passing = _Passing(self._context, self._config, call, score, form)
        failed: BaseException | None = None
        try:
            await passing.run(self._request(call, generation.body.changed(changes)))
            failed = passing.failure
        except BaseException as error:
            failed = error
            raise
        finally:
            asked = RequestSummary(call.path, generation.tenant, generation.model, header(call.headers, "x-request-id"))
            self._context.exchanges.over(generation.tenant, generation.model, failed)
            self._context.exchanges.failure_log.over(asked, failed)
            passing.end(score, failed=failed is not None)

    def _request(self, call: HttpCall, body: bytes) -> HttpRequest:
        target = f"{call.path}?{call.query}" if call.query else call.path
        peer = call.peer.rpartition(":")[0].strip("[]")
        before = header(call.headers, "x-forwarded-for")
        # Balancers that go by the client's address find it here: the connection is ours.
        own = (
            ("X-Forwarded-For", f"{before}, {peer}" if before else peer),
            ("X-Forwarded-Host", header(call.headers, "x-forwarded-host") or header(call.headers, "host")),
            *self._context.exchanges.context.engines.own_headers(),
        )
        return HttpRequest(
            f"{self._config.balancer}{target}",
            method=call.method,
            headers=proxied.to_balancer(call.headers, own, with_key=self._passes_keys()),
            body=body,
        )


class _Passing:
    """One request on its way to the balancer and back."""

    def __init__(
        self,
        context: FrontContext,
        config: ShadowConfig,
        call: HttpCall,
        score: Score | None = None,
        form: Form = Form.BYTES,
    ) -> None:
        self._catalog = context.catalog
        attempts = context.exchanges.context
        self._engines, self._metrics, self._observations = attempts.engines, attempts.metrics, attempts.observations
        self._config = config
        self._call = call
        self._score = score
        """None = it is not scored: it is no generation."""
        self._form = form
        self._started = time.perf_counter()
        self._answer: HttpAnswer | None = None
        self._usage: Usage | None = None
        self._passed = False
        """The client has something of an answer."""
        self.failure: KvscoutError | None = None
        """Failure after that."""

    async def run(self, request: HttpRequest) -> None:
        """Pass it on, and its answer back.

        Raises:
            Unavailable: There is no answer.
            SinkGone: The client has gone.
        """
        try:
            answer = self._answer = await self._engines.client.send(
                request, connect_seconds=self._engines.timeouts.connect_seconds
            )
            await self._call.start(answer.status, proxied.from_balancer(answer.headers))
            if self._score is not None and _is_stream(answer):
                await self._relay(answer, self._score)
            else:
                await self._copy(answer)
            await self._call.end()
            if answer.status >= 500 or answer.status == 429:
                self.failure = Unavailable(f"the balancer answered with {answer.status}")
        except HttpFailed as error:
            detail = f"{self._config.balancer}: {error}"
            failed = EngineFailed("the balancer does not answer", detail=detail, fault=Fault.BALANCER)
            self._engines.warnings.warning("balancer", "%s (%s)", failed.message, failed)
            self.failure = failed.error()
            if not self._passed:
                raise self.failure from failed
            # Else the client sees what happened: its connection breaks off, too.
        except SinkStalled as error:
            self.failure = DeadlineExceeded(str(error))
            raise
        finally:
            if self._answer is not None:
                self._answer.abort()

    def end(self, score: Score, *, failed: bool) -> None:
        """Count a request that is over."""
        answered = self._answer is not None and 200 <= self._answer.status < 300
        tenant = score.generation.tenant
        worker_id = self._served_by(tenant)
        if self._usage is not None and answered:
            spec = self._catalog.tenant(tenant).specs.get(worker_id)
            rank = WorkerRank(worker_id, spec.dp_start_rank if spec is not None else 0)
            seen = self._observations.of(tenant, rank)
            seen.requests += 1
            seen.prompt_tokens += self._usage.prompt_tokens
            self._observations.reported(
                tenant,
                rank,
                isl_tokens=self._usage.prompt_tokens,
                cached=self._usage.cached_tokens,
                predicted=None,
            )
        score.end(failed=failed or not answered, usage=self._usage, served_by=worker_id)

    async def _relay(self, answer: HttpAnswer, score: Score) -> None:
        try:
            await answer.relay(
                self._call,
                self._form,
                score.generation.api.answer,
                on_first_output=lambda: self._first_output(score),
                write_seconds=self._engines.client_write_seconds,
            )
        finally:
            report = answer.report
            self._passed = bool(report.passed)
            self._usage = report.usage
            self._metrics.of(score.generation.tenant, score.generation.model).between_tokens(report)
        if report.error:
            self.failure = InternalError("an engine reported an error in its stream")
            if not report.passed:
                shape = score.generation.api.errors
                await self._call.write(error_event(json.loads(report.error), shape).lstrip())

    async def _copy(self, answer: HttpAnswer) -> None:
        kept = bytearray()
        async for chunk in answer.chunks():
            self._passed = True
            await self._call.write(chunk)
            if self._score is not None and len(kept) <= MAX_READ_BYTES:
                kept += chunk
        if self._score is not None and 200 <= answer.status < 300:
            self._first_output(self._score, whole_answer=True)
            if len(kept) <= MAX_READ_BYTES:
                self._usage = self._score.generation.api.answer.usage(await answer_read(bytes(kept)))

    def _first_output(self, score: Score, *, whole_answer: bool = False) -> None:
        seconds = time.perf_counter() - self._started
        self._metrics.of(score.generation.tenant, score.generation.model).first_token(seconds)
        score.first_output(whole_answer=whole_answer)

    def _served_by(self, tenant: str) -> str:
        """Return the worker that the balancer says has served; "" = it says nothing that is known here."""
        if self._answer is None:
            return ""
        # A balancer that tried several names them all, the last one served.
        named = header(self._answer.headers, self._config.served_by).rpartition(",")[2].strip()
        specs = self._catalog.tenant(tenant).specs
        if named in specs:
            return named
        found = (one.worker_id for one in specs.values() if named and named in _addresses(one.http_endpoint))
        return next(found, "")


async def _generation_of(call: HttpCall, caller: Caller, body: bytes, charge: Charge) -> ScoredRequest | None:
    """Return what is to be scored; None = nothing of this is: it is passed on all the same."""
    api = API_DIALECTS.get(call.path)
    if call.method != "POST" or api is None:
        return None
    try:
        read = await parsed(body, charge)
        return ScoredRequest(api, read, caller.tenant, model_of(read.fields), call.headers, caller.identity)
    except InvalidArgument:
        return None


def _addresses(url: str) -> Iterator[str]:
    if url:
        yield url
        yield urlsplit(url).netloc


def _is_stream(answer: HttpAnswer) -> bool:
    return header(answer.headers, "content-type").lower().startswith("text/event-stream")
