"""The dashboard's page as a gateway serves it, with a state that a test makes up: many workers, failures, hours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

from aiohttp import web

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import RankName, Service, ServiceKind, Snapshot
from kvscout_gateway.engines.causes import Cause
from kvscout_gateway.fronts.dashboard.document import state
from kvscout_gateway.fronts.dashboard.page import page
from kvscout_gateway.request import failures
from kvscout_gateway.request.failures import Failure, RequestSummary
from support.web_servers import web_server

MODEL = "llama-3-8b"
BLOCKS = 4096


def decision(
    request_id: str, at: float, has: int, others: Sequence[int] = (), costs: Sequence[float] = (1.0, 2.0, 3.0)
) -> scheduler_pb2.WatchDecisionsResponse:
    """A prompt of 100 blocks that went to w0, which had so many of them, as others had."""
    candidates = [
        scheduler_pb2.Candidate(
            worker=types_pb2.WorkerRank(worker_id=f"w{index}"),
            eligible=True,
            device_blocks=blocks,
            cost=cost,
            cost_text=f"{38 * cost:.0f} ms",
        )
        for index, (blocks, cost) in enumerate(zip((has, *others), costs, strict=False))
    ]
    return scheduler_pb2.WatchDecisionsResponse(
        decided_unix_seconds=at,
        request=scheduler_pb2.RequestRef(request_id=request_id, model=MODEL),
        isl_tokens=1600,
        decision=scheduler_pb2.SelectResponse(
            worker=types_pb2.WorkerRank(worker_id="w0"),
            block_size=16,
            overlap_blocks=has,
            uncached_tokens=1600 - 16 * has,
            explanation=scheduler_pb2.Explanation(
                policy="kv-time",
                reason="it is cheapest",
                candidates=candidates,
                summary=f"w0: cost 38 ms, with {16 * has:,} of 1,600 prompt tokens cached there; "
                "w1, which has more (1,280), has 3,000 prompt tokens ahead: 76 ms",
            ),
        ),
    )


def moment(draw: Random, workers: int, requests: int = 5_000, left_out: Sequence[int] = ()) -> Moment:
    """A kvscout with so many workers, some of which are left out."""
    ids = [f"w{index}" for index in range(workers)]
    ranks = [types_pb2.WorkerRank(worker_id=one) for one in ids]
    seen = [
        gateway_pb2.WorkerObservation(
            worker=rank,
            tenant="default",
            requests=requests // workers,
            prompt_tokens=1600 * requests // workers,
            cached_tokens=draw.randrange(1600 * requests // workers + 1),
            health=types_pb2.WorkerHealth(
                state=types_pb2.WORKER_STATE_LEFT_OUT if index in left_out else types_pb2.WORKER_STATE_OK,
                cause="does not answer its health checks" if index in left_out else "",
            ),
        )
        for index, rank in enumerate(ranks)
    ]
    entries = tuple(
        workers_pb2.WorkerEntry(
            worker=workers_pb2.Worker(
                worker_id=one, tenant="default", model=MODEL, role=types_pb2.ROLE_AGGREGATED, block_size=16
            )
        )
        for one in ids
    )
    sources = [
        indexer_pb2.SourceStatus(
            tenant="default",
            worker=rank,
            model=MODEL,
            state=indexer_pb2.SOURCE_STATE_LIVE,
            blocks=draw.randrange(BLOCKS),
        )
        for rank in ranks
    ]
    pool = scheduler_pb2.PoolLoad(
        model=MODEL, tenant="default", role=types_pb2.ROLE_AGGREGATED, prefill_token_seconds=75e-6
    )
    loads = {
        RankName("default", one, 0): scheduler_pb2.WorkerLoad(
            active_requests=draw.randrange(9), active_prefill_tokens=draw.randrange(5_000), total_kv_blocks=BLOCKS
        )
        for one in ids
    }
    counts = [
        gateway_pb2.FailureCount(cause="worker", owner=gateway_pb2.FAULT_OWNER_ENGINE, total=3),
        gateway_pb2.FailureCount(cause="request", owner=gateway_pb2.FAULT_OWNER_CALLER, total=5),
    ]
    status = gateway_pb2.GatewayGetStatusResponse(
        requests=requests, in_flight=7, failures=8, workers=seen, failure_counts=counts
    )
    services = (
        Service("10.0.0.1:7050", ServiceKind.GATEWAY, serving=True, status=status, workers=entries),
        Service(
            "10.0.0.2:7051",
            ServiceKind.INDEXER,
            serving=True,
            status=indexer_pb2.IndexerGetStatusResponse(sources=sources),
        ),
        Service(
            "10.0.0.3:7052",
            ServiceKind.SCHEDULER,
            serving=True,
            status=scheduler_pb2.SchedulerGetStatusResponse(policy="kv-time", pools=[pool]),
        ),
    )
    return Moment(1.0, Snapshot(services), loads)


def failure(number: int, at: float, cause: Cause = Cause.WORKER, *, answered: bool = False) -> Failure:
    """A request that failed on w0."""
    asked = RequestSummary("/v1/chat/completions", "default", MODEL, f"gen-8de15c117fc841678608a74c3c1d{number:04}")
    text = "the engine's connection broke before its first token"
    return Failure(number, at, asked, "502", failures.FailureKind(cause, answered), ("w0",), text, text, "")


def point(at: float, *, hit: float | None = 0.8, **more: Any) -> dict[str, Any]:
    """A span of ten seconds of the charts."""
    ttft = [40.0, 160.0] if hit is not None else [None, None]
    itl = [8.0, 9.5] if hit is not None else [None, None]
    rate = 4.0 if hit is not None else 0.0
    return {
        "at": at,
        "seconds": 10.0,
        "rate": rate,
        "failed": 0,
        "mistaken": 0,
        "hit": hit,
        "ttft": ttft,
        "itl": itl,
        **more,
    }


def ladder(model: str = MODEL, **more: Any) -> gateway_pb2.Ladder:
    """A ladder whose largest loss is that caches are too small."""
    lost = {"NEVER_SEEN": 200_000, "CAPACITY": 300_000, "SPLIT": 50_000, "MOVED": 50_000, "NOT_THERE": 10_000}
    numbers: dict[str, Any] = {
        "tenant": "default", "requests": 600, "prompt_tokens": 1_000_000, "ideal_tokens": 800_000,
        "capacity_tokens": 500_000, "routing_tokens": 450_000, "predicted_tokens": 400_000, "actual_tokens": 390_000,
        "workers": 4, "capacity_blocks": 4 * BLOCKS, "sample_weight": 2, "seconds_per_token": 75e-6,
    }  # fmt: skip
    made = gateway_pb2.Ladder(model=model, **(numbers | more))
    for kind, tokens in lost.items():
        value = gateway_pb2.LadderLossKind.Value(f"LADDER_LOSS_KIND_{kind}")
        made.losses.add(kind=value, tokens=tokens, gpu_seconds=75e-6 * tokens)
    for factor, tokens in ((1.25, 100_000), (1.5, 200_000), (2.0, 250_000), (4.0, 300_000)):
        made.gains.add(capacity_factor=factor, tokens=tokens)
    return made


def heat(workers: int, prefixes: int = 12) -> dict[str, Any]:
    """Shared prefixes of 64 blocks, of which each worker holds a part."""
    names = [f"w{index}/0" for index in range(workers)]
    return {
        "prefixes": [
            {"tenant": "default", "model": MODEL, "blocks": 64, "tokens": 1024, "requests": 9, "holders": 1}
            for _ in range(prefixes)
        ],
        "rows": [[one, *((16 * (row + each)) % 80 for each in range(prefixes))] for row, one in enumerate(names)],
        "workers": workers,
        "missed": "",
    }


def timeline(request_id: str, at: float, *workers: str, outcome: str = "ok") -> dict[str, Any]:
    """A request that took a second a worker."""
    return {
        "at": at,
        "request": request_id,
        "model": MODEL,
        "outcome": outcome,
        "seconds": float(len(workers)),
        "ttft": len(workers) - 0.6,
        "attempts": [
            {
                "worker": one, "ends": [begin + 0.001, begin + 0.002, begin + 0.1, begin + 0.4, begin + 1.0],
                "prompt": 1600, "cached": 960, "output": 50,
            }
            for begin, one in enumerate(workers)
        ],
    }  # fmt: skip


class ScriptedDashboard:
    """What pages are sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.streams: list[asyncio.Queue[bytes]] = []
        self.latest: dict[str, bytes] = {}

    def send(self, kind: str, document: Any) -> int:
        """Sends an event to all pages, and to those that come; gives its size in bytes."""
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        self.latest[kind] = f"event: {kind}\ndata: {text}\n\n".encode()
        for one in self.streams:
            one.put_nowait(self.latest[kind])
        return len(text)

    def show(self, now: Moment, at: float, *decisions: scheduler_pb2.WatchDecisionsResponse, **more: Any) -> int:
        """Sends a state; gives its size in bytes."""
        document = state(now, None, decisions) | {"at": at, "version": "1.0", "gateway": "10.0.0.1:7050"}
        possible = {"share": 0.97, "decisions": len(decisions)}
        return self.send("state", document | {"span": point(at), "possible": possible} | more)


@asynccontextmanager
async def scripted_dashboard() -> AsyncIterator[ScriptedDashboard]:
    """A page and its stream, on loopback."""
    served = ScriptedDashboard("")

    async def show(_: web.Request) -> web.Response:
        headers, body = page()
        return web.Response(body=body, headers=dict(headers))

    async def watch(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        for event in served.latest.values():
            queue.put_nowait(event)
        served.streams.append(queue)
        try:
            with suppress(ConnectionError):
                while True:
                    await response.write(await queue.get())
        finally:
            served.streams.remove(queue)
        return response

    app = web.Application()
    app.add_routes([web.get("/", show), web.get("/dashboard/events", watch)])
    async with web_server(app, shutdown_timeout=0.1) as served.url:
        yield served
