"""A gateway that keeps what it was asked and answers what the test says, on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvscout.v1 import events_pb2, gateway_pb2, gateway_pb2_grpc, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.guard import Guard


class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """Answers of a gateway with one worker, "w0"."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.errors: dict[str, KvscoutError] = {}
        """By rpc name: raised instead of answering."""
        self.chunks: list[gateway_pb2.GenerateResponse] = []
        self.booked: bool | None = None
        """What Route says of it; None = nothing, as gateways of 0.1."""
        self.labels: dict[str, str] = {}
        """Of "w0" in the list of workers."""
        self.seconds_between_chunks = 0.0
        self.hang_after_chunks = False
        self.cancelled = asyncio.Event()
        self.address = ""

    def _take(self, name: str, request: Any) -> None:
        self.requests.append(request)
        if name in self.errors:
            raise self.errors[name]

    @property
    def last(self) -> Any:
        """The last request."""
        return self.requests[-1]

    async def Route(self, request: gateway_pb2.RouteRequest, context: Any) -> gateway_pb2.RouteResponse:
        self._take("Route", request)
        explanation = None
        if request.explain:
            rank = types_pb2.WorkerRank(worker_id="w0", dp_rank=1)
            candidate = scheduler_pb2.Candidate(worker=rank, eligible=True, device_blocks=3, cost=1.5)
            explanation = scheduler_pb2.Explanation(policy="kv", reason="least cost", candidates=[candidate])
        return gateway_pb2.RouteResponse(
            worker=types_pb2.WorkerRank(worker_id="w0", dp_rank=1),
            overlap_blocks=3,
            effective_overlap_blocks=3.5,
            http_endpoint="http://w0",
            num_blocks=4,
            block_size=16,
            cost=1.5,
            degraded=True,
            degraded_reasons=["indexer"],
            explanation=explanation,
            booked=self.booked,
        )

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self._take("Generate", request)
        try:
            for chunk in self.chunks:
                yield chunk
                await asyncio.sleep(self.seconds_between_chunks)
            if self.hang_after_chunks:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if "Generate.end" in self.errors:
            raise self.errors["Generate.end"]

    async def MarkPrefillComplete(
        self, request: scheduler_pb2.MarkPrefillCompleteRequest, context: Any
    ) -> scheduler_pb2.MarkPrefillCompleteResponse:
        self._take("MarkPrefillComplete", request)
        return scheduler_pb2.MarkPrefillCompleteResponse(changed=True)

    async def Free(self, request: scheduler_pb2.FreeRequest, context: Any) -> scheduler_pb2.FreeResponse:
        self._take("Free", request)
        return scheduler_pb2.FreeResponse(outcome=scheduler_pb2.FREE_OUTCOME_FREED)

    async def Renew(self, request: scheduler_pb2.RenewRequest, context: Any) -> scheduler_pb2.RenewResponse:
        self._take("Renew", request)
        return scheduler_pb2.RenewResponse(unknown=[i for i, ref in enumerate(request.requests) if "gone" in str(ref)])

    async def AddOutput(self, request: scheduler_pb2.AddOutputRequest, context: Any) -> scheduler_pb2.AddOutputResponse:
        self._take("AddOutput", request)
        return scheduler_pb2.AddOutputResponse(output_blocks=request.blocks + 1)

    async def ListActiveRequests(
        self, request: scheduler_pb2.ListActiveRequestsRequest, context: Any
    ) -> scheduler_pb2.ListActiveRequestsResponse:
        self._take("ListActiveRequests", request)
        active = scheduler_pb2.ActiveRequest(
            request=scheduler_pb2.RequestRef(request_id="r", model="m", role=types_pb2.ROLE_DECODE),
            worker=types_pb2.WorkerRank(worker_id="w0", dp_rank=1),
            phase=scheduler_pb2.REQUEST_PHASE_DECODE,
            blocks=7,
            age_seconds=1.5,
        )
        return scheduler_pb2.ListActiveRequestsResponse(requests=[active], total=1)

    async def ListFailures(
        self, request: gateway_pb2.ListFailuresRequest, context: Any
    ) -> gateway_pb2.ListFailuresResponse:
        self._take("ListFailures", request)
        failure = gateway_pb2.Failure(
            number=4,
            at_unix_seconds=1.5,
            request_id="r",
            tenant="default",
            model="m",
            front="Generate",
            status="UNAVAILABLE",
            cause="worker",
            owner=gateway_pb2.FAULT_OWNER_ENGINE,
            worker_ids=["w0", "w1"],
            message="the worker broke off",
        )
        return gateway_pb2.ListFailuresResponse(failures=[failure], total=1)

    async def GetLadder(self, request: gateway_pb2.GetLadderRequest, context: Any) -> gateway_pb2.GetLadderResponse:
        self._take("GetLadder", request)
        ladder = gateway_pb2.Ladder(
            tenant="default",
            model="m",
            requests=10,
            prompt_tokens=1_000,
            ideal_tokens=800,
            capacity_tokens=500,
            routing_tokens=450,
            predicted_tokens=400,
            actual_tokens=390,
            losses=[
                gateway_pb2.LadderLoss(kind=gateway_pb2.LADDER_LOSS_KIND_NEVER_SEEN, tokens=200),
                gateway_pb2.LadderLoss(kind=gateway_pb2.LADDER_LOSS_KIND_CAPACITY, tokens=300, gpu_seconds=1.5),
            ],
            gains=[gateway_pb2.LadderGain(capacity_factor=1.25, tokens=100)],
            seconds_per_token=0.005,
            sample_weight=1,
            workers=4,
            capacity_blocks=4_000,
        )
        return gateway_pb2.GetLadderResponse(ladders=[ladder], window_seconds=request.window_seconds or 300)

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
        self._take("RegisterWorker", request)
        return workers_pb2.RegisterWorkerResponse(created=True, worker=request.worker)

    async def UpdateWorker(
        self, request: workers_pb2.UpdateWorkerRequest, context: Any
    ) -> workers_pb2.UpdateWorkerResponse:
        self._take("UpdateWorker", request)
        return workers_pb2.UpdateWorkerResponse(worker=request.worker)

    async def RemoveWorker(
        self, request: workers_pb2.RemoveWorkerRequest, context: Any
    ) -> workers_pb2.RemoveWorkerResponse:
        self._take("RemoveWorker", request)
        return workers_pb2.RemoveWorkerResponse()

    async def DrainWorker(
        self, request: workers_pb2.DrainWorkerRequest, context: Any
    ) -> workers_pb2.DrainWorkerResponse:
        self._take("DrainWorker", request)
        return workers_pb2.DrainWorkerResponse(active_requests=2)

    async def KeepAlive(self, request: workers_pb2.KeepAliveRequest, context: Any) -> workers_pb2.KeepAliveResponse:
        self._take("KeepAlive", request)
        return workers_pb2.KeepAliveResponse(unknown_worker_ids=["gone"])

    async def ListWorkers(
        self, request: workers_pb2.ListWorkersRequest, context: Any
    ) -> workers_pb2.ListWorkersResponse:
        self._take("ListWorkers", request)
        worker = workers_pb2.Worker(worker_id="w0", model="m", block_size=16, labels=self.labels)
        return workers_pb2.ListWorkersResponse(
            workers=[
                workers_pb2.WorkerEntry(worker=worker, source=workers_pb2.REGISTRATION_SOURCE_FILE),
                workers_pb2.WorkerEntry(
                    worker=workers_pb2.Worker(worker_id="w1", model="m", block_size=16),
                    source=workers_pb2.REGISTRATION_SOURCE_RPC,
                    lease_remaining_seconds=7.5,
                ),
            ]
        )

    async def GetPotentialLoads(
        self, request: gateway_pb2.GatewayGetPotentialLoadsRequest, context: Any
    ) -> scheduler_pb2.GetPotentialLoadsResponse:
        self._take("GetPotentialLoads", request)
        rank = types_pb2.WorkerRank(worker_id="w0")
        health = types_pb2.WorkerHealth(state=types_pb2.WORKER_STATE_LEFT_OUT, cause="hangs", age_seconds=7)
        load = scheduler_pb2.WorkerLoad(
            worker=rank, potential_prefill_tokens=64, active_requests=1, busy=True, health=health
        )
        return scheduler_pb2.GetPotentialLoadsResponse(loads=[load])

    async def DumpEvents(
        self, request: gateway_pb2.DumpEventsRequest, context: Any
    ) -> AsyncIterator[events_pb2.KvEventBatch]:
        self._take("DumpEvents", request)
        run = events_pb2.StateRun(local_hashes=[1, 2, 3], engine_hashes=[4, 0, 6], copies=[1, 0, 2])
        for index in range(2):
            chunk = events_pb2.StateChunk(index=index, last=index == 1, runs=[run], history_incomplete=True)
            yield events_pb2.KvEventBatch(
                version=1, worker_id="w0", model="m", event_id=7, events=[events_pb2.KvEvent(state=chunk)]
            )

    async def RecordRequests(
        self, request: gateway_pb2.RecordRequestsRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.RecordRequestsResponse]:
        self._take("RecordRequests", request)
        one = gateway_pb2.RecordedRequest(model="m", prompt_tokens=130, tokens_per_hash=64, prefix_hashes=[1 << 20] * 2)
        yield gateway_pb2.RecordRequestsResponse(requests=[one], lost=3)

    async def GetBusyThresholds(
        self, request: types_pb2.GetBusyThresholdsRequest, context: Any
    ) -> types_pb2.GetBusyThresholdsResponse:
        self._take("GetBusyThresholds", request)
        read = types_pb2.BusyThresholds(model=request.model, tenant="default", active_prefill_tokens_threshold=0)
        return types_pb2.GetBusyThresholdsResponse(thresholds=read)

    async def SetBusyThresholds(
        self, request: types_pb2.SetBusyThresholdsRequest, context: Any
    ) -> types_pb2.SetBusyThresholdsResponse:
        self._take("SetBusyThresholds", request)
        changed = types_pb2.BusyThresholds(model=request.model, tenant="default", active_decode_blocks_threshold=0.5)
        return types_pb2.SetBusyThresholdsResponse(thresholds=changed)

    async def ListBusyThresholds(
        self, request: types_pb2.ListBusyThresholdsRequest, context: Any
    ) -> types_pb2.ListBusyThresholdsResponse:
        self._take("ListBusyThresholds", request)
        return types_pb2.ListBusyThresholdsResponse(thresholds=[types_pb2.BusyThresholds(model="m")])

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> gateway_pb2.GatewayGetStatusResponse:
        self._take("GetStatus", request)
        return gateway_pb2.GatewayGetStatusResponse(
            service=types_pb2.ServiceInfo(version="1.2.3", backend=types_pb2.BACKEND_NATIVE, warnings=["look here"]),
            helpers=[gateway_pb2.HelperStatus(kind=gateway_pb2.HELPER_KIND_INDEXER, address="a:1", last_error="late")],
            workers=[gateway_pb2.WorkerObservation(worker=types_pb2.WorkerRank(worker_id="w0"), requests=4)],
            requests=4,
            degraded={"indexer": 2},
        )


@asynccontextmanager
async def fake_gateway(
    *,
    tokens: TokenTable | None = None,
    add_port: Callable[[grpc.aio.Server], int] = lambda server: server.add_insecure_port("127.0.0.1:0"),
) -> AsyncIterator[FakeGateway]:
    """A fake gateway that serves for the length of the block."""
    server = grpc.aio.server(interceptors=(Guard(tokens),))
    gateway = FakeGateway()
    gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, server)
    gateway.address = f"localhost:{add_port(server)}"
    await server.start()
    try:
        yield gateway
    finally:
        await server.stop(None)
