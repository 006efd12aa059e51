"""What runs stays booked, once and exactly, whatever happens to gateways and schedulers; and ends at zeros."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from aiohttp import web
from support.gateway_stack import (
    MODEL,
    Answer,
    GatewayClient,
    Stack,
    connected,
    fresh_prompt,
    mocker_worker,
    running_stack,
)
from support.nats_server import nats_server
from support.process_metrics import scrape
from support.processes import Running, eventually, running
from support.scripted_engine import answer, begin, scripted_engine, send, send_tokens

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common import errors
from kvscout_common.hashing import block_hashes
from kvscout_common.rpc.channel import call

PAUSE_SECONDS = 0.01
"""Between two requests: most of a machine is to be left for what they wait for."""
GRACE_SECONDS = 10.0
PROMPT_TOKENS = 100
"""Of each request that runs."""


class Holding:
    """An engine that gives no second token, and of prompts that begin with 0 not even the first, before it may."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.arrived = 0
        """Requests."""

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.arrived += 1
        if self.goes_on.is_set():
            return await answer(request, body)
        response = await begin(request)
        if body["prompt"][0] != 0:
            await send_tokens(response, 1)
        await self.goes_on.wait()
        await send_tokens(response, 2, finish="length")
        await send(response, choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": 2})
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def holding(*gateway_flags: str, **options: Any) -> AsyncIterator[tuple[Stack, Holding]]:
    """A stack with two workers, "a" and "b", on an engine that holds what runs."""
    script = Holding()
    async with (
        scripted_engine(script) as engine,
        running_stack("--no-indexer", *gateway_flags, mockers=(), **options) as stack,
    ):
        for name in ("a", "b"):
            await stack.client.register(worker(name, engine.url))
        await until_streaming(stack.client, stack.gateway)
        try:
            yield stack, script
        finally:
            script.goes_on.set()


def worker(name: str, url: str, **fields: Any) -> workers_pb2.Worker:
    return workers_pb2.Worker(worker_id=name, model=MODEL, block_size=16, http_endpoint=url, **fields)


async def until_streaming(client: GatewayClient, gateway: Running, scheduler: str = "") -> None:
    """Waits until a gateway has its stream to a scheduler open."""

    async def open_there() -> bool:
        helpers = (await client.status()).helpers
        return any(helper.stream_connected and scheduler in ("", helper.address) for helper in helpers)

    await eventually(open_there, what="a stream")


class Runs:
    """Requests that run until they are let go."""

    def __init__(self, client: GatewayClient, script: Holding) -> None:
        self._client = client
        self._script = script
        self.calls: list[asyncio.Task[Answer]] = []
        self.prefills = 0

    async def start(self, count: int, *, prefill: bool = False) -> None:
        """Starts so many, of which the engine gives no token if it is a prefill; returns once they are dispatched."""
        for _ in range(count):
            prompt = [0, *fresh_prompt(PROMPT_TOKENS - 1)] if prefill else fresh_prompt(PROMPT_TOKENS)
            got, arrived = Answer(), self._script.arrived
            call = asyncio.create_task(self._run(prompt, got))
            self.calls.append(call)
            self.prefills += prefill

            async def begun(call: Any = call, got: Answer = got, arrived: int = arrived) -> bool:
                # Where it runs comes with the first token, so that of a prefill only its engine knows.
                return call.done() or bool(got.token_ids) or (prefill and self._script.arrived > arrived)

            await eventually(begun, what="a request to be dispatched")
            if call.done():
                await call  # it holds until it is let go: this raises why it did not

    async def _run(self, prompt: Any, got: Answer) -> Answer:
        async for message in self._client.start(prompt, max_tokens=4):
            got.add(message)
        return got

    async def ended(self) -> list[Answer]:
        """Their answers; none failed."""
        return list(await asyncio.gather(*self.calls))


async def loads_of(runs: Runs, client: GatewayClient) -> list[tuple[int, int, int]]:
    """Loads, once a scheduler shows all that runs, and was told of every first token."""

    async def told() -> bool:
        requests, prefill_tokens, _ = map(sum, zip(*await client.loads(), strict=True))
        return (requests, prefill_tokens) == (len(runs.calls), PROMPT_TOKENS * runs.prefills)

    await eventually(told, what=f"{len(runs.calls)} requests, {runs.prefills} without a token")
    return sorted(await client.loads())


async def until_loads(client: GatewayClient, loads: list[tuple[int, int, int]]) -> None:
    async def equal() -> bool:
        return sorted(await known_loads(client)) == sorted(loads)

    await eventually(equal, what=f"loads {loads}")


async def known_loads(client: GatewayClient) -> list[tuple[int, int, int]]:
    try:
        return await client.loads()
    except (errors.NotFound, errors.Unavailable):
        return []  # restarted, the workers are under way


async def ended_by_themselves(client: GatewayClient) -> dict[str, int]:
    status = await call(client.scheduler.GetStatus, types_pb2.GetStatusRequest(), timeout=20)
    return dict(status.expired)


@asynccontextmanager
async def short_requests(client: GatewayClient) -> AsyncIterator[list[gateway_pb2.RouteResponse]]:
    """Route all the time while the block runs; none may fail."""
    routes: list[gateway_pb2.RouteResponse] = []
    stop = asyncio.Event()

    async def one_after_the_other() -> None:
        while not stop.is_set():
            routes.append(await client.route(fresh_prompt(64)))
            await asyncio.sleep(PAUSE_SECONDS)

    async with asyncio.TaskGroup() as group:
        group.create_task(one_after_the_other())
        try:
            yield routes
        finally:
            stop.set()


async def test_what_a_killed_gateway_had_in_flight_ends_ten_seconds_later_and_none_earlier() -> None:
    async with holding() as (stack, script):
        helpers = ("--no-indexer", "--scheduler", stack.scheduler.address)
        async with (
            running("kvscout_gateway.main", *helpers) as gateway,
            connected(gateway, stack.scheduler, stack.indexer) as client,
        ):
            await client.until_known("a", "b")
            await until_streaming(client, gateway)
            runs = Runs(client, script)
            await runs.start(100)
            others = Runs(stack.client, script)  # of a gateway that lives
            await others.start(1)
            active = await client.active()
            assert len(active) == 101
            assert not any(request.HasField("lease_remaining_seconds") for request in active)
            assert len({request.owner_id for request in active}) == 2
            killed_at = time.monotonic()
            gateway.process.kill()
            await gateway.process.wait()
            for one in runs.calls:
                with pytest.raises(grpc.aio.AioRpcError):
                    await one

            async def fewer() -> bool:
                return len(await client.active()) < 101

            await eventually(fewer, what="the first one to end")
            assert time.monotonic() - killed_at >= GRACE_SECONDS

            async def one_left() -> bool:
                return len(await client.active()) == 1

            await eventually(one_left)
            assert await ended_by_themselves(client) == {"owner_gone": 100}
        script.goes_on.set()
        await others.ended()


async def test_a_scheduler_that_is_killed_and_restarted_learns_what_runs() -> None:
    async with holding() as (stack, script), AsyncExitStack() as processes:
        client = stack.client
        runs = Runs(client, script)
        await runs.start(10)
        await runs.start(6, prefill=True)
        await eventually(lambda: prefilling(client, 6))
        assert tuple(map(sum, zip(*await client.loads(), strict=True))) == (16, 600, 16 * 7)
        async with short_requests(client) as routes:
            stack.scheduler.process.kill()
            await stack.scheduler.process.wait()
            await eventually(lambda: _now(any(route.degraded for route in routes)), what="degraded answers")
            await runs.start(2)  # placed without a scheduler
            again = running("kvscout_scheduler.main", "--port", str(stack.scheduler.ready["port"]))
            stack.scheduler = await processes.enter_async_context(again)

            async def learnt() -> bool:
                loads = await known_loads(client)
                sums = tuple(map(sum, zip(*loads, strict=True)))
                return sums == (18, 600, 16 * 7 + 2 * 7)

            await eventually(learnt, what="what runs, and no more")

        async def all_acknowledged() -> gateway_pb2.HelperStatus | None:
            [helper] = (await client.status()).helpers
            return helper if helper.rebooked >= 18 else None

        helper = await eventually(all_acknowledged, what="the scheduler's answers to what was booked again")
        samples = await scrape(stack.gateway)
        name = f'{{scheduler="{helper.address}"}}'
        assert samples["kvscout_rebooked_requests_total" + name] == 18
        assert samples["kvscout_scheduler_stream_connects_total" + name] == 2
        script.goes_on.set()
        assert all(got.token_ids[-1] == 2 for got in await runs.ended())
        await client.until_idle()
        assert await ended_by_themselves(client) == {}
        assert (await client.status()).failures == 0


async def test_a_scheduler_that_hangs_for_a_while_loses_none_and_books_none_twice() -> None:
    async with holding() as (stack, script):
        client = stack.client
        runs = Runs(client, script)
        await runs.start(8)
        before = await loads_of(runs, client)
        names = {(active.request.request_id, active.request.attempt_id) for active in await client.active()}
        stack.scheduler.process.send_signal(signal.SIGSTOP)
        try:
            assert (await client.route(fresh_prompt(64))).degraded  # not failed
            await eventually(lambda: _stream_gone(client))
        finally:
            stack.scheduler.process.send_signal(signal.SIGCONT)
        await until_streaming(client, stack.gateway)
        await until_loads(client, before)
        assert {(active.request.request_id, active.request.attempt_id) for active in await client.active()} == names
        script.goes_on.set()
        await runs.ended()
        await client.until_idle()
        assert await ended_by_themselves(client) == {}


async def test_what_runs_moves_to_the_next_scheduler_and_back_to_the_first_when_that_is_stable() -> None:
    async with (
        running("kvscout_scheduler.main") as second,
        holding("--scheduler", second.address) as (stack, script),
        connected(stack.gateway, second, stack.indexer) as at_second,
    ):
        client, port = stack.client, str(stack.scheduler.ready["port"])
        await until_streaming(client, stack.gateway, stack.scheduler.address)
        runs = Runs(client, script)
        await runs.start(6)
        await runs.start(2, prefill=True)
        before = await loads_of(runs, client)
        assert not await at_second.active()
        async with short_requests(client) as routes:
            stack.scheduler.process.kill()
            await stack.scheduler.process.wait()
            await until_loads(at_second, before)
            await runs.start(2)
            moved = await loads_of(runs, at_second)
            async with running("kvscout_scheduler.main", "--port", port) as flapping:
                await until_registered(client)
                assert not await client.active(), "the gateway does not return to it at once"
                flapping.process.kill()
                await flapping.process.wait()
            async with running("kvscout_scheduler.main", "--port", port):
                await until_loads(client, moved)
                await until_streaming(client, stack.gateway, stack.scheduler.address)
                connects = [helper.stream_connects for helper in (await client.status()).helpers]
                assert connects == [2, 1]
                script.goes_on.set()
                await runs.ended()
                await client.until_idle()
                await at_second.until_idle()  # within its grace time
                assert await ended_by_themselves(client) == {}
        assert not any(route.degraded for route in routes)
        assert (await client.status()).failures == 0


async def test_a_scheduler_that_drains_hands_over_before_it_ends() -> None:
    async with (
        running("kvscout_scheduler.main") as second,
        holding("--scheduler", second.address) as (stack, script),
        connected(stack.gateway, second, stack.indexer) as at_second,
    ):
        client = stack.client
        await until_streaming(client, stack.gateway, stack.scheduler.address)
        runs = Runs(client, script)
        await runs.start(6)
        before = await loads_of(runs, client)
        async with short_requests(client) as routes:
            assert await stack.scheduler.stop() == 0
            await until_loads(at_second, before)
        assert not any(route.degraded for route in routes)
        script.goes_on.set()
        await runs.ended()
        await at_second.until_idle()
        assert await ended_by_themselves(at_second) == {}


async def test_a_replica_takes_over_what_it_knows_and_nothing_is_booked_anew() -> None:
    async with nats_server() as nats:
        replica = ("--nats-server", nats.url, "--router-replica-sync")
        async with (
            running("kvscout_scheduler.main", *replica) as second,
            holding("--scheduler", second.address, scheduler_flags=replica) as (stack, script),
            connected(stack.gateway, second, stack.indexer) as at_second,
        ):
            client = stack.client
            await until_streaming(client, stack.gateway, stack.scheduler.address)
            runs = Runs(client, script)
            await runs.start(6)
            await runs.start(2, prefill=True)
            await eventually(lambda: prefilling(client, 2))
            before = await loads_of(runs, client)
            await until_loads(at_second, before)  # as mirrors
            stack.scheduler.process.kill()
            await stack.scheduler.process.wait()
            await until_streaming(client, stack.gateway, second.address)
            assert sorted(await at_second.loads()) == before
            assert [helper.rebooked for helper in (await client.status()).helpers] == [0, 0]
            await runs.start(1)
            script.goes_on.set()
            await runs.ended()
            await at_second.until_idle()
            assert await ended_by_themselves(at_second) == {}


@asynccontextmanager
async def queueing(*gateway_flags: str) -> AsyncIterator[tuple[Stack, Holding, asyncio.Task[Answer]]]:
    """A stack whose only worker has prefill work enough, and the request that it is."""
    script = Holding()
    async with (
        scripted_engine(script) as engine,
        running_stack(
            *gateway_flags,
            mockers=(),
            scheduler_flags=("--router-queue-threshold", "0.5"),
            indexer_flags=("--router-predicted-ttl", "60"),
        ) as stack,
    ):
        client = stack.client
        await client.register(worker("a", engine.url, max_num_batched_tokens=100))
        await until_streaming(client, stack.gateway)
        first = asyncio.create_task(client.generate([0] * 100))
        await eventually(lambda: prefilling(client, 1))
        try:
            yield stack, script, first
        finally:
            script.goes_on.set()


async def test_who_waits_in_line_is_answered_late_with_overlaps_of_then() -> None:
    async with queueing() as (stack, script, first):
        client = stack.client
        prompt = fresh_prompt(160)
        waiting = asyncio.create_task(client.generate(prompt))
        routing = asyncio.create_task(client.route(fresh_prompt(16), request_id="by a caller"))
        await eventually(lambda: waiting_in_line(client, 2))
        await publish(client, prompt)
        await until_refreshed(client)
        assert not waiting.done()
        assert not routing.done()
        script.goes_on.set()
        await first
        route = (await waiting).route
        assert (route.degraded, route.overlap_blocks) == (False, 10)
        assert not (await routing).degraded
        free = scheduler_pb2.FreeRequest(model=MODEL, request_id="by a caller")
        await call(client.stub.Free, free, timeout=20)
        await client.until_idle()


async def test_what_is_checked_are_the_overlaps_on_which_the_worker_was_chosen() -> None:
    """The worker's cache was predicted to have its prompt, and got it while the request waited in line."""
    async with running_stack(
        mockers=[()],
        scheduler_flags=("--router-queue-threshold", "0.5"),
        indexer_flags=("--router-predicted-ttl", "60"),
    ) as stack:
        client, [mocker] = stack.client, stack.mockers
        await client.register(mocker_worker("w0", mocker, max_num_batched_tokens=100))
        await until_streaming(client, stack.gateway)
        await client.route(fresh_prompt(100), request_id="fills it")
        prompt = fresh_prompt(160)
        await publish(client, prompt, "w0")
        waiting = asyncio.create_task(client.generate(prompt))
        await eventually(lambda: waiting_in_line(client, 1))
        await mocker.complete(prompt.tolist(), max_tokens=1)
        await client.until_indexed(prompt, 10)
        await until_refreshed(client)
        await call(client.stub.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id="fills it"), timeout=20)
        got = await waiting
        assert got.usage is not None
        assert (got.route.confirmed_overlap_blocks, got.usage.cached_tokens) == (10, 144)
        [seen] = (await client.status()).workers
        assert (seen.checked, seen.mispredicted) == (1, 0)


