"""The largest loss of a ladder, in one sentence. Pure."""

from __future__ import annotations

from typing import Final

from kvscout.v1 import gateway_pb2
from kvscout_common.enum_words import word_of

NAMES: Final = {
    "never seen": "never seen before",
    "other name": "same tokens, another salt or adapter",
    "capacity": "expired: all caches together are too small",
    "split": "split over workers, none holds it",
    "not reported": "recent, but no event reports it",
    "moved": "moved away from its holder",
    "not placed": "not placed by the policy",
    "other tokens": "the engine's tokens are others than the gateway's",
    "not there": "predicted, but not there",
}
"""By the words of `LadderLossKind`; a waterfall has at most 80 columns."""
_REMEDIES: Final = {
    "never seen": "nothing that a router could change: prompts are new",
    "other name": "give requests that may share a cache the same salt and adapter",
    "split": "fewer, larger workers, or session affinity",
    "not reported": "see whether KV events come: kvscout doctor",
    "moved": "a higher --kv-overlap-score-weight, or the policy kv-time",
    "not placed": "a tokenizer (--tokenizer), no pins or affinity, no other balancer",
    "other tokens": "the engine's own tokenizer: kvscout doctor says what differs",
    "not there": "see whether KV events are lost or late: kvscout doctor",
}
RUNGS: Final = (
    ("ideal", "ideal_tokens", ("never seen",)),
    ("capacity", "capacity_tokens", ("other name", "capacity")),
    ("perfect routing", "routing_tokens", ("split", "not reported")),
    ("predicted", "predicted_tokens", ("moved", "not placed", "other tokens")),
    ("actual", "actual_tokens", ("not there",)),
)
"""From the top: name, field of the message, and the losses above it."""
WORTH: Final = 0.6
"""Part of the tokens lost to capacity for which a larger cache is named."""


def share(tokens: int, ladder: gateway_pb2.Ladder) -> float:
    """Return tokens as a percentage of the prompt tokens."""
    return 100 * tokens / ladder.prompt_tokens if ladder.prompt_tokens else 0.0


def verdict(ladder: gateway_pb2.Ladder) -> str:
    """Return the largest loss that somebody can do something about, and what."""
    losses = {word_of(gateway_pb2.LadderLossKind, one.kind): one.tokens for one in ladder.losses}
    curable = {name: tokens for name, tokens in losses.items() if name in NAMES and name != "never seen"}
    name = max(curable, key=lambda one: curable[one], default="")
    if not curable.get(name):
        name = "never seen"
        if not losses.get(name):
            return "Nothing is lost."
    points = share(losses[name], ladder)
    return f"{points:.{int(points < 1)}f} points: {NAMES[name]}.\n{remedy(ladder, name)}"


def remedy(ladder: gateway_pb2.Ladder, name: str) -> str:
    """Return what helps against a loss, as a sentence."""
    if name == "capacity":
        text = _larger(ladder)
    elif name == "moved" and (saved := sum(one.saved_seconds for one in ladder.losses)):
        text = f"moves saved {saved:.1f} s of waiting; --kv-overlap-score-weight makes fewer"
    else:
        text = _REMEDIES[name]
    return f"{text[:1].upper()}{text[1:]}."


def _larger(ladder: gateway_pb2.Ladder) -> str:
    """Return the smallest of the larger caches that would hold most of what is lost."""
    lost = sum(one.tokens for one in ladder.losses if one.kind == gateway_pb2.LADDER_LOSS_KIND_CAPACITY)
    worth = (gain for gain in ladder.gains if gain.tokens >= WORTH * lost)
    best = next(worth, None)
    if best is None:
        return "no cache of up to four times the size would hold most of it"
    more = best.capacity_factor - 1
    workers = max(1, round(more * ladder.workers))
    points = share(best.tokens, ladder)
    return f"{workers} more worker{'s' * (workers > 1)} or {100 * more:.0f} % more KV would bring {points:.0f}"
