"""One selection: who may take the request, what the policy says, and why."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf, isfinite
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from kvscout_scheduler.costs.cost import BlockFormat, ScoreInputs
from kvscout_scheduler.costs.words import SECONDS
from kvscout_scheduler.estimates.sessions import Session
from kvscout_scheduler.load.active_load import further_cost
from kvscout_scheduler.policies.eligibility import Exclusions, eligible, with_room
from kvscout_scheduler.policies.explanation import explain, shortened
from kvscout_scheduler.policies.headroom import KV_TIME, headroom_of, require_time
from kvscout_scheduler.policies.policy import Candidates, Formula, uncached_tokens
from kvscout_scheduler.policies.registry import CheckedPolicy, PolicyFailed, PolicyRegistry
from kvscout_scheduler.policies.revisions import NO_CHOICE, RevisionChoice, of_revision
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.overlaps import Overlaps
from kvscout_scheduler.values.request import NO_OVERRIDE, ConfigOverride, Prompt, SelectionRequest
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.targets import NO_TARGETS

if TYPE_CHECKING:
    from kvscout_scheduler.load.active_load import Cheapest
    from kvscout_scheduler.load.pool import Pool


class Selection(NamedTuple):
    """A decision, and what a booking needs of it."""

    decision: Decision
    pool: Pool
    slot: int
    prompt: Prompt
    """Hashed for the worker."""
    over_target: bool = False
    """No worker keeps the targets of the request."""
    revision: RevisionChoice = NO_CHOICE
    """What the weights of revisions said."""


class Selector:
    """Picks workers. Makes one instance of each policy a pool, which the pool keeps.

    Args:
        settings: Defaults that a request may override.
        registry: The policies.
        rng: Draws of requests without a seed of their own.
    """

    def __init__(self, settings: SchedulerSettings, registry: PolicyRegistry, rng: Random) -> None:
        registry.check(settings.policy)
        self._settings = settings
        self._registry = registry
        self._rng = rng
        self._has_targets = settings.targets != NO_TARGETS or bool(settings.model_targets)

    def begin(self, pool: Pool) -> None:
        """Make the usual policy of a new pool, which observes it before anything is selected here: a replica that
        others decide for learns, too."""
        # One that cannot be made fails again at the requests that meet it.
        with suppress(PolicyFailed):
            self._policy(pool, self._settings.policy)

    def check(self, request: SelectionRequest) -> None:
        """Check a request, as far as that needs no workers.

        Raises:
            InvalidArgument: Naming the field.
        """
        request.validate()
        if request.override.policy is not None:
            self._registry.check(request.override.policy)

    def select(
        self, pool: Pool, request: SelectionRequest, now: float, *, books: bool, explains: bool = False
    ) -> Selection:
        """Pick a worker, by the default policy if the wanted one fails; change nothing but the position of round-robin
        policies.

        Args:
            pool: The pool of the request, which knows when its workers are busy.
            request: A checked request.
            now: On the scheduler's clock.
            books: Whether the choice is going to be booked.
            explains: Whether somebody else wants the choice explained: then it is, if that can be done.

        Raises:
            InvalidArgument, FailedPrecondition: `Pool.prompts`.
            NotFound, Unavailable, FailedPrecondition, ResourceExhausted: `eligible`.
            Shed: No worker keeps the targets of a request that may be shed.
            DeadlineExceeded: Its first token would come after its deadline.
            PolicyFailed: The default policy fails, too.
        """
        try:
            return self._select(pool, request, now, books=books, explains=explains)
        except PolicyFailed as failed:
            if failed.policy == KV_TIME or KV_TIME not in self._registry.names:
                raise
            request = replace(request, override=replace(request.override, policy=KV_TIME))
            selection = self._select(pool, request, now, books=books, explains=explains)
            decision = selection.decision
            decision.policy_problem = str(failed)
            if (why := decision.explanation) is not None:
                note = f"policy {failed.policy} failed, so {KV_TIME} decided"
                decision.explanation = why._replace(summary=shortened(f"{why.summary}; {note}"))
            return selection

    def _select(self, pool: Pool, request: SelectionRequest, now: float, *, books: bool, explains: bool) -> Selection:
        prompts = pool.prompts(request.prompt, request.other_prompts, request.isl_tokens)
        session = pool.sessions.of(request, prompts)
        known = pool.sessions.get(session)
        # A subagent begins with its parent's tools and instructions.
        before = known or (pool.sessions.get(request.parent_session) if request.parent_session else None)
        home = pool.slot_of.get(before.rank, -1) if before is not None else -1
        if request.overlaps_unknown and known is not None and home >= 0:
            prompts = _expecting(prompts, known, request.isl_tokens)
        dropped = Exclusions() if request.explain or explains else None
        members = eligible(pool, request, now, dropped)
        full = False
        if pool.queues_requests:
            # A query is answered all the same when everyone is full.
            roomy = with_room(pool, members, dropped)
            full, members = not roomy, roomy or members
        revision = NO_CHOICE
        if self._settings.revision_weights:
            revision = of_revision(pool, request, members, self._settings.revision_weights)
            if dropped is not None:
                dropped.note("revision", members & ~revision.slots)
            members = revision.slots
        settings = self._settings if request.override is NO_OVERRIDE else self._in_effect(request.override)
        name = settings.policy
        policy = self._policy(pool, name)
        seed = request.override.seed
        rng = self._rng if seed is None else Random(seed)
        explanation, note, over_target = None, "", False
        has_targets = name == KV_TIME and (self._has_targets or request.targets is not NO_TARGETS)
        usual = dropped is None and len(prompts) == 1 and not has_targets and request.deadline_seconds == inf
        if usual and policy.formula is not None and not settings.router_temperature:
            # The usual case, and what the other one comes to: all that the policy would do is one call.
            slot, overlap_blocks, effective_overlap_blocks, cost, further = _cheapest(
                policy.formula,
                pool,
                request,
                members,
                prompts,
                settings,
                now=now,
                books=books,
                home=home,
                session=session,
                rng=rng,
            )
        else:
            candidates = Candidates(
                pool, request, members, prompts, settings, now=now, books=books, home=home, session=session
            )
            if has_targets:
                targets = settings.targets_of(request.model, request.targets)
                candidates, note, over_target = headroom_of(candidates, targets, dropped)
            costs = policy.costs(candidates)
            index = policy.pick(candidates, costs, rng)
            overlap_blocks, effective_overlap_blocks = candidates.overlap(index)
            slot, cost = candidates.slot(index), costs[index]
            further = further_cost(candidates.device_blocks, costs, index)
            if books and request.deadline_seconds < inf and not pool.times.prefill.is_belief:
                require_time(candidates, slot)
            if dropped is not None:
                try:
                    waits = "every worker is full: a booking would wait" if full else ""
                    explanation = explain(
                        pool,
                        name,
                        policy,
                        candidates=candidates,
                        costs=costs,
                        index=index,
                        dropped=dropped.by_slot(),
                        notes=[each for each in (revision.note, note, waits) if each],
                    )
                except PolicyFailed:
                    # A caller that wants no explanation gets the worker all the same.
                    if request.explain:
                        raise
        decision = Decision(
            pool.ranks[slot],
            pool.specs[slot],
            name,
            overlap_blocks,
            effective_overlap_blocks,
            cost,
            uncached_tokens(request, effective_overlap_blocks, pool.format_of[slot].block_size),
            explanation,
            session,
            saved_seconds=further if policy.unit == SECONDS and isfinite(further) else 0.0,
        )
        return Selection(decision, pool, slot, prompts[pool.format_of[slot]], over_target, revision)

    def _in_effect(self, override: ConfigOverride) -> SchedulerSettings:
        given = {name: getattr(override, name) for name in ("overlap_score_weight", "router_temperature", "policy")}
        return replace(self._settings, **{name: value for name, value in given.items() if value is not None})

    def _policy(self, pool: Pool, name: str) -> CheckedPolicy:
        policy: CheckedPolicy | None = pool.policies.get(name)
        if policy is None:
            policy = pool.policies[name] = self._registry.create(name)
            if policy.observes:
                pool.observers.append(policy)
        return policy


def _expecting(prompts: Mapping[BlockFormat, Prompt], session: Session, isl_tokens: int) -> dict[BlockFormat, Prompt]:
    """Return a prompt of which nobody knows where it is cached, with what its session has left on its last worker."""
    (worker_id, dp_rank), tokens = session.rank, min(session.tokens, isl_tokens)
    return {
        block_format: Prompt(
            prompt.block_hashes,
            prompt.block_size,
            prompt.eagle,
            Overlaps([worker_id], [dp_rank], [0], predicted_blocks=[tokens // block_format.block_size]),
        )
        for block_format, prompt in prompts.items()
    }


def _cheapest(
    formula: Formula,
    pool: Pool,
    request: SelectionRequest,
    members: int,
    prompts: Mapping[BlockFormat, Prompt],
    settings: SchedulerSettings,
    *,
    now: float,
    books: bool,
    home: int,
    session: int,
    rng: Random,
) -> Cheapest:
    """Return the candidate of least cost, where all have one block format."""
    ((block_format, prompt),) = prompts.items()
    weight, times = settings.overlap_score_weight, None
    if formula is Formula.SECONDS:
        times = pool.times.question(
            request, prompt, block_format.block_size, now=now, weight=weight, books=books, session=session
        )
    question = ScoreInputs(
        block_format, prompt.block_hashes, request.isl_tokens, weight, settings.tier_weights, request.charge_prefill
    )
    slots = None if members == pool.everyone else members
    return pool.load.cheapest(question, prompt.overlaps, slots, times, home, rng.randrange)
