"""Workers for requests that need no placement by their prompt, in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvscout_common.worker import Role, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth

_random: Final = random.Random()


def random_workers(
    health: WorkerHealth,
    tenant: str,
    some: Sequence[WorkerSpec],
    among: Sequence[WorkerSpec],
    *,
    draw: random.Random = _random,
) -> list[WorkerSpec]:
    """Return the workers that answer clients themselves, in random order; ejected ones come last.

    Args:
        health: Ejections.
        tenant: Tenant of the request.
        some: Workers that it may go to.
        among: All workers that could take it.
        draw: Random generator.
    """
    able = [spec for spec in some if spec.http_endpoint and not spec.draining and spec.role is not Role.PREFILL]
    # A decode worker that computes no prompts is for what generates nothing, where there is no other.
    able = [spec for spec in able if spec.role is not Role.DECODE or spec.can_fallback] or able
    return health.well_first(tenant, draw.sample(able, len(able)), among)
