"""Ladders as the page shows them: rungs, losses, remedies, and what larger caches would hold. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.ladder import NAMES, RUNGS, remedy, verdict
from kvscout_common.enum_words import word_of
from kvscout_common.plain_text import printable
from kvscout_gateway.fronts.dashboard.numbers import finite

MAX_LADDERS: Final = 64
"""Maximum number per window; those with the most prompt tokens."""


def ladders_document(ladders: Sequence[gateway_pb2.Ladder]) -> list[dict[str, Any]]:
    """Return the ladders of a window, those of most prompt tokens first."""
    ranked = sorted(ladders, key=lambda one: -one.prompt_tokens)
    return [_ladder(one) for one in ranked[:MAX_LADDERS]]


def _ladder(ladder: gateway_pb2.Ladder) -> dict[str, Any]:
    losses = {word_of(gateway_pb2.LadderLossKind, one.kind): one for one in ladder.losses}
    return {
        "tenant": printable(ladder.tenant),
        "model": printable(ladder.model),
        "sessions": word_of(gateway_pb2.SessionClass, ladder.session_class) if ladder.session_class else "",
        "requests": ladder.requests,
        "prompt": ladder.prompt_tokens,
        "verdict": verdict(ladder).replace("\n", " "),
        "rungs": [
            {
                "name": name,
                "tokens": getattr(ladder, field),
                "losses": [
                    {
                        "name": NAMES[kind],
                        "tokens": losses[kind].tokens,
                        "seconds": finite(losses[kind].gpu_seconds),
                        "saved": finite(losses[kind].saved_seconds),
                        "remedy": remedy(ladder, kind),
                    }
                    for kind in kinds
                    if kind in losses and losses[kind].tokens
                ],
            }
            for name, field, kinds in RUNGS
        ],
        "unpredicted": ladder.unpredicted_tokens,
        "unreported": ladder.unreported_requests,
        "workers": ladder.workers,
        "blocks": ladder.capacity_blocks,
        # An unbounded cache holds all but what has another name.
        "unbounded": ladder.ideal_tokens - (losses["other name"].tokens if "other name" in losses else 0),
        "sizes": [[one.capacity_factor, ladder.capacity_tokens + one.tokens] for one in ladder.gains],
        "sample": ladder.sample_weight,
    }
