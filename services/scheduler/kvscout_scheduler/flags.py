"""Flags of the scheduler, besides those of every server; `SchedulerConfig.from_flags` reads them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvscout_common.settings.flags import PERFORMANCE, flag, flag_group
from kvscout_scheduler.values.reservation import MAX_LEASE_SECONDS

F = TypeVar("F", bound=Callable[..., Any])


def _complete_policy(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from kvscout_scheduler.policies import installed_policies

    return [name for name in installed_policies().names if name.startswith(incomplete)]


lease_flag = flag(
    "--lease-seconds",
    default=300.0,
    type=click.FloatRange(min=0, max=MAX_LEASE_SECONDS, min_open=True),
    help="Lease of bookings whose call does not set one.",
)


def scheduler_flags() -> Callable[[F], F]:
    """Return the flags."""
    return flag_group(
        flag(
            "--router-mode",
            default="kv-time",
            shell_complete=_complete_policy,
            help="Selection policy of requests that name none.",
        ),
        flag(
            "--kv-overlap-score-weight",
            default=1.0,
            help="Weight of prefill relative to decode load; 0 ignores prefix caches.",
        ),
        flag(
            "--session-reuse-weight",
            default=0.0,
            help="Policy kv-time: weight of evicted blocks whose sessions are likely to come back soon; 0 = off.",
        ),
        flag(
            "--router-temperature",
            default=0.0,
            help="0 = always the cheapest worker; above 0 = softmax over the costs.",
        ),
        flag(
            "--cpu-to-gpu-ratio",
            default=8.0,
            help="Policy device-aware-weighted: capacity of an accelerator relative to a CPU worker.",
        ),
        flag("--no-track-active-blocks", is_flag=True, help="Track active prefill tokens only, not active blocks."),
        flag("--router-track-output-blocks", is_flag=True, help="Count generated blocks reported by AddOutput."),
        flag(
            "--active-decode-blocks-threshold",
            type=float,
            help="A worker is busy above this fraction of its KV blocks; unset = off.",
        ),
        flag(
            "--active-prefill-tokens-threshold",
            type=int,
            help="A worker is busy above this number of active prefill tokens; unset = off.",
        ),
        flag("--worker-cooldown-seconds", default=10.0, help="Cool-down of a worker that failed a request."),
        flag(
            "--worker-grace-seconds",
            default=30.0,
            help="Time for which a worker whose registration expired keeps its bookings, in case it returns; "
            "removed workers lose them.",
        ),
        flag(
            "--router-replica-sync",
            is_flag=True,
            help="Share bookings, thresholds and cool-downs with the other schedulers of the namespace, over NATS.",
        ),
        flag(
            "--replica-id",
            default="",
            help="Unique name of this scheduler replica, stable across restarts; unset = host name and port.",
        ),
        flag("--seed", type=int, help="Seed of the random generator; unset = from the system."),
        flag(
            "--max-active-requests",
            default=1_000_000,
            type=click.IntRange(min=1),
            section=PERFORMANCE,
            help="Maximum number of bookings; more are refused.",
        ),
        flag(
            "--tenant-share",
            default=0.5,
            section=PERFORMANCE,
            help="Share of --max-active-requests that one tenant may hold while other tenants have workers; 1 = all.",
        ),
        flag(
            "--scrape-engine-metrics",
            default=0.0,
            type=click.FloatRange(min=0),
            help="Interval of scraping engine metrics; 0 = off.",
        ),
        flag(
            "--engine-metrics-seconds",
            default=30.0,
            help="Validity of reported engine metrics; at least three intervals of --scrape-engine-metrics.",
        ),
        flag(
            "--router-queue-threshold",
            type=float,
            help="Queue requests while all workers have more active prefill tokens than this times "
            "max_num_batched_tokens; unset = no queue.",
        ),
        flag(
            "--fairness-weight",
            multiple=True,
            metavar="NAME=WEIGHT",
            help="NAME=WEIGHT: weight in the queue's fair shares of a caller (name of a token, or the tenant) or of a "
            "fairness id; others have 1. Repeatable.",
        ),
        flag(
            "--revision-weight",
            multiple=True,
            metavar="REVISION=WEIGHT",
            help="REVISION=WEIGHT: share of sessions for the workers with this revision label; without a name before "
            "the =, for those without the label. Revisions without a weight get what no other can take. Repeatable; "
            "unset = the policy alone decides.",
        ),
        flag(
            "--queue-aged-share",
            default=0.1,
            type=click.FloatRange(min=0, max=1, max_open=True),
            help="Share of the estimated seconds that queued requests of lower priorities get once they have waited "
            "for --queue-aged-seconds; 0 = strict priorities.",
        ),
        flag(
            "--queue-aged-seconds",
            default=10.0,
            type=click.FloatRange(min=0),
            help="Time after which a queued request gets a part of --queue-aged-share.",
        ),
        flag(
            "--ttft-target-ms",
            type=click.FloatRange(min=0, min_open=True),
            help="Target of the time to the first token, for policy kv-time: workers that keep it are preferred; while "
            "none does, requests of a priority below 0 are refused. Unset = no target.",
        ),
        flag(
            "--itl-target-ms",
            type=click.FloatRange(min=0, min_open=True),
            help="Target of the time between two tokens; see --ttft-target-ms.",
        ),
        flag(
            "--model-target",
            multiple=True,
            metavar="MODEL=TTFT_MS:ITL_MS",
            help="MODEL=TTFT_MS:ITL_MS: targets of one model; either may be empty: the general one then applies. "
            "Repeatable.",
        ),
        flag(
            "--router-queue-limit",
            default=1_024,
            type=click.IntRange(min=1),
            section=PERFORMANCE,
            help="Maximum number of queued requests per model and role; more are refused.",
        ),
    )
