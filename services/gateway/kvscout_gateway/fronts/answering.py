"""Who may be asked what needs no placement by its prompt: one rule for every front."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvscout_common.worker import Role, WorkerSpec
from kvscout_gateway.engines.health import WorkerHealth

_random: Final = random.Random()


def spread_answering(
    health: WorkerHealth,
    tenant: str,
    some: Sequence[WorkerSpec],
    among: Sequence[WorkerSpec],
    *,
    draw: random.Random = _random,
) -> list[WorkerSpec]:
    """Those workers that answer clients themselves, in an order that spreads requests; who fails what others run comes
    last.

    Args:
        health: Says who fails.
        tenant: Whose request it is.
        some: Those that it may go to.
        among: All that could take it.
        draw: The order is left to chance.
    """
    able = [spec for spec in some if spec.http_endpoint and not spec.draining and spec.role is not Role.PREFILL]
    # A decode worker that computes no prompts is for what generates nothing, where there is no other.
    able = [spec for spec in able if spec.role is not Role.DECODE or spec.can_fallback] or able
    return health.well_first(tenant, draw.sample(able, len(able)), among)
