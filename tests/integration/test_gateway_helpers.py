"""A gateway whose helpers die, hang, restart and drain: no request fails because of it, and answers say so."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.envoy_process import running_envoy
from support.gateway_stack import (
    CALL_SECONDS,
    MODEL,
    GatewayClient,
    Stack,
    connected,
    fresh_prompt,
    running_stack,
    until_all_indexed,
)
from support.process_metrics import scrape, sum_of
from support.processes import Running, eventually, running

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common import errors
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAUSE_SECONDS = 0.02
"""Between two requests: most of a machine is to be left for what they wait for."""


@dataclass
class Lasting:
    """A stack that survives what tests do to its helpers."""

    stack: Stack
    processes: AsyncExitStack

    async def restart_indexer(self) -> None:
        """A new process on the port of the one that was killed."""
        self.stack.indexer = await self._restart("kvscout_indexer.main", self.stack.indexer)

    async def restart_scheduler(self) -> None:
        """A new process on the port of the one that was killed."""
        self.stack.scheduler = await self._restart("kvscout_scheduler.main", self.stack.scheduler)

    async def _restart(self, module: str, before: Running) -> Running:
        return await self.processes.enter_async_context(running(module, "--port", str(before.ready["port"])))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting() -> AsyncIterator[Lasting]:
    flags = ("--endpoint-picker-port", "0", "--shutdown-delay-seconds", "0")
    async with running_stack(*flags) as stack, AsyncExitStack() as processes:
        yield Lasting(stack, processes)


async def kill(process: Running) -> None:
    process.process.kill()
    await process.process.wait()


@asynccontextmanager
async def load(client: GatewayClient) -> AsyncIterator[list[gateway_pb2.RouteResponse]]:
    """Requests all the time while the block runs, each of which must succeed; where they went."""
    routes: list[gateway_pb2.RouteResponse] = []
    stop = asyncio.Event()

    async def one_after_the_other() -> None:
        while not stop.is_set():
            got = await client.generate(fresh_prompt(64), max_tokens=4)
            assert len(got.token_ids) == 4
            routes.extend(got.routes)
            await asyncio.sleep(PAUSE_SECONDS)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(one_after_the_other())
        try:
            yield routes
        finally:
            stop.set()


@asynccontextmanager
async def http_load(stack: Stack, folder: Path) -> AsyncIterator[list[str]]:
    """The same over the OpenAI API and past the picker; why answers of the former say that they are degraded."""
    reasons: list[str] = []
    stop = asyncio.Event()
    picker = f"127.0.0.1:{stack.gateway.ready['endpoint_picker_port']}"
    hosts = [mocker.url.removeprefix("http://") for mocker in stack.mockers]
    async with running_envoy(folder, picker, hosts) as envoy, asyncio.TaskGroup() as group:

        async def one_after_the_other(url: str) -> None:
            while not stop.is_set():
                body = {"model": MODEL, "prompt": list(fresh_prompt(64)), "max_tokens": 4}
                async with envoy.http.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    assert (await response.json())["usage"]["completion_tokens"] == 4
                    reasons.extend(response.headers.getall("x-kvscout-degraded", []))
                await asyncio.sleep(PAUSE_SECONDS)

        for url in (f"http://127.0.0.1:{stack.gateway.ready['http_port']}", envoy.url):
            group.create_task(one_after_the_other(url))
        try:
            yield reasons
        finally:
            stop.set()


async def test_an_indexer_that_dies_under_load_costs_knowledge_only_and_comes_back_with_all_of_it(
    lasting: Lasting, tmp_path: Path
) -> None:
    stack = lasting.stack
    client, name = stack.client, f"indexer {stack.indexer.address}"
    prompt = fresh_prompt(160)
    await client.generate(prompt, pinned_worker_id="w1")
    await client.until_indexed(prompt, 10)
    async with load(client) as routes, http_load(stack, tmp_path) as degraded:
        await kill(stack.indexer)
        await eventually(_async(lambda: any(r.degraded for r in routes)), what="degraded answers")
        await eventually(_async(lambda: "indexer" in degraded), what="and over HTTP")
        [reason] = (await client.route(prompt)).degraded_reasons
        assert reason.startswith(name)
        await lasting.restart_indexer()

        async def as_before() -> bool:
            answer = await client.route(prompt)
            return (answer.worker.worker_id, answer.overlap_blocks, answer.degraded) == ("w1", 10, False)

        await eventually(as_before, what="overlaps again")

        async def all_told() -> bool:
            helpers = (await client.status()).helpers
            return all(helper.healthy and not helper.pending_registrations for helper in helpers)

        await eventually(all_told, what="every registration at every helper")
        status = await client.status()
        assert status.degraded["indexer"] > 0
        assert status.failures == 0
        samples = await scrape(stack.gateway)
        assert samples['kvscout_degraded_decisions_total{helper="indexer"}'] == status.degraded["indexer"]


async def test_an_indexer_that_hangs_is_not_waited_for_and_one_can_do_without_any(lasting: Lasting) -> None:
    stack = lasting.stack
    client = stack.client
    stack.indexer.process.send_signal(signal.SIGSTOP)
    try:
        answer = await client.route(fresh_prompt(64))
        assert answer.degraded
        assert (await client.generate(fresh_prompt(64))).route.degraded
        [indexer, scheduler] = (await client.status()).helpers
        assert (indexer.healthy, scheduler.healthy) == (False, True)
        assert indexer.failures >= 2
    finally:
        stack.indexer.process.send_signal(signal.SIGCONT)

    async def well() -> bool:
        return not (await client.route(fresh_prompt(64))).degraded

    await eventually(well)
    assert (await client.route(fresh_prompt(8))).num_blocks == 0  # nothing to ask for: not degraded either

    flags = ("--no-indexer", "--scheduler", stack.scheduler.address)
    async with (
        running("kvscout_gateway.main", *flags) as gateway,
        connected(gateway, stack.scheduler, stack.indexer) as lonely,
    ):
        await lonely.until_known("w0", "w1")
        answer = await lonely.route(fresh_prompt(64))
        assert (answer.degraded, answer.num_blocks) == (False, 4)


async def test_without_a_scheduler_workers_take_turns_until_it_is_back(lasting: Lasting) -> None:
    stack = lasting.stack
    client = stack.client
    async with load(client) as routes:
        await kill(stack.scheduler)
        await eventually(_async(lambda: sum(r.degraded for r in routes) > 8), what="degraded answers")
        turns = [await client.route(fresh_prompt(64), request_id="unbooked") for _ in range(4)]
        assert all(turn.degraded_reasons[0].startswith("scheduler") for turn in turns)
        for expected, fields in (
            (errors.InvalidArgument, {"pinned_worker_id": "w0", "allowed_worker_ids": ["w1"]}),
            (errors.NotFound, {"pinned_worker_id": "w7"}),
            (errors.Unavailable, {"allowed_worker_ids": ["w7"]}),
            (errors.FailedPrecondition, {"required_labels": {"zone": "c"}}),
            (errors.FailedPrecondition, {"lora_name": "unknown"}),
            (errors.NotFound, {"model": "nobody"}),
        ):
            with pytest.raises(expected):
                await client.route([1], **fields)
        with pytest.raises(errors.Unavailable):
            await call(client.stub.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id="unbooked"))
        await lasting.restart_scheduler()
        seen = len(routes)
        await eventually(lambda: any(not route.degraded for route in routes[seen:]))
        await client.route(fresh_prompt(64), request_id="booked")
        assert "booked" in {active.request.request_id for active in await client.active()}
        await call(client.stub.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id="booked"))

        async def all_known() -> bool:
            return len(await client.loads()) == 2

        await eventually(all_known)
    assert {route.worker.worker_id for route in routes if route.degraded} == {"w0", "w1"}
    assert (await client.status()).failures == 0


async def test_a_scheduler_that_restarted_counts_as_away_until_it_has_the_workers(lasting: Lasting) -> None:
    stack = lasting.stack
    async with load(stack.client) as routes:
        for _ in range(3):
            await kill(stack.scheduler)
            await lasting.restart_scheduler()
            seen = len(routes)
            await eventually(_async(partial(_any_decided, routes, seen)), what="a decision")
    reasons = {reason for route in routes for reason in route.degraded_reasons}
    assert all(reason.startswith(f"scheduler {stack.scheduler.address}: ") for reason in reasons)
    assert (await stack.client.status()).failures == 0


async def test_the_next_scheduler_decides_while_the_first_is_away() -> None:
    async with (
        running("kvscout_scheduler.main") as second,
        running_stack("--scheduler", second.address) as stack,
        connected(stack.gateway, second, stack.indexer) as at_second,
    ):
        client = stack.client
        async with load(client) as routes:
            await client.until_active()
            assert not await at_second.active()
            assert await stack.scheduler.stop() == 0  # SIGTERM: it drains
            await at_second.until_active()
            await client.route(fresh_prompt(64), request_id="booked at the second")
            async with running("kvscout_scheduler.main", "--port", str(stack.scheduler.ready["port"])):
                await client.until_active()
                name = "booked at the second"
                free = scheduler_pb2.FreeRequest(model=MODEL, request_id=name)
                mark = scheduler_pb2.MarkPrefillCompleteRequest(model=MODEL, request_id=name)
                assert (await call(client.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)).changed
                freed = await call(client.stub.Free, free, timeout=CALL_SECONDS)
                assert freed.outcome == scheduler_pb2.FREE_OUTCOME_FREED
                again = await call(client.stub.Free, free, timeout=CALL_SECONDS)
                assert again.outcome == scheduler_pb2.FREE_OUTCOME_ALREADY_FREED
                thresholds = types_pb2.SetBusyThresholdsRequest(model=MODEL, active_decode_blocks_threshold=0.9)
                await call(client.stub.SetBusyThresholds, thresholds)
                for scheduler in (client.scheduler, at_second.scheduler):
                    got = await call(scheduler.GetBusyThresholds, types_pb2.GetBusyThresholdsRequest(model=MODEL))
                    assert got.thresholds.active_decode_blocks_threshold == 0.9
        assert not [reason for route in routes for reason in route.degraded_reasons]
        assert (await client.status()).failures == 0
        await at_second.until_idle()


async def test_a_scheduler_that_ignores_caches_is_not_told_of_any() -> None:
    async with running_stack(scheduler_flags=("--kv-overlap-score-weight", "0")) as stack:
        client = stack.client
        prompt = fresh_prompt(160)
        await client.generate(prompt, pinned_worker_id="w1")
        await client.until_indexed(prompt, 10)

        async def not_asked() -> bool:
            before = _indexer_calls(await client.status())
            answer = await client.route(prompt, pinned_worker_id="w1")
            return answer.overlap_blocks == 0 and _indexer_calls(await client.status()) == before

        await eventually(not_asked)


def _indexer_calls(status: gateway_pb2.GatewayGetStatusResponse) -> int:
    return sum(helper.calls for helper in status.helpers if helper.kind == gateway_pb2.HELPER_KIND_INDEXER)


async def test_predicted_cached_tokens_are_the_engines_own_turn_by_turn() -> None:
    """Conversations that grow, in caches that are too small for all of them; engines that do not tell of misses."""
    seed = 20_260_101
    rng = random.Random(seed)
    small = ("--num-gpu-blocks", "150", "--prompt-tokens-details", "nonzero")
    async with running_stack(mockers=(small, small)) as stack:
        client = stack.client
        system = [rng.randrange(30_000) for _ in range(100)]
        conversations = [list(system) for _ in range(6)]
        predicted, cached, isl = [], [], 0
        for turn in range(36):
            prompt = conversations[turn % 6]
            prompt += [rng.randrange(30_000) for _ in range(rng.randrange(1, 60))]
            await until_all_indexed(stack)
            where = f"w{turn % 2}" if turn < 6 else ""  # else all would follow the first one's system prompt
            got = await client.generate(prompt, max_tokens=rng.randrange(1, 40), pinned_worker_id=where)
            assert got.usage is not None
            blocks = min(got.route.overlap_blocks, (len(prompt) - 1) // 16)
            predicted.append(blocks * 16)
            cached.append(got.usage.cached_tokens)
            isl += len(prompt)
            prompt += got.token_ids
        assert predicted == cached, f"seed {seed}"
        assert cached.count(0) > 1
        assert len(set(cached)) > 10
        status = await client.status()
        assert sum(w.checked for w in status.workers) == 36
        assert sum(w.mispredicted for w in status.workers) == 0
        assert sum(w.prompt_tokens for w in status.workers) == isl

        samples = await scrape(stack.gateway)
        assert sum_of(samples, "kvscout_reported_cached_tokens_total") == sum(cached)
        assert sum_of(samples, "kvscout_reported_prompt_tokens_total") == isl
        assert sum_of(samples, "kvscout_predictions_checked_total") == 36
        assert sum_of(samples, "kvscout_prediction_error_tokens_total") == 0
        of_worker = 'kvscout_reported_prompt_tokens_total{dp_rank="0",model="%s",tenant="default",worker="%s"}'
        assert {of_worker % (MODEL, name) for name in ("w0", "w1")} <= samples.keys()
        for stage in ("hash", "find_matches", "select", "total"):
            assert samples[f'kvscout_routing_latency_seconds_count{{stage="{stage}"}}'] == 36
        of_model = f'model="{MODEL}"'
        assert samples[f'kvscout_requests_total{{{of_model},outcome="ok",tenant="default"}}'] == 36
        assert samples[f'kvscout_ttft_seconds_count{{{of_model},tenant="default"}}'] == 36
        assert samples["kvscout_requests_in_flight"] == 0

        await call(client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id="w1"))
        samples = await scrape(stack.gateway)
        assert of_worker % (MODEL, "w1") not in samples


async def test_an_engine_that_only_pings_costs_three_requests_their_patience_and_none_its_life() -> None:
    flags = ("--engine-first-output-seconds", "1", "--engine-prefill-tokens-per-second", "1e6")
    async with running_stack(*flags, mockers=(("--mute-requests", "1"), ())) as stack:
        moved = 0
        while moved < 3:
            got = await stack.client.generate(fresh_prompt(64))
            assert (len(got.token_ids), got.route.worker.worker_id) == (4, "w1")
            moved += len(got.routes) - 1
        for _ in range(5):
            assert len((await stack.client.generate(fresh_prompt(64))).routes) == 1
        assert any("worker w0/0 fails" in warning for warning in (await stack.client.status()).service.warnings)
        await stack.client.until_idle()


def _any_decided(routes: list[gateway_pb2.RouteResponse], seen: int) -> bool:
    return any(not route.degraded for route in routes[seen:])


def _async(condition: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def asked() -> object:
        return condition()

    return asked
