"""Terms on which a request is served: priority, fairness id, deadline and targets, as its headers and body say them.

One table for every front: HTTP, Envoy, gRPC metadata and shadow mode. What a client says is bounded by its token: the
priority by `max_priority`; the fairness id divides the share of the token's bearer, and nobody else's.

============================================================  ========================================================
header; of several for one thing, the first that is there     meaning
============================================================  ========================================================
``x-kvscout-priority``                                        queue priority, higher first
``x-llm-d-inference-objective``, ``x-gateway-inference-…``    name of an objective: priority and targets
``x-llm-d-inference-fairness-id``, ``x-gateway-inference-…``  fairness id
``x-kvscout-deadline-ms``                                     milliseconds until nobody wants the output any more
``x-llm-d-slo-ttft-ms``, ``x-slo-ttft-ms``                    target of the time to the first token
``x-llm-d-slo-tpot-ms``, ``x-slo-tpot-ms``                    target of the time between tokens
============================================================  ========================================================

Where no header has a priority, `priority` of the body counts, as the engine reads it: in vLLM lower is earlier, in
SGLang higher.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.identity.identity import ANONYMOUS, Identity
from kvscout_common.worker import EngineKind
from kvscout_gateway.fronts.objectives import MAX_PRIORITY, NO_OBJECTIVE, Objective
from kvscout_gateway.fronts.reserved import PRIORITY
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.values.request import NO_FIELDS, Request

PRIORITY_HEADER: Final = "x-kvscout-priority"
OBJECTIVE_HEADERS: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
DEADLINE_HEADER: Final = "x-kvscout-deadline-ms"
TTFT_HEADERS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
ITL_HEADERS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
HEADERS: Final = frozenset(
    {PRIORITY_HEADER, DEADLINE_HEADER, *OBJECTIVE_HEADERS, *FAIRNESS_HEADERS, *TTFT_HEADERS, *ITL_HEADERS}
)
MAX_ID: Final = 256
"""Characters of a fairness id."""
MAX_MILLISECONDS: Final = 7 * 24 * 3600 * 1000
"""Longest deadline and target: a week."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,15}")


class Terms:
    """The terms of requests.

    Args:
        catalog: The registered workers, whose engines say how a body's priority is meant.
        objectives: By name.
    """

    def __init__(self, catalog: Catalog, objectives: Mapping[str, Objective]) -> None:
        self._catalog = catalog
        self.objectives = objectives

    def apply(
        self,
        request: Request,
        headers: Iterable[tuple[str, Any]],
        identity: Identity,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        objective: str = "",
        seconds_left: float | None = None,
    ) -> Request:
        """Return a request with the terms that it came with.

        Args:
            request: As read so far; its own priority and fairness id count where no header has one.
            headers: Of the call.
            identity: The caller.
            fields: Of the body.
            objective: Name of its objective, where its message has one.
            seconds_left: Of the call's own deadline; None = it has none.

        Raises:
            InvalidArgument: A header is not what it should be; it is named.
        """
        found = {lower: value for name, value in headers if (lower := name.lower()) in HEADERS and value}
        caller = "" if identity is ANONYMOUS else identity.name
        limit = identity.max_priority
        if not found and not objective and seconds_left is None and PRIORITY not in fields and not request.priority:
            # Nearly all requests: a copy would be dear.
            request.caller = caller
            return request
        named = self.objectives.get(objective or _first(found, OBJECTIVE_HEADERS), NO_OBJECTIVE)
        priority = self._priority(request, found, fields, named)
        ttft, itl = _seconds(found, TTFT_HEADERS), _seconds(found, ITL_HEADERS)
        left = min(_seconds(found, (DEADLINE_HEADER,)), inf if seconds_left is None else seconds_left)
        fairness_id = request.fairness_id or _first(found, FAIRNESS_HEADERS)
        if len(fairness_id) > MAX_ID:
            raise InvalidArgument(f"must have at most {MAX_ID} characters", field=FAIRNESS_HEADERS[-1])
        return replace(
            request,
            priority=priority if limit is None else min(priority, limit),
            caller=caller,
            fairness_id=fairness_id,
            deadline=time.monotonic() + left,
            ttft_target_seconds=min(ttft, named.ttft_target_seconds),
            itl_target_seconds=min(itl, named.itl_target_seconds),
        )

    def _priority(
        self, request: Request, found: Mapping[str, str], fields: Mapping[str, Any], objective: Objective
    ) -> int:
        """Return the queue priority, before it is bounded: of the first place that has one."""
        if PRIORITY_HEADER in found:
            return _whole(PRIORITY_HEADER, found[PRIORITY_HEADER], MAX_PRIORITY)
        if objective is not NO_OBJECTIVE:
            return objective.priority
        own = fields.get(PRIORITY)
        if isinstance(own, int) and not isinstance(own, bool):
            specs = self._catalog.tenant(request.tenant).serving(request.model).specs
            is_sglang = bool(specs) and all(spec.engine is EngineKind.SGLANG for spec in specs)
            bounded = max(-MAX_PRIORITY, min(own, MAX_PRIORITY))
            return bounded if is_sglang else -bounded
        return request.priority


def _first(found: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the first of some headers that is there; "" = none is."""
    return next((found[name].strip() for name in names if name in found), "")


def _whole(name: str, text: str, most: int) -> int:
    number = int(text) if _WHOLE.fullmatch(text.strip()) else most + 1
    if abs(number) > most:
        raise InvalidArgument(f"must be a whole number from {-most} to {most}", field=name)
    return number


def _seconds(found: Mapping[str, str], names: Iterable[str]) -> float:
    """Return the seconds that the first of some headers has in milliseconds; inf = none is there."""
    for name in names:
        if name in found:
            try:
                milliseconds = float(found[name])
            except ValueError:
                milliseconds = math.nan
            if not 0 < milliseconds <= MAX_MILLISECONDS:
                raise InvalidArgument(f"must be milliseconds above 0 and at most {MAX_MILLISECONDS}", field=name)
            return milliseconds / 1000
    return inf
