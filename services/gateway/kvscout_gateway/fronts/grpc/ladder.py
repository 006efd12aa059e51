"""Ladders as messages, for GetLadder."""

from __future__ import annotations

from collections.abc import Iterable

from kvscout.v1 import gateway_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_gateway.ladder.counts import Counts, rungs_of
from kvscout_gateway.ladder.ladders import MAX_WINDOW_SECONDS, Ladders
from kvscout_gateway.ladder.metrics import WINDOW_SECONDS
from kvscout_gateway.members.catalog import Catalog


def get_ladder(
    ladders: Ladders | None, catalog: Catalog, request: gateway_pb2.GetLadderRequest, *, tenant: str
) -> gateway_pb2.GetLadderResponse:
    """Return the ladders that a request asks for.

    Args:
        ladders: The counts; None = it is switched off.
        catalog: The workers.
        request: Which.
        tenant: Whose; "*" = all.

    Raises:
        FailedPrecondition: It is switched off.
        InvalidArgument: The window is too long.
    """
    if ladders is None:
        raise FailedPrecondition("the gateway runs with --no-ladder")
    window = request.window_seconds or WINDOW_SECONDS
    if window > MAX_WINDOW_SECONDS:
        raise InvalidArgument(f"must be at most {MAX_WINDOW_SECONDS}", field="window_seconds")
    found = ladders.counts(tenant, request.model, window)
    answer = gateway_pb2.GetLadderResponse(window_seconds=window)
    for owner, model in sorted({(key.tenant, key.model) for key in found}):
        parts = {key.session_class: counts for key, counts in found.items() if key[:2] == (owner, model)}
        serving = catalog.tenant(owner).serving(model)
        common = gateway_pb2.Ladder(
            tenant=owner,
            model=model,
            seconds_per_token=ladders.seconds_per_token(owner, model),
            sample_weight=ladders.weight(owner, model),
            workers=sum(caches.workers for caches in serving.caches.values()),
            capacity_blocks=sum(caches.blocks for caches in serving.caches.values())
            if all(caches.blocks for caches in serving.caches.values())
            else 0,
        )
        for name, counts in (("", _sum(parts.values())), *sorted(parts.items())):
            made = answer.ladders.add()
            made.CopyFrom(common)
            made.session_class = value_of(gateway_pb2.SessionClass, name)
            _fill(made, counts)
    return answer


def _sum(parts: Iterable[Counts]) -> Counts:
    total = Counts()
    for part in parts:
        total.add(part)
    return total


def _fill(message: gateway_pb2.Ladder, counts: Counts) -> None:
    rungs = rungs_of(counts)
    message.requests, message.prompt_tokens = rungs.requests, rungs.prompt
    message.ideal_tokens, message.capacity_tokens = rungs.ideal, rungs.capacity
    message.routing_tokens, message.predicted_tokens = rungs.routing, rungs.predicted
    message.actual_tokens, message.unpredicted_tokens = rungs.actual, rungs.unpredicted
    message.unreported_requests, message.sampled_blocks = rungs.unreported, counts.sampled
    message.foreign_tokens = counts.kinds[-1]
    for loss, tokens in rungs.losses.items():
        message.losses.add(
            kind=value_of(gateway_pb2.LadderLossKind, loss),
            tokens=tokens,
            gpu_seconds=tokens * message.seconds_per_token,
        )
    for larger, tokens in rungs.gains.items():
        message.gains.add(capacity_factor=larger, tokens=tokens)