async def test_who_leaves_the_line_leaves_nothing_and_nobody_waits_for_ever() -> None:
    async with queueing("--queue-wait-seconds", "2") as (stack, script, first):
        client = stack.client
        gone = client.start(fresh_prompt(64))
        reading = asyncio.ensure_future(gone.read())
        await eventually(lambda: waiting_in_line(client, 1))
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: waiting_in_line(client, 0))
        for patient in (client.generate(fresh_prompt(64)), client.route(fresh_prompt(64), request_id="patient")):
            with pytest.raises((grpc.aio.AioRpcError, errors.ResourceExhausted)) as refused:
                await patient
            if isinstance(refused.value, grpc.aio.AioRpcError):
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "1"
        await eventually(lambda: waiting_in_line(client, 0))
        assert len(await client.active()) == 1
        script.goes_on.set()
        await first
        await client.until_idle()


async def test_who_waits_at_a_scheduler_that_dies_waits_at_the_next_one() -> None:
    async with queueing() as (stack, script, first):
        client = stack.client
        waiting = asyncio.create_task(client.generate(fresh_prompt(64)))
        await eventually(lambda: waiting_in_line(client, 1))
        flags = ("--router-queue-threshold", "0.5", "--port", str(stack.scheduler.ready["port"]))
        stack.scheduler.process.kill()
        await stack.scheduler.process.wait()
        async with running("kvscout_scheduler.main", *flags):
            # In line again, or placed without a scheduler if that took too long: it does not fail.
            await eventually(lambda: _booked(client, 1), what="the first one to be booked again")
            script.goes_on.set()
            await first
            await waiting
            await client.until_idle()


