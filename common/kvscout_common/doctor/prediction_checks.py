"""Checks of predictions: what is predicted of caches against what engines report. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout.v1 import gateway_pb2, indexer_pb2
from kvscout_common.doctor.conditions import (
    CACHED_TOKENS_UNTOLD,
    HASHES_NEVER_MATCH,
    HIT_RATE_LOW,
    PREDICTIONS_WRONG,
    TOKENS_DIFFER,
)
from kvscout_common.doctor.ladder import share, verdict
from kvscout_common.doctor.overview import seen_by_gateways
from kvscout_common.doctor.snapshot import RankName, Snapshot, source_name
from kvscout_common.doctor.symptom import Symptom

FEW = 3
"""Requests that say nothing, or do not match, before it is no accident."""
ENOUGH = 20
"""Requests from which a share is taken."""
LOW = 0.5
"""Part of the tokens that could be cached."""
MANY_POINTS = 10.0
"""Lost of all prompt tokens, though they could be cached."""
MUCH = 0.25
"""Prediction error that is worth a look."""


def check_predictions(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every model's tokens, and every worker rank's cached tokens."""
    for gateway, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for one in status.token_differences:
            yield Symptom(
                TOKENS_DIFFER, f"model {one.model!r} at {gateway.name}: {one.difference}", (f"model {one.model!r}",)
            )
        for ladder in status.ladders:
            lost = share(ladder.ideal_tokens - ladder.actual_tokens, ladder)
            if ladder.requests >= ENOUGH and lost >= MANY_POINTS and ladder.actual_tokens < LOW * ladder.ideal_tokens:
                sentence = verdict(ladder).replace("\n", " ")
                yield Symptom(
                    HIT_RATE_LOW,
                    f"model {ladder.model!r} at {gateway.name}: {share(ladder.actual_tokens, ladder):.0f} % of "
                    f"prompt tokens are cached, {share(ladder.ideal_tokens, ladder):.0f} % could be; {sentence}",
                    (f"model {ladder.model!r}",),
                )
    received = _received(snapshot)
    for name, seen in seen_by_gateways(snapshot).items():
        if seen.unreported >= FEW:
            yield Symptom(
                CACHED_TOKENS_UNTOLD,
                f"worker {name}: {seen.unreported:,} prompts should have been found cached, and no usage said so",
            )
        if name not in received:
            continue  # reported with its events
        error = seen.prediction_error
        if seen.mispredicted >= FEW and seen.cached_tokens and not seen.predicted_tokens:
            yield Symptom(
                HASHES_NEVER_MATCH,
                f"worker {name} had {seen.cached_tokens:,} tokens of {seen.checked:,} prompts cached, and none was "
                "predicted",
            )
        elif error is not None and seen.checked >= ENOUGH and error > MUCH:
            yield Symptom(
                PREDICTIONS_WRONG,
                f"worker {name}: {seen.mispredicted:,} of {seen.checked:,} predictions were wrong; "
                f"{seen.predicted_tokens:,} cached tokens were predicted, {seen.cached_tokens:,} reported",
            )


def _received(snapshot: Snapshot) -> set[RankName]:
    """Worker ranks whose events come, wherever they are read."""
    live: set[RankName] = set()
    troubled: set[RankName] = set()
    for _, status in snapshot.statuses(indexer_pb2.IndexerGetStatusResponse):
        for source in status.sources:
            if source.state == indexer_pb2.SOURCE_STATE_LIVE:
                live.add(source_name(source))
            elif source.state != indexer_pb2.SOURCE_STATE_NONE:
                troubled.add(source_name(source))
    return live - troubled
