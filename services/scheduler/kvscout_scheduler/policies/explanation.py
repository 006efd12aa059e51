"""Why a worker was chosen: all candidates with their costs, and one sentence that a person would say.

It is made when somebody looks: a request with `explain`, or a watcher of decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscout_common.worker import Role
from kvscout_scheduler.costs.words import cost_in_words, milliseconds
from kvscout_scheduler.policies.policy import Candidates
from kvscout_scheduler.policies.registry import CheckedPolicy
from kvscout_scheduler.values.decision import Candidate, Explanation

if TYPE_CHECKING:
    from kvscout_scheduler.load.pool import Pool

MAX_SUMMARY: Final = 1_000
"""Characters of the sentence; a longer one is cut."""
MAX_NAMED: Final = 2
"""Workers that could not take the request and are named; of others, their number."""
_WHY_NOT: Final[dict[str, str]] = {
    "not allowed": "is not allowed by the request",
    "not pinned": "is not the pinned one",
    "excluded": "is excluded by the request",
    "labels": "lacks a required label",
    "adapter": "has not loaded the adapter",
    "draining": "is draining",
    "cooling down": "failed a short while ago",
    "busy": "is busy",
    "no room": "has no room",
    "revision": "is of another revision",
    "over target": "would miss the target",
}


class _Row(NamedTuple):
    """What the sentence says of one worker."""

    name: str
    why_not: str
    """Reason why it could not be chosen; "" = it could."""
    cached_tokens: int
    prefill_tokens: int
    """Prefill tokens of other requests booked there."""
    cost: float


def explain(
    pool: Pool,
    name: str,
    policy: CheckedPolicy,
    *,
    candidates: Candidates,
    costs: Sequence[float],
    index: int,
    dropped: dict[int, str],
    notes: Sequence[str] = (),
) -> Explanation:
    """Return why the policy picked a candidate, beside all that it did not.

    Args:
        pool: Where they come from; as it was when the policy picked.
        name: Of the policy.
        policy: The policy.
        candidates: The eligible ones.
        costs: What the policy said of them.
        index: The one it picked.
        dropped: Why each other worker of the pool was not eligible, by slot.
        notes: What else decided, such as the targets.
    """
    settings = candidates.settings
    everyone = candidates.of(pool.everyone)
    # A policy may compare candidates with each other: the eligible ones are shown as they were compared.
    shown = dict(zip(everyone.slots, policy.costs(everyone), strict=True))
    shown.update(zip(candidates.slots, costs, strict=True))
    drawn = dict(zip(candidates.slots, policy.probabilities(candidates, costs), strict=True))
    cached = dict(zip(everyone.slots, map(int, everyone.cached_tokens), strict=True))
    ahead = dict(zip(everyone.slots, everyone.active_prefill_tokens, strict=True))
    rows = {
        slot: _Row(
            _name(pool, slot),
            _WHY_NOT.get(dropped[slot], dropped[slot]) if slot in dropped else "",
            cached[slot],
            ahead[slot],
            shown[slot],
        )
        for slot in everyone.slots
    }
    reason = policy.reason(candidates, costs, index)
    columns = zip(everyone.slots, everyone.tiers(), everyone.prefill_blocks, everyone.decode_blocks, strict=True)
    return Explanation(
        policy=name,
        overlap_score_weight=settings.overlap_score_weight,
        router_temperature=settings.router_temperature,
        reason="; ".join((reason, *notes)),
        candidates=tuple(
            Candidate(
                pool.ranks[slot],
                slot not in dropped,
                dropped.get(slot, ""),
                *tiers,
                prefill_blocks=prefill_blocks,
                decode_blocks=decode_blocks,
                cost=shown[slot],
                probability=drawn.get(slot, 0.0),
                cached_tokens=cached[slot],
                cost_text=cost_in_words(shown[slot], policy.unit),
            )
            for slot, tiers, prefill_blocks, decode_blocks in columns
        ),
        summary=shortened(
            "; ".join(
                (
                    _sentence(rows, candidates, policy, slot=candidates.slot(index), reason=reason, drawn=drawn),
                    *_circumstances(candidates),
                    *notes,
                )
            )
        ),
    )


def shortened(summary: str) -> str:
    """Return a sentence within its limit."""
    return summary if len(summary) <= MAX_SUMMARY else f"{summary[: MAX_SUMMARY - 1]}…"


def _sentence(
    rows: Mapping[int, _Row],
    candidates: Candidates,
    policy: CheckedPolicy,
    *,
    slot: int,
    reason: str,
    drawn: Mapping[int, float],
) -> str:
    request, chosen = candidates.request, rows[slot]
    role = f" ({request.role})" if request.role is not Role.AGGREGATED else ""
    head = f"{chosen.name}{role}: "
    if request.constraints.pinned_worker_id and len(candidates) == 1:
        return f"{head}pinned by the request"
    if len(rows) == 1:
        return f"{head}the only worker"
    if len(candidates) == 1:
        return f"{head}the only worker that can take the request, as {_others(rows)}"
    if policy.unit is None:
        return f"{head}{reason}"
    isl = request.isl_tokens
    parts = [f"{head}cost {cost_in_words(chosen.cost, policy.unit)}, {_cached(chosen, rows, isl)}"]
    eligible = {each: row for each, row in rows.items() if not row.why_not}
    ties = sum(row.cost == chosen.cost for row in eligible.values())
    if drawn[slot]:
        parts.append(f"drawn with a chance of {drawn[slot]:.0%}")
    elif ties > 1:
        # `Policy.pick` prefers the worker of the session only among equal ones.
        last = slot == candidates.home
        parts.append(f"{'its session was there last, and ' if last else 'drawn, as '}{ties} workers cost the same")
    rival = max(rows.values(), key=lambda row: row.cached_tokens)
    if rival.cached_tokens > chosen.cached_tokens:
        parts.append(f"{rival.name}, which has more ({rival.cached_tokens:,}), {_instead(rival, policy)}")
    elif ties < len(eligible):
        later = (row for row in eligible.values() if row.cost != chosen.cost)
        second = min(later, key=lambda row: row.cost)
        words = cost_in_words(second.cost, policy.unit)
        if words:
            parts.append(f"next is {second.name} with {words}")
    return "; ".join(parts)


def _cached(chosen: _Row, rows: Mapping[int, _Row], isl_tokens: int) -> str:
    """Return how much of the prompt is cached on the chosen worker."""
    if not chosen.cached_tokens:
        return "with nothing of the prompt cached there"
    most = chosen.cached_tokens == max(row.cached_tokens for row in rows.values())
    tokens = f"{chosen.cached_tokens:,} of {isl_tokens:,} prompt tokens"
    return f"as {tokens} are cached there" if most else f"with {tokens} cached there"


def _instead(rival: _Row, policy: CheckedPolicy) -> str:
    """Return why a worker with more of the prompt was not chosen."""
    if rival.why_not:
        return rival.why_not
    words = cost_in_words(rival.cost, policy.unit)
    if not words:
        return "is full"
    if rival.prefill_tokens:
        return f"has {rival.prefill_tokens:,} prompt tokens ahead: {words}"
    return f"would cost {words}"


def _others(rows: Mapping[int, _Row]) -> str:
    """Return why the others could not be chosen."""
    others = [f"{row.name} {row.why_not}" for row in rows.values() if row.why_not]
    more = len(others) - MAX_NAMED
    return ", ".join(others[:MAX_NAMED]) + (f", and {more} more cannot" if more > 0 else "")


def _circumstances(candidates: Candidates) -> list[str]:
    """Return what a reader has to know besides: waiting, and ignorance."""
    request = candidates.request
    found = []
    if request.waited_seconds:
        found.append(f"it waited {milliseconds(request.waited_seconds)} in the queue")
    if request.overlaps_unknown:
        found.append("no indexer answered, so what is cached is a guess")
    return found


def _name(pool: Pool, slot: int) -> str:
    rank = pool.ranks[slot]
    return f"{rank.worker_id} rank {rank.dp_rank}" if pool.specs[slot].dp_size > 1 else rank.worker_id