async def prefilling(client: GatewayClient, count: int) -> bool:
    active = await client.active()
    return sum(one.phase == scheduler_pb2.REQUEST_PHASE_PREFILL for one in active) == count


async def waiting_in_line(client: GatewayClient, count: int) -> bool:
    active = await client.active()
    return sum(one.phase == scheduler_pb2.REQUEST_PHASE_QUEUED for one in active) == count


async def _booked(client: GatewayClient, count: int) -> bool:
    try:
        return sum(load[0] for load in await known_loads(client)) >= count
    except errors.KvscoutError:
        return False


async def until_registered(client: GatewayClient) -> None:
    await eventually(lambda: _has_workers(client), what="workers registered")


async def _has_workers(client: GatewayClient) -> bool:
    return len(await known_loads(client)) == 2


async def _stream_gone(client: GatewayClient) -> bool:
    return not any(helper.stream_connected for helper in (await client.status()).helpers)


async def _now(value: bool) -> bool:
    return value


async def calls_of_indexer(client: GatewayClient) -> int:
    return sum(
        helper.calls for helper in (await client.status()).helpers if helper.kind == gateway_pb2.HELPER_KIND_INDEXER
    )


async def until_refreshed(client: GatewayClient) -> None:
    """Waits until those that wait were sent again with overlaps of now: who asks a second time has sent the first."""
    before = await calls_of_indexer(client)

    async def asked_twice() -> bool:
        return await calls_of_indexer(client) >= before + 2

    await eventually(asked_twice, what="overlaps to be refreshed")


async def publish(client: GatewayClient, prompt: Any, worker_id: str = "a") -> None:
    """Tells the indexer that the prompt went to a worker."""
    routed = indexer_pb2.RoutedPrompt(block_hashes=block_hashes(prompt.tobytes(), 16))
    routed.worker.worker_id = worker_id
    request = indexer_pb2.RecordRoutingRequest(model=MODEL, prompts=[routed])
    assert (await call(client.indexer.RecordRouting, request, timeout=20)).predicted_blocks == 10
