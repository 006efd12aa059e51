"""Python client of kvscout.

::

    async with Router("localhost:50050", model="llama-3-8b") as router:
        async for chunk in router.generate(token_ids, stop=StopConditions(max_tokens=64)):
            print(chunk.token_ids)
"""

from kvscout_client.booking import Booking
from kvscout_client.options import OutputOptions, RouterOverride, SamplingOptions, StopConditions
from kvscout_client.results import (
    BusyThresholds,
    Candidate,
    Explanation,
    FinishReason,
    FreeOutcome,
    GenerateChunk,
    HelperState,
    RegisteredWorker,
    RouteDecision,
    RouterStatus,
    Usage,
    WorkerLoad,
    WorkerRecord,
)
from kvscout_client.router import Router
from kvscout_client.tokens import Tokens
from kvscout_common.channel import ClientSecurity

__all__ = [
    "Booking",
    "BusyThresholds",
    "Candidate",
    "ClientSecurity",
    "Explanation",
    "FinishReason",
    "FreeOutcome",
    "GenerateChunk",
    "HelperState",
    "OutputOptions",
    "RegisteredWorker",
    "RouteDecision",
    "Router",
    "RouterOverride",
    "RouterStatus",
    "SamplingOptions",
    "StopConditions",
    "Tokens",
    "Usage",
    "WorkerLoad",
    "WorkerRecord",
]
