"""Ladders as messages, for GetLadder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvscout.v1 import gateway_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_gateway.ladder.counts import Counts, Loss, rungs_of
from kvscout_gateway.ladder.ladders import MAX_WINDOW_SECONDS, WINDOW_SECONDS, Ladders

if TYPE_CHECKING:
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
    return gateway_pb2.GetLadderResponse(
        ladders=ladders_of(ladders, catalog, tenant, request.model, window, by_class=True), window_seconds=window
    )


def ladders_of(
    ladders: Ladders | None,
    catalog: Catalog,
    tenant: str,
    model: str,
    window_seconds: int = WINDOW_SECONDS,
    *,
    by_class: bool = False,
) -> list[gateway_pb2.Ladder]:
    """Return the ladder of each model.

    Args:
        ladders: The counts; None = it is switched off, and there are none.
        catalog: The workers.
        tenant: Whose; "*" = all.
        model: "" = all.
        window_seconds: Of the requests.
        by_class: Also those of each session class.
    """
    found = ladders.counts(tenant, model, window_seconds) if ladders is not None else {}
    made: list[gateway_pb2.Ladder] = []
    for owner, name in sorted({(key.tenant, key.model) for key in found}):
        assert ladders is not None
        parts = {key.session_class: counts for key, counts in found.items() if key[:2] == (owner, name)}
        caches = catalog.tenant(owner).serving(name).caches.values()
        for session_class, counts in (("", _sum(parts.values())), *(sorted(parts.items()) if by_class else ())):
            ladder = gateway_pb2.Ladder(
                tenant=owner,
                model=name,
                session_class=value_of(gateway_pb2.SessionClass, session_class),
                seconds_per_token=ladders.seconds_per_token(owner, name),
                sample_weight=ladders.weight(owner, name),
                workers=sum(one.workers for one in caches),
                capacity_blocks=sum(one.blocks for one in caches) if all(one.blocks for one in caches) else 0,
            )
            _fill(ladder, counts)
            made.append(ladder)
    return made


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
            saved_seconds=rungs.saved_seconds if loss is Loss.MOVED else 0.0,
        )
    for larger, tokens in rungs.gains.items():
        message.gains.add(capacity_factor=larger, tokens=tokens)
