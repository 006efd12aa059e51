"""Results of gateways in shadow mode: the choices of the user's own balancer beside the policy's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.snapshot import Snapshot

WHY_NOT = {
    "tokens": "whose tokens are not known here, or are not the engine's",
    "helpers": "for which indexer or scheduler did not answer, or knew no worker",
    "late": "whose output began before the policy had decided",
    "usage": "whose engine does not say what was cached (vLLM: --enable-prompt-tokens-details)",
    "failed": "that failed, or whose client left",
    "many": "that came while too many were being scored",
}
_SUMS = (
    "requests",
    "compared",
    "prompt_tokens",
    "cached_tokens",
    "policy_cached_tokens",
    "served_known",
    "same_worker",
    "same_worker_prompt_tokens",
    "same_worker_error_tokens",
)


@dataclass(slots=True)
class ShadowRow:
    """One model's requests of one hour, at all gateways; or of several hours."""

    begin_unix_seconds: int = 0
    tenant: str = ""
    model: str = ""
    requests: int = 0
    compared: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    policy_cached_tokens: int = 0
    served_known: int = 0
    same_worker: int = 0
    same_worker_prompt_tokens: int = 0
    same_worker_error_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, other: ShadowRow | gateway_pb2.ShadowHour) -> None:
        """Add more requests of the same hour."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.left_out.update(dict(other.left_out))

    @property
    def shares(self) -> dict[str, float | None]:
        """Return what it comes to."""
        return {
            "hit_rate": self.hit_rate,
            "policy_hit_rate": self.policy_hit_rate,
            "same_worker_share": self.same_share,
            "prediction_error": self.error_share,
        }

    @property
    def hit_rate(self) -> float | None:
        """Return the actual cached ÷ prompt tokens; None = nothing was compared."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def policy_hit_rate(self) -> float | None:
        """Return the same ratio, had the policy decided."""
        return self.policy_cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def same_share(self) -> float | None:
        """Return the share of requests that the policy would have sent to the same worker; None = unknown."""
        return self.same_worker / self.served_known if self.served_known else None

    @property
    def error_share(self) -> float | None:
        """By how much of their prompts the prediction was wrong, where it could be checked: at those requests."""
        prompt = self.same_worker_prompt_tokens
        return self.same_worker_error_tokens / prompt if prompt else None


@dataclass(frozen=True, slots=True)
class Shadow:
    """All of it."""

    balancers: tuple[str, ...]
    """URLs of the balancers that decide; empty = no gateway shadows."""
    hours: tuple[ShadowRow, ...]
    """The newest first."""

    @property
    def total(self) -> ShadowRow:
        """Return the sum of all hours."""
        row = ShadowRow()
        for hour in self.hours:
            row.add(hour)
        return row


def shadow_of(snapshot: Snapshot) -> Shadow:
    """Return what all gateways of a snapshot say."""
    balancers: dict[str, None] = {}
    rows: dict[tuple[int, str, str], ShadowRow] = {}
    for _, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        if status.shadowed_balancer:
            balancers[status.shadowed_balancer] = None
        for hour in status.shadow_hours:
            key = (hour.begin_unix_seconds, hour.tenant, hour.model)
            rows.setdefault(key, ShadowRow(*key)).add(hour)
    newest_first = sorted(rows.values(), key=lambda row: (-row.begin_unix_seconds, row.tenant, row.model))
    return Shadow(tuple(balancers), tuple(newest_first))


def sentences(shadow: Shadow) -> Sequence[str]:
    """Return what it comes to, in words."""
    return tuple(_sentences(shadow))


def _sentences(shadow: Shadow) -> Iterable[str]:
    total = shadow.total
    decides = " and ".join(shadow.balancers) or "nobody"
    yield f"{decides} decides; {total.requests:,} requests were passed on, {total.compared:,} of them compared."
    if total.prompt_tokens:
        yield (
            f"{100 * (total.hit_rate or 0):.1f} % of their prompt tokens were cached; with the policy it would have"
            f" been {100 * (total.policy_hit_rate or 0):.1f} %."
        )
    if total.error_share is not None:
        yield (
            f"{total.same_worker:,} went where the policy would have sent them; there the prediction was wrong by"
            f" {100 * total.error_share:.1f} % of the prompt tokens."
        )
    elif total.compared and not total.served_known:
        yield "The balancer does not say which worker served (--shadow-served-by)."
    for reason, count in total.left_out.most_common():
        yield f"Not compared: {count:,} {WHY_NOT.get(reason, f'({reason})')}."
