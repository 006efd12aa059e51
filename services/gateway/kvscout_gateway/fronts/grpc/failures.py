"""Failures as messages, for ListFailures and GetStatus."""

from __future__ import annotations

from typing import Final

from kvscout.v1 import gateway_pb2
from kvscout_common.enum_words import value_of, word_of
from kvscout_common.rpc.pages import page_token, read_page_token
from kvscout_gateway.engines.causes import OWNERS, Owner
from kvscout_gateway.request.failures import Failure, FailureFilter, FailureLog

PAGE: Final = 1_000
MAX_PAGE: Final = 10_000


def list_failures(
    log: FailureLog, request: gateway_pb2.ListFailuresRequest, *, tenant: str, in_full: bool
) -> gateway_pb2.ListFailuresResponse:
    """Return the failures that a request asks for.

    Args:
        log: Those that are remembered.
        request: Which.
        tenant: Whose; "*" = all.
        in_full: With addresses.

    Raises:
        InvalidArgument: The page token is none.
    """
    place = read_page_token(request.page_token, int)
    owner = word_of(gateway_pb2.FaultOwner, request.owner)
    wanted = FailureFilter(
        tenant,
        request.model,
        request.worker_id,
        request.cause,
        Owner(owner) if owner else None,
        None if request.answered else False,
        request.after_number,
    )
    limit = min(request.page_size or PAGE, MAX_PAGE)
    page, total = log.listed(wanted, limit + 1, before=place[0] if place is not None else None)
    shown = page[:limit]
    return gateway_pb2.ListFailuresResponse(
        failures=[failure_to_proto(one, in_full=in_full) for one in shown],
        total=total,
        next_page_token=page_token(shown[-1].number) if len(page) > limit else "",
    )


def failure_to_proto(one: Failure, *, in_full: bool) -> gateway_pb2.Failure:
    """Return one failure."""
    return gateway_pb2.Failure(
        number=one.number,
        at_unix_seconds=one.at,
        request_id=one.asked.request_id,
        tenant=one.asked.tenant,
        model=one.asked.model,
        front=one.asked.front,
        status=one.status,
        cause=one.kind.cause,
        owner=value_of(gateway_pb2.FaultOwner, one.owner),
        answered=one.kind.answered,
        worker_ids=one.worker_ids,
        message=one.detail if in_full else one.message,
        trace_id=one.trace_id,
    )


def failure_counts(log: FailureLog, *, in_full: bool) -> list[gateway_pb2.FailureCount]:
    """Return how many there were, by cause.

    Args:
        log: Counts them.
        in_full: With what happened the last time.
    """
    recent = log.counts.recent()
    return [
        gateway_pb2.FailureCount(
            cause=kind.cause,
            owner=value_of(gateway_pb2.FaultOwner, OWNERS[kind.cause]),
            answered=kind.answered,
            total=total,
            recent=recent[kind],
            last_message=log.last_messages.get(kind, "") if in_full else "",
        )
        for kind, total in sorted(log.counts.total.items())
    ]
