"""Places in lists of active requests, and worker loads, as rpcs show them."""

from __future__ import annotations

from typing import NamedTuple

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.values.reservation import RequestKey


class ListPlace(NamedTuple):
    """Place of a request in a list of active ones."""

    queued: bool
    since: float
    """When it was booked, or began to wait, on the monotonic clock."""
    key: RequestKey


class WorkerLoad(NamedTuple):
    """Load of one worker rank, now and with a prompt added."""

    rank: WorkerRank
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    busy: bool
    cooldown_seconds: float
    draining: bool
    total_kv_blocks: int
    metrics_age_seconds: float | None
    """Age of the report of its engine; None = there is none that counts."""
