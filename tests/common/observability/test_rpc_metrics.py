"""Calls count by how they ended, over either transport, under names that a dashboard for gRPC already knows."""

import asyncio

import grpc
import pytest
from support.process_metrics import scrape, sum_of
from support.processes import running

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common import __version__
from kvscout_common.hashing import native_available
from kvscout_common.observability.rpc_metrics import BUCKETS, RpcTimes

SCHEDULER = 'grpc_service="kvscout.v1.Scheduler"'


def test_a_methods_buckets_add_up() -> None:
    times = RpcTimes()
    method = times.method("/p.S/M")
    for code in (grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
        method.ended(code, started=0.0)  # long ago
    handled, seconds = times.collect()
    assert {sample.labels["grpc_code"]: sample.value for sample in handled.samples} == {"OK": 2, "NOT_FOUND": 1}
    by_bound = {sample.labels["le"]: sample.value for sample in seconds.samples if "le" in sample.labels}
    assert by_bound["+Inf"] == 3
    assert len(by_bound) == len(BUCKETS) + 1
    assert times.method("/p.S/M") is method


@pytest.mark.parametrize("transport", ["grpcio", *(["native"] if native_available() else [])])
async def test_every_end_of_a_call_is_counted_once(transport: str) -> None:
    async with (
        running("kvscout_scheduler.main", "--rpc-transport", transport) as process,
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        await stub.GetStatus(types_pb2.GetStatusRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Free(scheduler_pb2.FreeRequest())
        watching = stub.WatchDecisions(scheduler_pb2.WatchDecisionsRequest())
        await watching.initial_metadata()
        watching.cancel()

        async def counted() -> dict[str, float | None]:
            samples = await scrape(process)
            assert sum_of(samples, "grpc_server_handling_seconds_count") == sum_of(samples, "grpc_server_handled_total")
            return {
                code: samples.get(f'grpc_server_handled_total{{grpc_code="{code}",grpc_method="{method}",{SCHEDULER}}}')
                for method, code in (
                    ("GetStatus", "OK"),
                    ("Free", "INVALID_ARGUMENT"),
                    ("WatchDecisions", "CANCELLED"),
                )
            }

        async with asyncio.timeout(20):
            while set((found := await counted()).values()) != {1.0}:
                assert None in found.values(), found
                await asyncio.sleep(0.05)


async def test_a_process_tells_its_build_and_what_it_takes() -> None:
    async with running("kvscout_scheduler.main") as process:
        samples = await scrape(process)
    [build] = [name for name in samples if name.startswith("kvscout_build_info")]
    assert f'service="scheduler",version="{__version__}"' in build
    assert samples["process_open_fds"] > 3
    assert samples["process_resident_memory_bytes"] > 1 << 20
