"""Predictions from routing decisions, through real gateway, indexer, scheduler and engines."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from support.gateway_stack import CALL_SECONDS, MODEL, Stack, fresh_prompt, mocker_worker, running_stack
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

WITHOUT_EVENTS = ("--no-kv-events",)
BESIDE_EVENTS = ("--router-predicted-ttl", "60")
PREFILL_SECONDS = 0.2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def approximate() -> AsyncIterator[Stack]:
    async with running_stack("--indexer-timeout-ms", "500", mockers=[()] * 3, indexer_flags=WITHOUT_EVENTS) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed() -> AsyncIterator[Stack]:
    """Predictions beside events; those of w0 never arrive."""
    async with running_stack(mockers=[("--drop-events", "1"), ()], indexer_flags=BESIDE_EVENTS) as stack:
        silent = mocker_worker("w0", stack.mockers[0])
        for endpoint in silent.event_endpoints:
            endpoint.replay_endpoint = ""  # where they could be read all the same
        await stack.client.register(silent)
        yield stack


async def told(stack: Stack) -> gateway_pb2.HelperStatus:
    """What the gateway says of its indexer."""
    return next(
        helper for helper in (await stack.client.status()).helpers if helper.kind == gateway_pb2.HELPER_KIND_INDEXER
    )


async def until_told(stack: Stack, decisions: int) -> None:
    """Waits until the indexer was told of so many decisions."""

    async def delivered() -> bool:
        return (await told(stack)).decisions_delivered >= decisions

    await eventually(delivered, what=f"{decisions} decisions delivered")


async def routed_with_overlaps(stack: Stack, prompt: Sequence[int]) -> gateway_pb2.RouteResponse:
    """Where a prompt would go; asked again while the indexer takes longer than a request waits for it."""

    async def routed() -> gateway_pb2.RouteResponse | None:
        answer = await stack.client.route(prompt)
        return None if answer.degraded else answer

    answer: gateway_pb2.RouteResponse = await eventually(routed, what="an answer of the indexer")
    return answer


async def status_of_indexer(stack: Stack) -> indexer_pb2.IndexerGetStatusResponse:
    return await call(stack.client.indexer.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)


async def test_without_any_event_conversations_find_their_caches_again(approximate: Stack) -> None:
    seed = 20_261_121
    rng = random.Random(seed)

    async def hit_rate(override: types_pb2.RouterConfigOverride | None) -> float:
        """Cached / prompt tokens of conversations that take turns in no order, as the engines count them."""
        conversations = [list(fresh_prompt(160)) for _ in range(6)]
        turns = [prompt for prompt in conversations for _ in range(4)]
        rng.shuffle(turns)
        cached = total = 0
        for prompt in turns:
            before = (await told(approximate)).decisions_delivered
            got = await approximate.client.generate(prompt, router_config_override=override)
            await until_told(approximate, before + 1)
            assert got.usage is not None
            assert got.route.confirmed_overlap_blocks == 0
            cached, total = cached + got.usage.cached_tokens, total + len(prompt)
            prompt += [*got.token_ids, *fresh_prompt(48)]
        return cached / total

    in_turn = await hit_rate(types_pb2.RouterConfigOverride(policy="round-robin"))
    predicted = await hit_rate(None)
    assert predicted > in_turn + 0.15, f"{predicted} against {in_turn}, seed {seed}"
    status = await status_of_indexer(approximate)
    assert {source.state for source in status.sources} == {indexer_pb2.SOURCE_STATE_NONE}
    assert all("--no-kv-events" in source.reason for source in status.sources)
    [index] = status.indexes
    assert (index.blocks, index.memberships) == (0, 0)
    assert index.predictions > 100
    # Nothing confirms an overlap, so that there is nothing to check against the engines.
    assert sum(worker.checked for worker in (await approximate.client.status()).workers) == 0
    samples = await scrape(approximate.indexer)
    assert samples['kvscout_routed_prompts_total{outcome="recorded"}'] == 48


async def test_what_is_booked_counts_as_sent_and_a_query_does_not(approximate: Stack) -> None:
    prompt, before = fresh_prompt(160), (await told(approximate)).decisions_delivered
    assert (await approximate.client.route(prompt, pinned_worker_id="w1")).overlap_blocks == 0
    await approximate.client.route(prompt, pinned_worker_id="w1", request_id="sent")
    await until_told(approximate, before + 1)
    await call(approximate.client.stub.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id="sent"))
    answer = await routed_with_overlaps(approximate, prompt)
    assert (answer.worker.worker_id, answer.overlap_blocks, answer.confirmed_overlap_blocks) == ("w1", 10, 0)
    assert (await told(approximate)).decisions_delivered == before + 1


async def test_a_worker_that_only_changes_keeps_what_is_predicted_of_it(approximate: Stack) -> None:
    prompt, before = fresh_prompt(160), (await told(approximate)).decisions_delivered
    await approximate.client.generate(prompt, pinned_worker_id="w2")
    await until_told(approximate, before + 1)
    worker = (await approximate.client.known())["w2"].worker
    worker.labels["zone"] = "a"
    await approximate.client.register(worker)
    listed = await call(approximate.client.indexer.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=CALL_SECONDS)
    assert {entry.worker.labels["zone"] for entry in listed.workers if entry.worker.worker_id == "w2"} == {"a"}
    assert (await routed_with_overlaps(approximate, prompt)).overlap_blocks == 10


async def test_an_indexer_that_hangs_delays_nothing_and_what_waits_for_it_is_bounded(approximate: Stack) -> None:
    async def route_long(number: int) -> None:
        hashes = [number * 1_000_000 + block for block in range(1024)]
        request_id = f"long {number}"
        await approximate.client.route(block_hashes=hashes, block_size=16, request_id=request_id)
        free = scheduler_pb2.FreeRequest(model=MODEL, request_id=request_id)
        await call(approximate.client.stub.Free, free, timeout=CALL_SECONDS)

    before = await told(approximate)
    approximate.indexer.process.send_signal(signal.SIGSTOP)
    try:
        # 400 decisions of 1,024 blocks each: more than may wait.
        for start in range(0, 400, 50):
            await asyncio.gather(*(route_long(number) for number in range(start, start + 50)))

        async def visible() -> bool:
            return bool((await told(approximate)).decisions_problem)

        await eventually(visible)
        status = await told(approximate)
        assert 0 < status.decisions_waiting <= 256
        assert status.decisions_lost - before.decisions_lost >= 400 - 256 - 64  # a message of 64 may be under way
        address = approximate.indexer.address
        lost = (await scrape(approximate.gateway))[
            f'kvscout_reported_decisions_total{{indexer="{address}",outcome="lost"}}'
        ]
        assert status.decisions_lost <= lost <= (await told(approximate)).decisions_lost
    finally:
        approximate.indexer.process.send_signal(signal.SIGCONT)

    async def caught_up() -> bool:
        now = await told(approximate)
        return not now.decisions_waiting and not now.decisions_problem

    await eventually(caught_up)
    assert (await told(approximate)).decisions_delivered > before.decisions_delivered


async def test_a_request_that_had_to_move_is_predicted_where_it_runs(approximate: Stack) -> None:
    dead = approximate.mockers[1].process
    dead.kill()
    await dead.wait()
    prompt = fresh_prompt(160)

    async def predicted() -> bool:
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt)
        found = await call(approximate.client.indexer.FindMatches, request, timeout=CALL_SECONDS)
        rows = dict(zip(found.overlaps.worker_ids, found.overlaps.predicted_blocks, strict=False))
        return found.lower_bound and rows.get("w2") == 10

    got = await approximate.client.generate(prompt, allowed_worker_ids=["w1", "w2"])
    assert got.route.worker.worker_id == "w2"
    await eventually(predicted)


async def test_siblings_go_together_before_the_first_event(mixed: Stack) -> None:
    client, prompt = mixed.client, fresh_prompt(1600)
    before = (await told(mixed)).decisions_delivered
    first = await client.route(prompt, request_id="first")
    await until_told(mixed, before + 1)
    # What an engine takes for it: where computing costs no time, nothing is gained by a cache.
    await asyncio.sleep(PREFILL_SECONDS)
    mark = scheduler_pb2.MarkPrefillCompleteRequest(model=MODEL, request_id="first")
    await call(client.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)
    siblings = [await client.route([*prompt, *fresh_prompt(64)]) for _ in range(8)]
    found = {(s.worker.worker_id, s.overlap_blocks, s.confirmed_overlap_blocks) for s in siblings}
    assert found == {(first.worker.worker_id, 100, 0)}
    await call(client.stub.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id="first"), timeout=CALL_SECONDS)


async def test_only_what_events_confirm_is_checked_against_the_engine(mixed: Stack) -> None:
    prompt, before = fresh_prompt(160), (await told(mixed)).decisions_delivered
    await mixed.client.generate(prompt, pinned_worker_id="w0")
    await until_told(mixed, before + 1)
    again = await mixed.client.generate(prompt, pinned_worker_id="w0")
    assert (again.route.overlap_blocks, again.route.confirmed_overlap_blocks) == (10, 0)
    assert again.usage is not None
    assert again.usage.cached_tokens == 144
    [seen] = [worker for worker in (await mixed.client.status()).workers if worker.worker.worker_id == "w0"]
    assert (seen.checked, seen.mispredicted, seen.prediction_error_tokens) == (2, 1, 144)


async def test_events_take_the_place_of_predictions(mixed: Stack) -> None:
    prompt = fresh_prompt(160)
    await mixed.client.generate(prompt, pinned_worker_id="w1")

    async def confirmed() -> bool:
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt)
        rows = (await call(mixed.client.indexer.FindMatches, request, timeout=CALL_SECONDS)).overlaps
        answer = await mixed.client.route(prompt)
        overlap = (answer.worker.worker_id, answer.overlap_blocks, answer.confirmed_overlap_blocks)
        return overlap == ("w1", 10, 10) and not rows.predicted_blocks

    await eventually(confirmed)


async def test_a_prediction_ends_with_its_time() -> None:
    async with running_stack(mockers=[()], indexer_flags=(*WITHOUT_EVENTS, "--router-ttl", "3")) as stack:
        prompt = fresh_prompt(160)
        await stack.client.generate(prompt)
        await until_told(stack, 1)
        assert (await stack.client.route(prompt)).overlap_blocks == 10

        async def forgotten() -> bool:
            [index] = (await status_of_indexer(stack)).indexes
            return index.predictions == 0 and (await stack.client.route(prompt)).overlap_blocks == 0

        await eventually(forgotten)


async def test_where_caches_are_ignored_nobody_is_told() -> None:
    ignored = ("--kv-overlap-score-weight", "0")
    async with running_stack(mockers=[()], indexer_flags=WITHOUT_EVENTS, scheduler_flags=ignored) as stack:

        async def generate() -> gateway_pb2.HelperStatus:
            await stack.client.generate(fresh_prompt(160))
            return await told(stack)

        async def not_asked() -> bool:
            before = await told(stack)
            return (await generate()).calls == before.calls

        await eventually(not_asked)  # once the gateway knows of the scheduler's weight

        async def all_told() -> bool:
            return not (await told(stack)).decisions_waiting

        await eventually(all_told)
        delivered = (await told(stack)).decisions_delivered
        for _ in range(3):
            assert (await generate()).decisions_delivered == delivered
        asks = types_pb2.RouterConfigOverride(overlap_score_weight=1)
        await stack.client.generate(fresh_prompt(160), router_config_override=asks)
        await until_told(stack, delivered + 1)
        assert (await told(stack)).decisions_delivered == delivered + 1
