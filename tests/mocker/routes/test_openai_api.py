"""Chat completions, embeddings and what streams say when a request fails, over real HTTP."""

from __future__ import annotations

import base64
import json
import struct
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.mocker_process import MockerProcess, cached_tokens, running_mocker

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": " ".join(f"word{i}" for i in range(40))}]
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mocker() -> AsyncIterator[MockerProcess]:
    async with running_mocker("--lora", "adapter") as process:
        yield process


async def post(mocker: MockerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await mocker.post(path, body)
    assert status == 200, answer
    return answer


async def events(mocker: MockerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a stream that ends with [DONE]."""
    async with mocker.http.post(mocker.url + path, json=body | {"stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_chats_next_turn_hits_what_was_generated(mocker: MockerProcess) -> None:
    first = await post(mocker, CHAT, {"messages": MESSAGES, "max_tokens": 30, "return_token_ids": True})
    [choice] = first["choices"]
    assert (first["object"], choice["finish_reason"]) == ("chat.completion", "length")
    assert choice["message"]["role"] == "assistant"
    tokenized = await post(mocker, "/tokenize", {"messages": MESSAGES})
    assert first["prompt_token_ids"] == tokenized["tokens"]
    assert choice["message"]["content"] == "".join(f" w{token}" for token in choice["token_ids"])
    following = [*MESSAGES, choice["message"], {"role": "user", "content": "and now"}]
    second = await post(mocker, CHAT, {"messages": following, "max_tokens": 1})
    assert cached_tokens(second) == 64


async def test_a_streamed_chat_says_the_same_after_its_role(mocker: MockerProcess) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 6, "return_token_ids": True}
    whole = await post(mocker, CHAT, asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    role, *chunks, last = await events(mocker, CHAT, asked | {"stream_options": options})
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {chunk["object"] for chunk in [role, *chunks, last]} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert last["choices"] == []
    assert cached_tokens(last) >= 32
    plain = await events(mocker, CHAT, {"messages": MESSAGES, "max_tokens": 6})
    assert all("usage" not in chunk for chunk in plain)


async def test_a_chat_without_a_limit_stops_by_itself(mocker: MockerProcess) -> None:
    answer = await post(mocker, CHAT, {"messages": MESSAGES})
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_choices_share_a_prompt_and_differ_in_what_they_say(mocker: MockerProcess, path: str) -> None:
    asked = {"messages": MESSAGES, "prompt": "w9 w10 w11", "max_tokens": 5, "n": 3, "return_token_ids": True}
    whole = await post(mocker, path, asked)
    said = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert list(said) == [0, 1, 2]
    assert len({tuple(tokens) for tokens in said.values()}) == 3
    assert whole["usage"]["completion_tokens"] == 15
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    *chunks, last = await events(mocker, path, asked | {"stream_options": {"include_usage": True}})
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice.get("token_ids") or []
    assert streamed == said
    assert last["usage"]["completion_tokens"] == 15


async def test_log_probabilities_are_told_for_each_token(mocker: MockerProcess) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    [choice] = (await post(mocker, CHAT, asked))["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = await events(mocker, CHAT, asked)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    [choice] = (await mocker.complete([9], max_tokens=3, logprobs=2))["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert list(map(len, (told["token_logprobs"], told["text_offset"], told["top_logprobs"]))) == [3, 3, 3]
    assert choice["text"][told["text_offset"][1] :].startswith(told["tokens"][1])


async def test_embeddings_are_vectors_in_both_encodings(mocker: MockerProcess) -> None:
    plain = await post(mocker, "/v1/embeddings", {"input": ["a b", "c"], "model": "mock", "dimensions": 8})
    assert [entry["index"] for entry in plain["data"]] == [0, 1]
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] == 3
    [packed] = (await post(mocker, "/v1/embeddings", {"input": "a b", "encoding_format": "base64", "dimensions": 8}))[
        "data"
    ]
    assert list(struct.unpack("8f", base64.b64decode(packed["embedding"]))) == plain["data"][0]["embedding"]
    assert sum(value * value for value in plain["data"][0]["embedding"]) == pytest.approx(1.0)
    tokens = array("I", (await post(mocker, "/tokenize", {"prompt": "a b"}))["tokens"]).tolist()
    for given in (tokens, [tokens]):
        [entry] = (await post(mocker, "/v1/embeddings", {"input": given, "dimensions": 8}))["data"]
        assert entry["embedding"] == plain["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": [[1], {}]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1] * 40_000]}, "input"),
    ],
)
async def test_bad_embedding_input_names_the_field(mocker: MockerProcess, body: dict[str, Any], field: str) -> None:
    status, answer = await mocker.post("/v1/embeddings", body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_a_request_that_fails_says_so_within_its_stream_or_as_500() -> None:
    async with running_mocker("--fail-requests", "1", "--fault-seed", "3") as mocker:
        for path, asked in (("/v1/completions", {"prompt": "a b"}), (CHAT, {"messages": MESSAGES})):
            status, answer = await mocker.post(path, asked | {"max_tokens": 20})
            assert (status, answer["error"]["type"]) == (500, "InternalServerError")
            *_, last = await events(mocker, path, asked | {"max_tokens": 20, "stream_options": {"include_usage": True}})
            assert last["error"]["code"] == 500
        assert (await mocker.metrics())['vllm:kv_cache_usage_perc{engine="0",model_name="mock"}'] == 0
        await post(mocker, "/mock/faults", {"fail_requests": 0})
        await mocker.complete("a b", max_tokens=3)


async def test_a_whole_answer_says_when_its_first_token_was_out_if_it_is_asked(mocker: MockerProcess) -> None:
    body = {"prompt": [7] * 20, "max_tokens": 4096, "vllm_xargs": {"output_tokens": 8}}
    answer = await post(mocker, "/v1/completions", body)
    assert "first_token_unix_seconds" not in answer
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "stop")
    body["vllm_xargs"]["tells_first_token"] = True  # type: ignore[index]
    before = time.time()
    answer = await post(mocker, "/v1/completions", body)
    assert before < answer["first_token_unix_seconds"] < time.time()
