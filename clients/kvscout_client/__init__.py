"""Python client of kvscout.

::

    async with Router("localhost:7050", model="llama-3-8b") as router:
        async for chunk in router.generate(token_ids, stop=StopConditions(max_tokens=64)):
            print(chunk.token_ids)

    async with KvEventPublisher(worker_id="w", model="llama-3-8b", block_size=16, transport="grpc",
                                indexers=["localhost:7051"]) as events:
        events.publish_stored(token_ids, [16, 16], block_hashes)
"""

from kvscout_client.blocking import BlockingBooking, BlockingRouter
from kvscout_client.booking import Booking
from kvscout_client.calls import NotGrpc, NotSecured
from kvscout_client.kv_publisher import KvEventPublisher, PublisherStatus
from kvscout_client.kv_publisher_thread import ThreadedKvEventPublisher
from kvscout_client.kv_push_router import KvPushRouter
from kvscout_client.options import OutputOptions, RouterOverride, SamplingOptions, StopConditions
from kvscout_client.results import (
    ActiveRequest,
    BusyThresholds,
    Candidate,
    Explanation,
    Failure,
    FaultOwner,
    FinishReason,
    FreeOutcome,
    GenerateChunk,
    HelperState,
    Pull,
    RegisteredWorker,
    RequestPhase,
    RouteDecision,
    RouterStatus,
    TokenLogprobs,
    Usage,
    WorkerHealth,
    WorkerLoad,
    WorkerRecord,
)
from kvscout_client.router import Router
from kvscout_client.tokens import Tokens
from kvscout_client.zmq_publisher import ZmqKvEventPublisher
from kvscout_common.hashing import MmItem
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.worker import WorkerSpec

__all__ = [
    "ActiveRequest",
    "BlockingBooking",
    "BlockingRouter",
    "Booking",
    "BusyThresholds",
    "Candidate",
    "ClientSecurity",
    "Explanation",
    "Failure",
    "FaultOwner",
    "FinishReason",
    "FreeOutcome",
    "GenerateChunk",
    "HelperState",
    "KvEventPublisher",
    "KvPushRouter",
    "MmItem",
    "NotGrpc",
    "NotSecured",
    "OutputOptions",
    "PublisherStatus",
    "Pull",
    "RegisteredWorker",
    "RequestPhase",
    "RouteDecision",
    "Router",
    "RouterOverride",
    "RouterStatus",
    "SamplingOptions",
    "StopConditions",
    "ThreadedKvEventPublisher",
    "TokenLogprobs",
    "Tokens",
    "Usage",
    "WorkerHealth",
    "WorkerLoad",
    "WorkerRecord",
    "WorkerSpec",
    "ZmqKvEventPublisher",
]
