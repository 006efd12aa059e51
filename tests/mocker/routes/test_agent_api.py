"""Anthropic's messages, OpenAI's responses and the render endpoints, over real HTTP: vLLM's shapes and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.mocker_process import MockerProcess, running_mocker

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
LONG = " ".join(f"word{i}" for i in range(40))
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "mock", "max_tokens": 6, "messages": [{"role": "user", "content": LONG}]},
    RESPONSES: {"model": "mock", "max_output_tokens": 6, "input": LONG},
}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALLING: dict[str, dict[str, Any]] = {
    MESSAGES: ASKED[MESSAGES]
    | {"max_tokens": 900, "tools": [{"name": "read", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    RESPONSES: ASKED[RESPONSES]
    | {
        "max_output_tokens": 900,
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
        "tool_choice": "required",
    },
    CHAT: {
        "max_tokens": 900,
        "messages": [{"role": "user", "content": LONG}],
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
}
Event = tuple[str, dict[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mocker() -> AsyncIterator[MockerProcess]:
    async with running_mocker("--store-responses", "--render", "all", "--scheduling-policy", "priority") as process:
        yield process


async def post(mocker: MockerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await mocker.post(path, body)
    assert status == 200, answer
    return answer


async def get(mocker: MockerProcess, path: str) -> tuple[int, dict[str, Any]]:
    async with mocker.http.get(mocker.url + path) as response:
        return response.status, await response.json()


def parsed(text: str) -> list[Event]:
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(document["type"] == name for name, document in events)
    return events


async def events(mocker: MockerProcess, path: str, body: dict[str, Any]) -> list[Event]:
    async with mocker.http.post(mocker.url + path, json=body | {"stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        return parsed(await response.text())


async def test_a_message_says_what_its_stream_says(mocker: MockerProcess) -> None:
    whole = await post(mocker, MESSAGES, ASKED[MESSAGES])
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "mock")
    assert (whole["stop_reason"], whole["content"][0]["type"]) == ("max_tokens", "text")
    streamed = await events(mocker, MESSAGES, ASKED[MESSAGES])
    assert [name for name, _ in streamed if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = streamed[0][1]["message"], streamed[-2][1]
    assert whole["usage"] == {
        "input_tokens": 43 - 32,
        "output_tokens": 6,
        "cache_creation_input_tokens": 32,
        "cache_read_input_tokens": 0,
    }
    assert start["usage"] == {"input_tokens": 43, "output_tokens": 0}
    assert end["usage"] == {
        "input_tokens": 43 - 32,
        "output_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 32,
    }
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    texts = [event["delta"]["text"] for name, event in streamed if name == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]


async def test_a_response_says_what_its_stream_says(mocker: MockerProcess) -> None:
    whole = await post(mocker, RESPONSES, ASKED[RESPONSES] | {"metadata": {"a": "b"}})
    assert (whole["object"], whole["status"], whole["metadata"]) == ("response", "incomplete", {"a": "b"})
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    streamed = await events(mocker, RESPONSES, ASKED[RESPONSES])
    assert [name for name, _ in streamed if name != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in streamed] == list(range(len(streamed)))
    last = streamed[-1][1]["response"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 32
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    texts = [event["delta"] for name, event in streamed if name == "response.output_text.delta"]
    assert "".join(texts) == whole["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_the_next_turn_hits_what_was_generated(mocker: MockerProcess, path: str) -> None:
    salt = {"cache_salt": path}
    if path == MESSAGES:
        body = ASKED[path] | salt | {"max_tokens": 40}
        first = await post(mocker, path, body)
        said = {"role": "assistant", "content": first["content"]}
        turns = [*body["messages"], said, {"role": "user", "content": "and now"}]
        second = await post(mocker, path, body | {"messages": turns})
        assert second["usage"]["cache_read_input_tokens"] == 80
    else:
        body = ASKED[path] | salt | {"max_output_tokens": 40}
        first = await post(mocker, path, body)
        again = {"previous_response_id": first["id"], "input": "and now"}
        second = await post(mocker, path, body | again)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == 80


async def test_a_called_tool_is_the_same_whole_and_streamed_in_each_dialect(mocker: MockerProcess) -> None:
    message = await post(mocker, MESSAGES, CALLING[MESSAGES])
    [block] = message["content"]
    assert (message["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "read")
    assert list(block["input"]) == ["path"]
    streamed = await events(mocker, MESSAGES, CALLING[MESSAGES])
    assert streamed[1][1]["content_block"]["input"] == {}
    partial = [event["delta"]["partial_json"] for name, event in streamed if name == "content_block_delta"]
    assert json.loads("".join(partial)) == block["input"]

    [item] = (await post(mocker, RESPONSES, CALLING[RESPONSES]))["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "read", "completed")
    streamed = await events(mocker, RESPONSES, CALLING[RESPONSES])
    named = [name for name, _ in streamed if name != "response.function_call_arguments.delta"]
    assert named[2:5] == [
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    partial = [event["delta"] for name, event in streamed if name == "response.function_call_arguments.delta"]
    assert "".join(partial) == item["arguments"] == streamed[-1][1]["response"]["output"][0]["arguments"]

    [choice] = (await post(mocker, CHAT, CALLING[CHAT]))["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "read")
    assert json.loads(call["function"]["arguments"]) == block["input"]
    async with mocker.http.post(mocker.url + CHAT, json=CALLING[CHAT] | {"stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in (await response.text()).split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks[1:]]
    assert [("id" in delta, "name" in delta["function"]) for delta in deltas[:2]] == [(True, True), (False, False)]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    named_choice = {"tool_choice": {"type": "function", "function": {"name": "read"}}}
    [choice] = (await post(mocker, CHAT, CALLING[CHAT] | named_choice))["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)


async def test_arguments_are_cut_off_by_a_limit(mocker: MockerProcess) -> None:
    streamed = await events(mocker, MESSAGES, CALLING[MESSAGES] | {"max_tokens": 3})
    partial = "".join(event["delta"]["partial_json"] for name, event in streamed if name == "content_block_delta")
    assert streamed[-2][1]["delta"]["stop_reason"] == "max_tokens"
    with pytest.raises(json.JSONDecodeError):
        json.loads(partial)


async def test_a_share_of_answers_calls_a_tool_where_the_request_leaves_it_open() -> None:
    async with running_mocker("--tool-call-share", "0.5") as mocker:
        bodies = [CALLING[MESSAGES] | {"tool_choice": {"type": "auto"}, "system": f"s{i}"} for i in range(40)]
        kinds = [(await post(mocker, MESSAGES, body))["stop_reason"] for body in bodies]
        assert 8 < kinds.count("tool_use") < 32
        assert set(kinds) == {"tool_use", "end_turn"}
        again = [(await post(mocker, MESSAGES, body))["stop_reason"] for body in bodies]
        assert again == kinds


async def test_cached_tokens_of_messages_are_reported_only_as_the_flag_says() -> None:
    async with running_mocker("--prompt-tokens-details", "never") as mocker:
        for _ in range(2):
            answer = await post(mocker, MESSAGES, ASKED[MESSAGES])
            assert answer["usage"] == {"input_tokens": 43, "output_tokens": 6}
        response = await post(mocker, RESPONSES, ASKED[RESPONSES])
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 32


async def test_what_is_stored_is_found_and_continued_and_the_rest_is_not(mocker: MockerProcess) -> None:
    stored = await post(mocker, RESPONSES, ASKED[RESPONSES])
    assert await get(mocker, f"{RESPONSES}/{stored['id']}") == (200, stored)
    dropped = await post(mocker, RESPONSES, ASKED[RESPONSES] | {"store": False})
    for path in (f"{RESPONSES}/{dropped['id']}", f"{RESPONSES}/resp_unknown"):
        status, answer = await get(mocker, path)
        assert (status, answer["error"]["type"], answer["error"]["param"]) == (
            404,
            "invalid_request_error",
            "response_id",
        )
    status, answer = await mocker.post(RESPONSES, {"input": "x", "previous_response_id": dropped["id"]})
    assert (status, answer["error"]["code"]) == (404, 404)
    status, answer = await mocker.post(f"{RESPONSES}/{stored['id']}/cancel", {})
    assert (status, answer["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_a_stream_that_was_read_to_its_end_is_stored(mocker: MockerProcess) -> None:
    *_, (_, last) = await events(mocker, RESPONSES, ASKED[RESPONSES])
    assert await get(mocker, f"{RESPONSES}/{last['response']['id']}") == (200, last["response"])


async def test_nothing_is_stored_by_default() -> None:
    async with running_mocker() as mocker:
        answer = await post(mocker, RESPONSES, ASKED[RESPONSES])
        assert (await get(mocker, f"{RESPONSES}/{answer['id']}"))[0] == 404
        status, answer = await mocker.post(RESPONSES, ASKED[RESPONSES] | {"background": True})
        assert (status, answer["error"]["param"]) == (400, "background")
        for path, body in ASKED.items():
            status, answer = await mocker.post(f"{path}/render", body)
            assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")


async def test_a_response_from_the_background_is_streamed_again_from_any_event(mocker: MockerProcess) -> None:
    body = ASKED[RESPONSES] | {"background": True, "request_id": "resp_streamed"}
    streamed = await events(mocker, RESPONSES, body)
    assert streamed[-1][0] == "response.completed"
    path = f"{mocker.url}{RESPONSES}/resp_streamed"
    async with mocker.http.get(path, params={"stream": "true"}) as response:
        assert parsed(await response.text()) == streamed
    async with mocker.http.get(path, params={"stream": "true", "starting_after": "3"}) as response:
        assert parsed(await response.text()) == streamed[4:]


async def test_a_response_in_the_background_is_cancelled(mocker: MockerProcess) -> None:
    body = {"input": LONG, "background": True, "vllm_xargs": {"output_tokens": 20_000}}
    queued = await post(mocker, RESPONSES, body)
    assert (queued["status"], queued["output"]) == ("queued", [])
    cancelled = await post(mocker, f"{RESPONSES}/{queued['id']}/cancel", {})
    assert cancelled["status"] == "cancelled"
    assert await get(mocker, f"{RESPONSES}/{queued['id']}") == (200, cancelled)


async def test_errors_are_in_each_dialects_shape_as_far_as_vllms_are(mocker: MockerProcess) -> None:
    for body, status, kind in (
        (ASKED[MESSAGES] | {"model": "gpt"}, 404, "NotFoundError"),
        (ASKED[MESSAGES] | {"max_tokens": 40_000}, 400, "BadRequestError"),
        (ASKED[MESSAGES] | {"messages": [{"role": "user", "content": "w " * 40_000}]}, 400, "BadRequestError"),
    ):
        answered, answer = await mocker.post(MESSAGES, body)
        assert (answered, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    for path, body in ((MESSAGES, {"model": "mock", "max_tokens": 1}), (RESPONSES, {"model": "gpt", "input": "x"})):
        answered, answer = await mocker.post(path, body)
        assert (answered, answer["error"]["code"]) == (answered, answered)
        assert "type" not in answer


async def test_a_request_that_fails_ends_its_stream_as_vllms_does() -> None:
    async with running_mocker("--fail-requests", "1", "--fault-seed", "3") as mocker:
        status, answer = await mocker.post(MESSAGES, ASKED[MESSAGES] | {"max_tokens": 20})
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        *_, (name, last) = await events(mocker, MESSAGES, ASKED[MESSAGES] | {"max_tokens": 20})
        assert (name, last["error"]["type"]) == ("error", "internal_error")
        body = ASKED[RESPONSES] | {"max_output_tokens": 20, "stream": True}
        async with mocker.http.post(mocker.url + RESPONSES, json=body) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


async def test_rendered_tokens_are_those_of_the_prompt(mocker: MockerProcess) -> None:
    messages = [{"role": "user", "content": LONG}]
    expected = (await post(mocker, "/tokenize", {"messages": messages}))["tokens"]
    bodies = {**ASKED, CHAT: {"messages": messages}}
    for path, body in bodies.items():
        assert (await post(mocker, f"{path}/render", body))["token_ids"] == expected
    async with mocker.http.post(mocker.url + "/v1/completions/render", json={"prompt": [7, 8, 9]}) as response:
        [rendered] = await response.json()
    assert rendered["token_ids"] == [7, 8, 9]
    status, answer = await mocker.post(f"{RESPONSES}/render", {"input": "x", "previous_response_id": "resp_1"})
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")


async def test_earlier_releases_render_completions_only() -> None:
    async with running_mocker("--render", "chat") as mocker:
        assert "token_ids" in await post(mocker, f"{CHAT}/render", {"messages": [{"role": "user", "content": "x"}]})
        async with mocker.http.post(mocker.url + MESSAGES + "/render", json=ASKED[MESSAGES]) as response:
            assert response.status == 404


async def test_a_priority_comes_from_the_body_or_the_header_which_wins(mocker: MockerProcess) -> None:
    for headers in ({}, {"X-Vllm-Priority": "-3"}, {"X-Vllm-Priority": "soon"}):
        for path, body in ASKED.items():
            status, answer = await mocker.post(path, body | {"priority": 5}, headers)
            assert status == 200, answer
    status, answer = await mocker.post(RESPONSES, ASKED[RESPONSES] | {"priority": "high"})
    assert (status, answer["error"]["param"]) == (400, "priority")


async def test_a_rank_is_chosen_for_messages_but_not_for_responses() -> None:
    async with running_mocker("--dp-size", "2") as mocker:
        named = {"X-data-parallel-rank": "1"}
        for path, body in ASKED.items():
            for _ in range(4):
                assert (await mocker.post(path, body, named))[0] == 200
        metrics = await mocker.metrics()
        served = [metrics[f'vllm:prompt_tokens_total{{engine="{rank}",model_name="mock"}}'] for rank in (0, 1)]
        assert served == [2 * 43, 6 * 43]
