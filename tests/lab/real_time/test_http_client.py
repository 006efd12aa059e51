"""A workload of the laboratory as clients send it: prompts share what they share there, lengths nobody else reads."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from support.mocker_process import MockerProcess, running_mocker

from kvscout_common.http.json_fields import Fields
from kvscout_gateway.fronts.outputs import output_of
from kvscout_lab.real_time.apis import MAX_BOUND, Api, Chats, Completions, Messages, Responses
from kvscout_lab.real_time.http_client import HttpReplay, first_prompt, new_tokens
from kvscout_lab.workloads.clients import Clients, as_clients_ask
from kvscout_lab.workloads.workload import Flow, Nodes, Turn, Workload

BLOCK = 16


@pytest_asyncio.fixture(loop_scope="function")
async def mocker() -> AsyncIterator[MockerProcess]:
    async with running_mocker("--step-base-ms", "1", "--prefill-us-per-token", "1") as process:
        yield process


def flow(nodes: Nodes, system: str, *lengths: tuple[int, int], start: float = 0.0) -> Flow:
    """Turns of so many new prompt tokens and output tokens, behind three blocks of a system prompt."""
    turns: list[Turn] = []
    chain, tokens = nodes.chain([system] * 3), 0
    for new, output in lengths:
        prompt = tokens + new
        tokens = prompt + output
        chain = nodes.extend(chain, tokens // BLOCK)
        turns.append(Turn(chain, prompt, output, 0.0))
    return Flow(start, tuple(turns))


def test_prompts_begin_alike_where_they_do_in_the_laboratory() -> None:
    nodes = Nodes()
    one, two, other = flow(nodes, "a", (70, 5)), flow(nodes, "a", (70, 5)), flow(nodes, "b", (70, 5))
    first, second, third = (first_prompt(each, number, BLOCK) for number, each in enumerate((one, two, other)))
    assert len(first) == len(second) == len(third) == 70
    assert first[: 3 * BLOCK] == second[: 3 * BLOCK]
    assert first[3 * BLOCK : 4 * BLOCK] != second[3 * BLOCK : 4 * BLOCK]
    assert first[4 * BLOCK :] != second[4 * BLOCK :], "what follows the last complete block"
    assert first[:BLOCK] != third[:BLOCK]
    assert first == first_prompt(one, 0, BLOCK)


def test_later_prompts_are_as_long_as_in_the_laboratory() -> None:
    turns = flow(Nodes(), "a", (70, 5), (20, 9), (33, 2))
    assert [len(each) for each in new_tokens(turns, 0)] == [20, 33]


@pytest.mark.parametrize("streamed", [True, False])
def test_how_long_an_output_will_be_no_gateway_reads(streamed: bool) -> None:
    turn = Turn(array("Q"), 20, 37, max_tokens=4_096, streamed=streamed)
    api = Completions()
    body = api.body(turn, "m", array("I", [1] * 20), last=False)
    assert (body["max_tokens"], body["vllm_xargs"]["output_tokens"]) == (4_096, 37)
    output = output_of("/v1/completions", Fields.scanned(json.dumps(body).encode()))
    assert (output.expected_tokens, output.max_tokens, output.unseen) == (0, 4_096, not streamed)
    assert api.body(turn._replace(max_tokens=0), "m", array("I"), last=True)["max_tokens"] == MAX_BOUND
    assert api.body(turn._replace(max_tokens=8), "m", array("I"), last=True)["max_tokens"] == 37, "it is a bound"


async def test_every_turn_gets_its_output_and_the_next_one_finds_it_cached(mocker: MockerProcess) -> None:
    nodes = Nodes()
    flows = [flow(nodes, "a", (70, 30), (40, 20), (40, 3), start=0.05 * number) for number in range(6)]
    workload = as_clients_ask(Workload("w", BLOCK, tuple(flows)), Clients(max_tokens=1_024, unstreamed=0.5))
    assert {turn.streamed for each in workload.flows for turn in each.turns} == {True, False}
    run = await HttpReplay(f"{mocker.url}/v1", "mock").run(workload)
    assert [record.error for record in run.records] == [""] * 18
    by_name = {(record.session_id, record.turn): record for record in run.records}
    for number, each in enumerate(workload.flows):
        for place, turn in enumerate(each.turns):
            record = by_name[str(number), place]
            assert (record.prompt_tokens, record.output_tokens) == (turn.prompt_tokens, turn.output_tokens)
            assert record.first_token is not None
            assert record.sent <= record.first_token <= record.finished + 0.001
            assert len(record.gaps_seconds) < turn.output_tokens
            if place:
                before = each.turns[place - 1]
                # The last token of an output is not computed: it would be with the one after it.
                known = (before.prompt_tokens + before.output_tokens - 1) // BLOCK * BLOCK
                assert record.cached_tokens == known


@pytest.mark.parametrize("api", [Chats, Messages, Responses])
async def test_conversations_find_their_prompts_cached_and_agents_call_a_tool_in_every_turn_but_the_last(
    mocker: MockerProcess, api: Callable[[], Api]
) -> None:
    nodes = Nodes()
    flows = [flow(nodes, "a", (70, 30), (40, 20), (40, 3), start=0.05 * number) for number in range(4)]
    workload = as_clients_ask(Workload("w", BLOCK, tuple(flows)), Clients(max_tokens=32_768))
    run = await HttpReplay(f"{mocker.url}/v1", "mock", api).run(workload)
    assert [record.error for record in run.records] == [""] * 12
    by_name = {(record.session_id, record.turn): record for record in run.records}
    for number, each in enumerate(workload.flows):
        cached = 0
        for place, turn in enumerate(each.turns):
            record = by_name[str(number), place]
            assert record.output_tokens == turn.output_tokens
            assert turn.prompt_tokens < record.prompt_tokens < turn.prompt_tokens + 70, "marks, tools and calls"
            assert (record.cached_tokens or 0) >= cached
            cached = record.prompt_tokens // BLOCK * BLOCK


async def test_a_turn_that_fails_ends_its_flow_and_is_told(mocker: MockerProcess) -> None:
    long = flow(Nodes(), "a", (40_000, 3), (10, 3))
    run = await HttpReplay(f"{mocker.url}/v1", "mock").run(Workload("w", BLOCK, (long,)))
    (record,) = run.records
    assert record.error.startswith("InternalError: 400: ")
    assert run.abandoned_turns == 1
    with_short = replace(Workload("w", BLOCK, (long,)), flows=(long, flow(Nodes(), "b", (40, 3), start=0.01)))
    assert sorted(
        bool(each.error) for each in (await HttpReplay(f"{mocker.url}/v1", "mock").run(with_short)).records
    ) == [
        False,
        True,
    ]
