"""Comparison of the balancer's choices with the policy's, by the hour. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

HOUR: Final = 3600
MAX_HOURS: Final = 500
"""Hours of models that are kept, the oldest go: of three models a week."""


class LeftOut(StrEnum):
    """Reason why a request was not compared."""

    TOKENS = "tokens"
    """The tokens of its prompt are not known here, or are not those that the engine counted."""
    HELPERS = "helpers"
    """Indexer or scheduler did not answer, or knew no worker that could take it."""
    LATE = "late"
    """Its output began before the policy had decided: it would have stood in line, or its tokens came late."""
    USAGE = "usage"
    """Its engine did not say how much of the prompt was cached."""
    FAILED = "failed"
    """The balancer, or an engine behind it, failed it; or its client left."""
    MANY = "many"
    """Too many were being scored."""


class Comparison(NamedTuple):
    """One request as it was, and as it would have been; in tokens."""

    prompt: int
    cached: int | None
    """As its engine says; None = it says nothing of it."""
    policy: int
    """Tokens that the worker of the policy's choice had cached."""
    same: bool | None
    """True = the policy's worker served it; None = the balancer does not say who did."""


@dataclass(slots=True)
class Sums:
    """Sums of the requests that were compared."""

    compared: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    policy_cached_tokens: int = 0
    served_known: int = 0
    """Compared requests of which the balancer said who served."""
    same_worker: int = 0
    """Requests among these that the policy would have sent there, too."""
    same_worker_prompt_tokens: int = 0
    same_worker_error_tokens: int = 0
    """Σ |what was predicted to be cached − what was|: they ran where it was predicted, and show how far to trust it."""

    def add(self, one: Comparison) -> None:
        """Add one request; what its engine does not report counts as 0."""
        cached = one.cached or 0
        self.compared += 1
        self.prompt_tokens += one.prompt
        self.cached_tokens += cached
        self.policy_cached_tokens += one.policy
        self.served_known += one.same is not None
        if one.same:
            self.same_worker += 1
            self.same_worker_prompt_tokens += one.prompt
            self.same_worker_error_tokens += abs(one.policy - cached)

    def merge(self, other: Sums) -> None:
        """Add all requests of another."""
        for each in fields(Sums):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Span:
    """One model's requests of one hour, or since start."""

    requests: int = 0
    sums: Sums = field(default_factory=Sums)
    unproven: Sums = field(default_factory=Sums)
    """Sums of requests whose usage has no cached tokens, counted as 0."""
    left_out: Counter[LeftOut] = field(default_factory=Counter)

    def proven(self) -> None:
        """Count unproven requests: their engines report cached tokens, and leave out 0."""
        self.sums.merge(self.unproven)
        self.unproven = Sums()

    def reasons(self) -> dict[str, int]:
        """Count the requests that were not compared, by reason."""
        counts = Counter({reason.value: count for reason, count in self.left_out.items()})
        if self.unproven.compared:
            counts[LeftOut.USAGE.value] += self.unproven.compared
        return dict(counts)


class Hour(NamedTuple):
    """Key of an hour of one model."""

    begin: int
    """Seconds since the Unix epoch."""
    tenant: str
    model: str


class ShadowReport(Collector):
    """Report of all hours. Engines leave out cached tokens that are 0, or never report them: one report settles it."""

    def __init__(self) -> None:
        self._hours: dict[Hour, Span] = {}
        self._totals: dict[tuple[str, str], Span] = {}
        self._telling: set[tuple[str, str]] = set()
        """Tenants' models whose engines report cached tokens."""

    def hours(self) -> Iterator[tuple[Hour, Span]]:
        """Return the hours that are kept, the oldest first."""
        return iter(sorted(self._hours.items(), key=lambda item: item[0]))

    def totals(self) -> Iterator[tuple[tuple[str, str], Span]]:
        """Since start, by tenant and model."""
        return iter(self._totals.items())

    def collect(self) -> Iterator[Metric]:
        """Return samples of what was passed on to the user's own balancer."""
        labels = ["tenant", "model"]
        requests = CounterMetricFamily(
            "kvscout_shadow_requests",
            "Requests passed on in shadow mode, by whether they were compared, or why not",
            labels=[*labels, "outcome"],
        )
        prompt = CounterMetricFamily("kvscout_shadow_prompt_tokens", "Of those compared", labels=labels)
        cached = CounterMetricFamily("kvscout_shadow_cached_tokens", "Of them, cached as it was", labels=labels)
        policy = CounterMetricFamily(
            "kvscout_shadow_policy_cached_tokens",
            "Of them, cached where the policy would have sent them",
            labels=labels,
        )
        for who, span in self.totals():
            for outcome, count in {"compared": span.sums.compared, **span.reasons()}.items():
                requests.add_metric([*who, outcome], count)
            prompt.add_metric(who, span.sums.prompt_tokens)
            cached.add_metric(who, span.sums.cached_tokens)
            policy.add_metric(who, span.sums.policy_cached_tokens)
        yield from (requests, prompt, cached, policy)

    def add(self, at: float, tenant: str, model: str, outcome: Comparison | LeftOut) -> None:
        """Count a request that is over.

        Args:
            at: When it came, in seconds since the Unix epoch.
            tenant: Whose it is.
            model: One that workers serve.
            outcome: What came of it.
        """
        who = (tenant, model)
        key = Hour(int(at) // HOUR * HOUR, tenant, model)
        if key not in self._hours and len(self._hours) >= MAX_HOURS:
            del self._hours[min(self._hours)]
        spans = (self._hours.setdefault(key, Span()), self._totals.setdefault(who, Span()))
        if isinstance(outcome, Comparison) and outcome.cached is not None and who not in self._telling:
            self._telling.add(who)
            for hour, span in self._hours.items():
                if (hour.tenant, hour.model) == who:
                    span.proven()
            self._totals[who].proven()
        for span in spans:
            span.requests += 1
            if isinstance(outcome, LeftOut):
                span.left_out[outcome] += 1
            elif outcome.cached is None and who not in self._telling:
                span.unproven.add(outcome)
            else:
                span.sums.add(outcome)
