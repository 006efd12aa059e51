"""Prefill on one worker, decode on another: the order of things, whatever the engines' handshake is.

::

    undivided? ── the API hands nothing over, or the worker is given ──▶ a worker that can compute prompts, or a refusal
        │
    conditional? ── short or mostly cached on a decode worker that can compute it ──▶ that worker alone
        │
    book decode: on load alone, no prefill charged     all busy ─▶ refused, no prefill has run
        │
    book prefill: on overlap, no decode blocks         failed ─▶ once more, on another prefill worker
        │                                                 └ no use ─▶ a decode worker that can compute prompts: booked
    handover ── send prefill, free it, send decode                    anew, on overlap, prefill charged
        │                                                        └ none ─▶ an aggregated worker, or UNAVAILABLE
    decode streams

What passes between the attempts is the `Handover`'s: `vllm_handover`, `sglang_handover`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from kvscout.v1 import types_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound, ResourceExhausted, Unavailable
from kvscout_common.worker import REVISION, EngineKind, Role, WorkerSpec
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.request.attempt import Attempt, Reply
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.plan import Handover, PrefillFailed
from kvscout_gateway.values.output import ONE_TOKEN
from kvscout_gateway.values.request import Request

if TYPE_CHECKING:
    from kvscout_gateway.request.exchange import Exchange

TRANSFER_DOMAIN = "kv_transfer_domain"
"""The label of workers between which blocks travel fast: prefill is preferred in the domain of the decode worker."""
LOCAL_TOKENS = 2048
LOCAL_SHARE = 0.7
"""A prompt of which fewer tokens, and a smaller share, are not cached on the decode worker is not worth a transfer."""

_ON_LOAD_ALONE = types_pb2.RouterConfigOverride(overlap_score_weight=0.0)
_NO_ONE: tuple[type[KvscoutError], ...] = (Unavailable, ResourceExhausted, NotFound, FailedPrecondition)
"""Errors by which no worker of a role did its part; any other is the client's or the gateway's."""


Use: TypeAlias = Callable[[Attempt], Awaitable[None]]


class Path(StrEnum):
    """Path of a request of a model with prefill and decode workers."""

    REMOTE = "remote"
    """Prefill on one worker, decode on another."""
    LOCAL = "local"
    """On a decode worker alone, because the transfer was not worth it."""
    FALLBACK_DECODE = "fallback_decode"
    """On a decode worker alone, because no prefill worker did its part."""
    FALLBACK_AGGREGATED = "fallback_aggregated"
    """On an aggregated worker, because no prefill worker did its part."""
    UNDIVIDED = "undivided"
    """On one worker that does both, because the request cannot be divided."""
    REFUSED = "refused"
    """Nowhere: no decode worker takes it, no prefill worker did its part and no other worker can, or the request cannot
    be divided and no worker does both."""


def computes_here(isl_tokens: int, overlap_tokens: int) -> bool:
    """Tell whether a decode worker had better compute a prompt itself than have it transferred.

    Args:
        isl_tokens: Prompt length.
        overlap_tokens: Of it, those cached on the decode worker.
    """
    missing = isl_tokens - overlap_tokens
    return missing < LOCAL_TOKENS and missing < LOCAL_SHARE * isl_tokens


class Disaggregated:
    """See `Plan`."""

    def __init__(
        self,
        catalog: Catalog,
        metrics: GatewayMetrics,
        handovers: Callable[[WorkerSpec | None], Handover],
        *,
        conditional: bool,
    ) -> None:
        """Run requests of models with prefill and decode workers.

        Args:
            catalog: The registered workers.
            metrics: Counts the paths that requests took.
            handovers: What suits a decode worker; None: one that this gateway does not know yet.
            conditional: Whether prompts that a decode worker has nearly all of stay there.
        """
        self._catalog = catalog
        self._metrics = metrics
        self._handovers = handovers
        self._conditional = conditional

    async def run(self, exchange: Exchange, reply: Reply) -> None:
        """See `Plan`."""
        try:
            path = await self._run(exchange, reply)
        except (Unavailable, ResourceExhausted, FailedPrecondition):
            self._metrics.disaggregation.labels(Path.REFUSED).inc()
            raise
        self._metrics.disaggregation.labels(path).inc()

    async def place(self, exchange: Exchange) -> tuple[Attempt, Attempt | None]:
        """See `Plan`."""
        try:
            path, attempt, prefill = await self._place(exchange)
        except (Unavailable, ResourceExhausted, FailedPrecondition):
            self._metrics.disaggregation.labels(Path.REFUSED).inc()
            raise
        self._metrics.disaggregation.labels(path).inc()
        return attempt, prefill

    async def _place(self, exchange: Exchange) -> tuple[Path, Attempt, Attempt | None]:
        if (reason := self._undivided(exchange.request)) is not None:
            for _, request in self._others(exchange.request):
                try:
                    return Path.UNDIVIDED, await exchange.place(request), None
                except _NO_ONE as error:
                    reason = error
            raise reason
        if await self._stays(exchange):
            return Path.LOCAL, await exchange.place(self._alone(exchange.request)), None
        try:
            decode = await exchange.place(self._decode_request(exchange.request))
        except Unavailable as error:  # all busy is another error, and stays one
            return await self._place_instead(exchange, error, among=(Path.FALLBACK_AGGREGATED,))
        try:
            return Path.REMOTE, decode, await exchange.place(self._prefill_request(exchange.request, decode))
        except _NO_ONE as error:
            decode.free()
            refused = Unavailable(f"no prefill worker takes it: {error}", retry_after_seconds=1.0)
            refused.__cause__ = error
            return await self._place_instead(exchange, refused)

    async def _place_instead(
        self, exchange: Exchange, error: KvscoutError, *, among: tuple[Path, ...] = tuple(Path)
    ) -> tuple[Path, Attempt, Attempt | None]:
        """Book one worker for all of it; raise the error if there is none."""
        for path, request in self._others(exchange.request):
            if path in among:
                with suppress(*_NO_ONE):
                    return path, await exchange.place(request), None
        raise error

    async def _run(self, exchange: Exchange, reply: Reply) -> Path:
        async def alone(attempt: Attempt) -> None:
            await reply.placed(attempt.decision)
            await attempt.relay(await attempt.send(), reply)

        if (reason := self._undivided(exchange.request)) is not None:
            if not self._others(exchange.request):
                raise reason
            await self._instead(exchange, alone, reason)
            return Path.UNDIVIDED
        if await self._stays(exchange):
            await exchange.run_attempts(self._alone(exchange.request), alone)
            return Path.LOCAL
        if not self._prefillers(exchange.request):
            return await self._instead(exchange, alone, Unavailable("no prefill worker", retry_after_seconds=1.0))
        decoding: list[Attempt] = []

        async def decode(attempt: Attempt) -> None:
            decoding.append(attempt)
            handover = self._handovers(attempt.decision.spec)
            await handover.run(exchange, self._prefill_request(exchange.request, attempt), attempt, reply)

        try:
            await exchange.run_attempts(self._decode_request(exchange.request), decode)
            return Path.REMOTE
        except PrefillFailed as failed:
            return await self._instead(exchange, alone, failed.error)
        except Unavailable as error:  # no decode worker did its part; all busy is another error, and stays one
            return await self._instead(exchange, alone, error, among=(Path.FALLBACK_AGGREGATED,))

    async def _instead(
        self, exchange: Exchange, alone: Use, error: KvscoutError, *, among: tuple[Path, ...] = tuple(Path)
    ) -> Path:
        """Have one worker do all of it; raise the error if there is none."""
        for path, request in self._others(exchange.request):
            if path in among:
                try:
                    await exchange.run_attempts(request, alone)
                    return path
                except _NO_ONE as worse:
                    error = worse
        if isinstance(error, (Unavailable, ResourceExhausted)):
            raise error
        raise Unavailable(str(error), retry_after_seconds=1.0) from error.__cause__

    def _undivided(self, request: Request) -> KvscoutError | None:
        """Return why a request cannot be divided, as the error if no worker can do all of it; None = it can."""
        reason = request.undivided
        if not reason:
            kinds = {spec.engine for spec in self._catalog.serving(request).specs if spec.role is Role.DECODE}
            unable = sorted(kinds & request.api.no_handover)
            if not unable:
                return None
            reason = f"{request.api.path} of {unable[0]} takes over no prompt from a prefill worker"
        return FailedPrecondition(
            f"{reason}: it takes an aggregated worker, or a decode worker with can_fallback, and there is none"
        )

    async def _stays(self, exchange: Exchange) -> bool:
        """Tell whether a decode worker had better compute the prompt itself; if all are busy, booking one shows it."""
        request = exchange.request
        if not self._conditional or request.prompt.unknown or not self._able(request):
            return False
        try:
            probed = await exchange.probe(self._alone(request))
        except _NO_ONE:
            return False
        return computes_here(request.prompt.isl_tokens, probed.overlap_blocks * probed.block_size)

    def _alone(self, request: Request) -> Request:
        """Decode workers that can compute prompts, with the prompt charged to them."""
        return replace(request, role=Role.DECODE, allowed=self._able(request))

    def _others(self, request: Request) -> list[tuple[Path, Request]]:
        """Return who else can serve a request that no prefill worker did its part for."""
        others = [(Path.FALLBACK_DECODE, self._alone(request))] if self._able(request) else []
        if not request.pinned and any(spec.role is Role.AGGREGATED for spec in self._catalog.serving(request).specs):
            others.append((Path.FALLBACK_AGGREGATED, replace(request, role=Role.AGGREGATED)))
        return others

    def _able(self, request: Request) -> tuple[str, ...]:
        return tuple(
            spec.worker_id
            for spec in self._catalog.serving(request).specs
            if spec.role is Role.DECODE
            and spec.can_fallback
            and request.pinned in ("", spec.worker_id)
            and (not request.allowed or spec.worker_id in request.allowed)
        )

    def _decode_request(self, request: Request) -> Request:
        """Return the request for the decode worker: its cache is of no use, and the prompt costs it nothing.

        Workers whose revision has no prefill worker are left out, unless all are.
        """
        override = types_pb2.RouterConfigOverride()
        if request.override is not None:
            override.CopyFrom(request.override)
        override.MergeFrom(_ON_LOAD_ALONE)
        revisions = {_revision(spec) for spec in self._prefillers(request) if not spec.draining}
        decoders = [spec for spec in self._catalog.serving(request).specs if spec.role is Role.DECODE]
        unpaired = [spec.worker_id for spec in decoders if _revision(spec) not in revisions]
        excluded = (*request.excluded, *unpaired) if len(unpaired) < len(decoders) else request.excluded
        return replace(request, role=Role.DECODE, remote_prefill=True, override=override, excluded=excluded)

    def _prefill_request(self, request: Request, decode: Attempt) -> Request:
        """Return the request for the prefill worker: one of the decode worker's revision whose engine can hand over to
        its engine, in its transfer domain if there is one. An allow-list that names no prefill worker is about the
        worker that answers."""
        spec, workers = decode.decision.spec, self._prefillers(request)
        strangers = [other.worker_id for other in workers if not _can_hand_over(other, spec)]
        domain = spec.labels.get(TRANSFER_DOMAIN) if spec is not None else None
        near = [other.worker_id for other in workers if domain and other.labels.get(TRANSFER_DOMAIN) == domain]
        allowed = tuple(other.worker_id for other in workers if other.worker_id in request.allowed)
        return replace(
            request,
            role=Role.PREFILL,
            pinned="",
            pinned_rank=None,
            allowed=allowed,
            excluded=(*request.excluded, *strangers),
            preferred=tuple(near),
            output=ONE_TOKEN._replace(unseen=request.unreported),
        )

    def _prefillers(self, request: Request) -> list[WorkerSpec]:
        return [spec for spec in self._catalog.serving(request).specs if spec.role is Role.PREFILL]


def _can_hand_over(one: WorkerSpec, other: WorkerSpec | None) -> bool:
    if other is None:
        return True
    return (one.engine is EngineKind.SGLANG) == (other.engine is EngineKind.SGLANG) and _revision(one) == _revision(
        other
    )


def _revision(spec: WorkerSpec) -> str:
    return spec.labels.get(REVISION, "")
