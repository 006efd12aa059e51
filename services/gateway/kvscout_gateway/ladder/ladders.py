"""The ladders of one gateway: a request is looked at when it is sent, and counted when its engine's usage is known."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscout_common.hashing import block_hashes_packed
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.engines.observation import predicted_cached_tokens
from kvscout_gateway.ladder.counts import Counts
from kvscout_gateway.ladder.reuse import MAX_SAMPLES, Reuse, ReuseSampler, sampler_type
from kvscout_gateway.ladder.speed import PrefillSpeed

if TYPE_CHECKING:
    from kvscout_gateway.members.catalog import Catalog
    from kvscout_gateway.values.decision import Decision
    from kvscout_gateway.values.prompt import Geometry
    from kvscout_gateway.values.request import Request

SPAN_SECONDS: Final = 60
"""A window is a number of these."""
WINDOW_SECONDS: Final = 300
"""Window of metrics, and default window of queries."""
MAX_WINDOW_SECONDS: Final = 3_600
MAX_SAMPLERS: Final = 32
"""Beyond it the one that was not used for longest is dropped: its model begins anew."""
MAX_MODELS: Final = 256
"""Models that are counted within a span; those beyond it are not."""
MAX_SESSIONS: Final = 16_384
"""Sessions of which is remembered that they had a turn."""


class SessionClass(StrEnum):
    """Place of a request in its session."""

    NONE = "none"
    FIRST_TURN = "first_turn"
    LATER_TURN = "later_turn"
    SUBAGENT = "subagent"


class Key(NamedTuple):
    """Key of a count."""

    tenant: str
    model: str
    session_class: SessionClass


@dataclass(slots=True)
class Placed:
    """A request that was sent to its engine."""

    key: Key
    isl_tokens: int
    has_engines_tokens: bool
    """Its tokens are known, all of them."""
    decided: bool
    """The policy chose among the workers."""
    block_size: int
    held_blocks: int | None
    """Longest overlap with any worker; None = nobody looked."""
    overlap_blocks: int
    """With the worker that was chosen."""
    saved_seconds: float
    """By not going to the one with the longest, as the policy estimates."""
    reuse: Reuse
    weight: int


class Ladders:
    """Counts of the last hour, by model and session class.

    Args:
        catalog: The workers.
        reports: Whether a worker, of a tenant and an id, reports cached tokens at all.
        clock: Seconds.
    """

    def __init__(
        self,
        catalog: Catalog,
        reports: Callable[[str, str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._reports = reports
        self._clock = clock
        self._new_sampler = sampler_type()
        self._samplers: OrderedDict[tuple[str, str, Geometry], ReuseSampler] = OrderedDict()
        self._sessions: OrderedDict[int, None] = OrderedDict()
        self._spans: deque[tuple[int, dict[Key, Counts]]] = deque()
        """Number of each span that has counts, the oldest first."""
        self._speeds: OrderedDict[tuple[str, str], PrefillSpeed] = OrderedDict()

    def placed(self, request: Request, decision: Decision, *, decided: bool = True) -> Placed:
        """Look at a request that goes to its engine now; once, however often it is tried.

        Args:
            request: The request.
            decision: Where it goes, or where the policy would have it go.
            decided: The policy decides.
        """
        prompt, size = request.prompt, decision.block_size
        reuse, weight = prompt.reuse or self._observed(request, decision)
        prompt.reuse = (reuse, weight)
        free = not (request.pinned or request.session.affinity or decision.degraded)
        return Placed(
            Key(decision.tenant, decision.model, self._class_of(request, decision)),
            prompt.isl_tokens,
            not prompt.unknown and bool(size),
            decided and free,
            size,
            decision.held_blocks,
            decision.overlap_blocks,
            decision.saved_seconds,
            Reuse(*reuse),
            weight,
        )

    def ended(
        self, placed: Placed, usage: Usage, worker_id: str, *, estimated: bool = False, ttft_seconds: float = 0.0
    ) -> None:
        """Count a request whose engine has answered.

        Args:
            placed: The request.
            usage: What its engine says of its prompt.
            worker_id: Who ran it.
            estimated: The length of its prompt is an estimate, and is no proof of other tokens.
            ttft_seconds: From being sent to the first token; 0 = unknown.
        """
        counts = self._counts(placed.key)
        if counts is None:
            return
        prompt, actual = usage.prompt_tokens, usage.cached_tokens
        size = placed.block_size
        same = placed.has_engines_tokens and (estimated or placed.isl_tokens == prompt)
        usable = predicted_cached_tokens(prompt, prompt, size)
        predicted = predicted_cached_tokens(placed.overlap_blocks, prompt, size)
        if actual is None:
            reported = self._reports(placed.key.tenant, worker_id)
            counts.unreported += not reported
            actual = 0 if reported else predicted
        actual = min(actual, prompt)
        self._learn(placed.key, prompt - actual, ttft_seconds)
        counts.requests += 1
        counts.prompt += prompt
        counts.actual += actual
        if not same:
            # Where they could have been cached nobody knows: at best, all of them.
            counts.usable, counts.held = counts.usable + prompt, counts.held + prompt
            counts.predicted += actual
            if placed.has_engines_tokens:
                counts.other_tokens += prompt - actual
            else:
                counts.not_placed += prompt - actual
            return
        reuse = placed.reuse
        if placed.held_blocks is None:
            # Nobody looked where it is held: in as many blocks as caches could have kept.
            held = min(usable, (reuse.split + reuse.recent) * size)
            reuse = reuse._replace(split=0, recent=0)
        else:
            held = max(predicted, predicted_cached_tokens(placed.held_blocks, prompt, size))
        if placed.held_blocks is None or not placed.decided:
            predicted = min(held, max(actual, predicted if placed.decided else 0))
        counts.usable += usable
        counts.held += held
        counts.predicted += predicted
        if placed.decided:
            counts.moved += held - predicted
            counts.saved_seconds += placed.saved_seconds if held > predicted else 0.0
        else:
            counts.not_placed += held - predicted
        counts.not_there += max(0, predicted - actual)
        counts.unpredicted += max(0, actual - predicted)
        counts.sampled += sum(reuse) // placed.weight
        for place, blocks in enumerate(reuse):
            counts.kinds[place] += blocks * size

    def counts(self, tenant: str, model: str, window_seconds: int) -> dict[Key, Counts]:
        """Return the sums of a window.

        Args:
            tenant: Whose; "*" = all.
            model: "" = all.
            window_seconds: Rounded up to spans.
        """
        first = self._now() - -(-window_seconds // SPAN_SECONDS)
        found: dict[Key, Counts] = {}
        for number, by_key in self._spans:
            for key, counts in by_key.items():
                if number > first and tenant in (ALL_TENANTS, key.tenant) and model in ("", key.model):
                    found.setdefault(key, Counts()).add(counts)
        return found

    def seconds_per_token(self, tenant: str, model: str) -> float:
        """Return the time in which a token of a prompt is computed; 0 = unknown yet."""
        speed = self._speeds.get((tenant, model))
        return speed.seconds_per_token if speed is not None else 0.0

    def weight(self, tenant: str, model: str) -> int:
        """Return the blocks that a sampled one stands for, the most of any geometry."""
        weights = (one.weight for key, one in self._samplers.items() if key[:2] == (tenant, model))
        return max(weights, default=1)

    def _observed(self, request: Request, decision: Decision) -> tuple[tuple[int, ...], int]:
        hashes, pool, prompt = decision.block_hashes, decision.pool, request.prompt
        if not hashes:
            return Reuse(), 1
        content = b""
        if (prompt.cache_salt or request.lora_name) and prompt.token_ids:
            content = block_hashes_packed(prompt.token_ids, pool.block_size, mm_items=prompt.mm_items, eagle=pool.eagle)
        caches = self._catalog.serving(request).caches.get(pool)
        blocks = (prompt.own_tokens - 1) // pool.block_size
        sampler = self._sampler(decision.tenant, decision.model, pool)
        weight = sampler.weight
        reuse = sampler.observe(
            hashes,
            content if len(content) == len(hashes) else b"",
            max(0, blocks),
            decision.held_blocks or 0,
            caches.blocks if caches is not None else 0,
            caches.smallest if caches is not None else 0,
        )
        return reuse, weight

    def _sampler(self, tenant: str, model: str, pool: Geometry) -> ReuseSampler:
        key = (tenant, model, pool)
        sampler = self._samplers.get(key)
        if sampler is None:
            if len(self._samplers) >= MAX_SAMPLERS:
                self._samplers.popitem(last=False)
            sampler = self._samplers[key] = self._new_sampler(MAX_SAMPLES)
        self._samplers.move_to_end(key)
        return sampler

    def _class_of(self, request: Request, decision: Decision) -> SessionClass:
        session_id = decision.session_id
        if not session_id:
            return SessionClass.NONE
        known = session_id in self._sessions
        self._sessions[session_id] = None
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if request.session.parent_id:
            return SessionClass.SUBAGENT
        return SessionClass.LATER_TURN if known else SessionClass.FIRST_TURN

    def _counts(self, key: Key) -> Counts | None:
        now = self._now()
        if not self._spans or self._spans[-1][0] != now:
            while self._spans and self._spans[0][0] <= now - MAX_WINDOW_SECONDS // SPAN_SECONDS:
                self._spans.popleft()
            self._spans.append((now, {}))
        by_key = self._spans[-1][1]
        counts = by_key.get(key)
        if counts is None:
            if len(by_key) >= MAX_MODELS * len(SessionClass) or not self._catalog.serves(key.tenant, key.model):
                return None
            counts = by_key[key] = Counts()
        return counts

    def _learn(self, key: Key, computed_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        speed = self._speeds.get(key[:2])
        if speed is None:
            if len(self._speeds) >= MAX_MODELS:
                self._speeds.popitem(last=False)
            speed = self._speeds[key[:2]] = PrefillSpeed()
        speed.learn(computed_tokens, seconds)

    def _now(self) -> int:
        return int(self._clock() // SPAN_SECONDS)
