"""The scheduler as a process: its endings, flags, leases and metrics."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.process_metrics import scrape
from support.processes import DEADLINE_SECONDS, Running, eventually, running

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import ResourceExhausted
from kvscout_common.rpc.channel import call, open_channel

MODEL = "m"
BLOCK = 16


class Client:
    """Rpcs of a scheduler process."""

    def __init__(self, process: Running, stub: scheduler_pb2_grpc.SchedulerStub) -> None:
        self.process = process
        self._stub = stub

    async def rpc(self, name: str, request: Any) -> Any:
        return await call(getattr(self._stub, name), request, timeout=10)

    async def book(self, request_id: str, **fields: Any) -> str:
        """Books a prompt of two blocks; the worker that got it."""
        answer = await self.rpc(
            "SelectAndReserve",
            scheduler_pb2.SelectRequest(**{"model": MODEL, "isl_tokens": 32, "request_id": request_id, **fields}),
        )
        worker_id: str = answer.worker.worker_id
        return worker_id

    async def status(self) -> scheduler_pb2.SchedulerGetStatusResponse:
        status: scheduler_pb2.SchedulerGetStatusResponse = await self.rpc("GetStatus", types_pb2.GetStatusRequest())
        return status


@asynccontextmanager
async def scheduler(*flags: str) -> AsyncIterator[Client]:
    """A real scheduler with the workers a and b."""
    async with running("kvscout_scheduler.main", *flags) as process:
        channel = open_channel(process.address)
        client = Client(process, scheduler_pb2_grpc.SchedulerStub(channel))
        for worker_id in ("a", "b"):
            worker = workers_pb2.Worker(worker_id=worker_id, model=MODEL, block_size=BLOCK)
            await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker))
        try:
            yield client
        finally:
            await channel.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_0_while_requests_are_active(number: signal.Signals) -> None:
    async with scheduler() as client:
        await client.book("r")
        client.process.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await client.process.process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--router-temperature", "-1"], "router_temperature"),
        (["--kv-overlap-score-weight", "nan"], "overlap_score_weight"),
        (["--active-decode-blocks-threshold", "1.5"], "active_decode_blocks_threshold"),
        (["--lease-seconds", "0"], "--lease-seconds"),
        (["--fairness-weight", "search"], "fairness_weight"),
        (["--fairness-weight", "search=0"], "fairness_weight"),
        (["--revision-weight", "95"], "revision_weight"),
        (["--revision-weight", "v1=-1"], "revision_weight"),
        (["--queue-aged-share", "1"], "--queue-aged-share"),
        (["--ttft-target-ms", "0"], "--ttft-target-ms"),
        (["--model-target", "m=500"], "model_target"),
        (["--model-target", "=500:20"], "model_target"),
        (["--model-target", "m=-1:20"], "model_target"),
        (["--router-mode", "nonsense"], "nonsense"),
    ],
)
async def test_flags_that_are_wrong_end_it_with_2(flags: list[str], says: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_scheduler.main", "--port", "0", "--metrics-port", "0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, log = await process.communicate()
    assert process.returncode == 2
    assert says in log.decode()


async def test_bookings_and_workers_end_with_their_leases() -> None:
    async with scheduler("--worker-grace-seconds", "0") as client:
        worker = workers_pb2.Worker(worker_id="leased", model="leased", block_size=BLOCK)
        await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=5))
        await client.book("on-the-leased-worker", model="leased")
        await client.book("short", lease_seconds=1)
        await client.book("long")

        async def ended() -> bool:
            return dict((await client.status()).expired) == {"lease": 1, "worker_gone": 1}

        await eventually(ended, what="the end of both leases")
        listed = await client.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest())
        assert [active.request.request_id for active in listed.requests] == ["long"]


async def test_its_flags_are_in_effect() -> None:
    flags = (
        "--router-mode",
        "round-robin",
        "--kv-overlap-score-weight",
        "0.5",
        "--active-prefill-tokens-threshold",
        "0",
    )
    async with scheduler(*flags) as client:
        status = await client.status()
        assert (status.policy, status.overlap_score_weight) == ("round-robin", 0.5)
        assert {await client.book("1"), await client.book("2")} == {"a", "b"}
        with pytest.raises(ResourceExhausted):
            await client.book("3")


async def test_its_metrics_are_what_is_booked() -> None:
    async with scheduler() as client:
        busy = await client.book(
            "r", block_hashes=[1], overlaps=types_pb2.Overlaps(worker_ids=["a"], device_blocks=[1])
        )
        samples = await scrape(client.process)
        labels = f'{{dp_rank="0",model="{MODEL}",role="aggregated",tenant="default",worker="{busy}"}}'
        assert busy == "a"
        assert samples["kvscout_active_requests" + labels] == 1
        assert samples["kvscout_active_prefill_tokens" + labels] == BLOCK
        assert samples["kvscout_active_decode_blocks" + labels] == 2
        assert samples["kvscout_expected_cached_tokens_total" + labels] == BLOCK
        assert samples["kvscout_expected_prompt_tokens_total" + labels] == 2 * BLOCK
        pool = f'{{model="{MODEL}",role="aggregated",tenant="default"}}'
        assert samples["kvscout_load_balance_score" + pool] == 1
        assert samples['kvscout_decisions_total{policy="kv-time"}'] == 1
        request = scheduler_pb2.FreeRequest(model=MODEL, request_id="r")
        await client.rpc("Free", request)
        samples = await scrape(client.process)
        assert samples["kvscout_active_requests" + labels] == 0
        assert samples["kvscout_active_decode_blocks" + labels] == 0


async def test_an_administrator_clears_cool_downs_from_the_command_line() -> None:
    async with scheduler() as client:
        failed = scheduler_pb2.ReportFailureRequest(worker=types_pb2.WorkerRank(worker_id="a"))
        await client.rpc("ReportFailure", failed)
        for says in ("a, rank 0 takes requests again\n", "nobody cooled down\n"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvscout_cli.main", "workers", "clear-cooldowns",
                "--scheduler", client.process.address, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, _ = await process.communicate()
            assert (process.returncode, output.decode()) == (0, says)
