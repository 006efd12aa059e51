"""Agents' own clients, `anthropic` and `openai`, against gateway and engines: tools, streams, stored responses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack
from support.processes import eventually

if TYPE_CHECKING:
    import anthropic  # loading them takes a second each, at every worker of pytest
    import openai

pytestmark = [pytest.mark.usefixtures("each_mode"), pytest.mark.asyncio(loop_scope="module")]

ENGINE = ("--tool-call-share", "1", "--store-responses", "--render", "all")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TURNS = 4
LIMIT = 16_000
"""What agents send, however long the context is."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack("--tokenize-timeout-ms", "5000", mockers=(ENGINE, ENGINE)) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def claude(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}"
    async with anthropic.AsyncAnthropic(api_key="unused", base_url=url, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1"
    async with openai.AsyncOpenAI(api_key="unused", base_url=url, max_retries=0) as connected:
        yield connected


def words(tokens: int) -> str:
    """Text of as many tokens, which nothing has cached."""
    return " ".join(f"w{token % 30_000 + 8}" for token in fresh_prompt(tokens))


def tool() -> dict[str, Any]:
    """A tool of chat completions that no other test has."""
    return {"name": "read_file", "description": words(20), "parameters": SCHEMA}


class Placement:
    """Requests and checked predictions of each worker since it was made."""

    def __init__(self, stack: Stack, before: dict[str, tuple[int, int, int]]) -> None:
        self._stack = stack
        self._before = before

    @classmethod
    async def begin(cls, stack: Stack) -> Placement:
        """Note how the workers stand."""
        return cls(stack, await _counts(stack))

    async def is_at_one_worker(self, requests: int) -> None:
        """All requests went to one worker, their cached tokens were predicted, and nothing stays booked."""
        await self._stack.client.until_idle()
        none = (0, 0, 0)

        async def changes() -> list[tuple[int, ...]]:
            since = [
                tuple(now - then for now, then in zip(counts, self._before.get(worker, none), strict=True))
                for worker, counts in (await _counts(self._stack)).items()
            ]
            return [change for change in since if change != none]

        async def all_checked() -> bool:
            return sum(change[1] for change in await changes()) >= requests

        await eventually(all_checked, what="each prediction checked")
        assert await changes() == [(requests, requests, 0)]


async def _counts(stack: Stack) -> dict[str, tuple[int, int, int]]:
    status = await stack.client.status()
    return {one.worker.worker_id: (one.requests, one.checked, one.mispredicted) for one in status.workers}


async def until_indexed(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Wait until the prompt of a request is in the index, all blocks of it, and the request is no load any more."""
    _, rendered = await stack.mockers[0].post(f"{path}/render", {"model": MODEL, **body})
    await stack.client.until_indexed(rendered["token_ids"], len(rendered["token_ids"]) // 16)
    await stack.client.until_idle()


async def said_by_claude(claude: anthropic.AsyncAnthropic, streams: bool, asked: dict[str, Any]) -> Any:
    if not streams:
        return await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    return answer


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_agent_of_messages_stays_at_the_worker_that_has_its_prompt(
    stack: Stack, claude: anthropic.AsyncAnthropic, streams: bool
) -> None:
    placement = await Placement.begin(stack)
    messages: list[Any] = [{"role": "user", "content": words(60)}]
    prompt: dict[str, Any] = {
        "system": [{"type": "text", "text": words(200), "cache_control": {"type": "ephemeral"}}],
        "messages": messages,
        "tools": [{"name": "read_file", "description": words(20), "input_schema": SCHEMA}],
    }
    cached = 0
    for _ in range(TURNS):
        counted = await claude.messages.count_tokens(model=MODEL, **prompt)
        answer = await said_by_claude(claude, streams, {"model": MODEL, "max_tokens": LIMIT, **prompt})
        [block] = answer.content
        assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "read_file")
        assert isinstance(block.input["path"], str)
        assert answer.usage.cache_read_input_tokens == cached
        assert answer.usage.input_tokens == counted.input_tokens % 16
        # A call is written differently in the next prompt: what follows the last full block is not cached.
        cached = counted.input_tokens // 16 * 16
        await until_indexed(stack, "/v1/messages", {"max_tokens": 1, **prompt})
        call = {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
        result = {"type": "tool_result", "tool_use_id": block.id, "content": words(40)}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await placement.is_at_one_worker(TURNS)


async def response_of(client: openai.AsyncOpenAI, streams: bool, asked: dict[str, Any]) -> Any:
    if not streams:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    return answer


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_agent_of_responses_stays_at_the_worker_that_has_its_prompt(
    stack: Stack, client: openai.AsyncOpenAI, streams: bool
) -> None:
    placement = await Placement.begin(stack)
    items: list[Any] = [{"role": "user", "content": words(60)}]
    prompt: dict[str, Any] = {"instructions": words(200), "input": items, "tools": [{"type": "function"} | tool()]}
    cached = 0
    for _ in range(TURNS):
        answer = await response_of(client, streams, {"model": MODEL, "max_output_tokens": LIMIT, **prompt})
        [call] = answer.output
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "read_file")
        assert list(json.loads(call.arguments)) == ["path"]
        assert answer.usage.input_tokens_details.cached_tokens == cached
        cached = answer.usage.input_tokens // 16 * 16
        await until_indexed(stack, "/v1/responses", prompt)
        said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": words(40)}
        items += [said, result]
    await placement.is_at_one_worker(TURNS)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_agent_of_chat_completions_stays_at_the_worker_that_has_its_prompt(
    stack: Stack, client: openai.AsyncOpenAI, streams: bool
) -> None:
    placement = await Placement.begin(stack)
    tools: list[Any] = [{"type": "function", "function": tool()}]
    messages: list[Any] = [{"role": "system", "content": words(200)}, {"role": "user", "content": words(60)}]
    for turn in range(TURNS):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": LIMIT, "messages": messages, "tools": tools}
        if streams:
            async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                async for _ in stream:
                    pass
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "read_file")
        assert turn == 0 or answer.usage.prompt_tokens_details.cached_tokens > 200
        await until_indexed(stack, "/v1/chat/completions", {"messages": messages, "tools": tools})
        function = {"name": call.function.name, "arguments": call.function.arguments}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": words(40)},
        ]
    await placement.is_at_one_worker(TURNS)


async def test_a_stored_response_is_found_and_continued(stack: Stack, client: openai.AsyncOpenAI) -> None:
    import openai

    first = await client.responses.create(model=MODEL, input=words(100), max_output_tokens=20)
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    second = await client.responses.create(
        model=MODEL, input=words(10), previous_response_id=first.id, max_output_tokens=20
    )
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= 96
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        await client.responses.cancel(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_unknown")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input="a", previous_response_id="resp_unknown")
    await stack.client.until_idle()


async def test_errors_come_as_each_clients_own(
    stack: Stack, claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI
) -> None:
    import anthropic
    import openai

    hello: list[Any] = [{"role": "user", "content": "hello"}]
    long: list[Any] = [{"role": "user", "content": "w9 " * 33_000}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(model="nope", max_tokens=5, messages=hello)
    assert missing.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await claude.messages.create(model=MODEL, max_tokens=5, messages=long)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model=MODEL, max_tokens=-1, messages=hello)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nope", input="hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(model=MODEL, input=long)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        await client.responses.create(model=MODEL, input="hello", tool_choice="required")
    await stack.client.until_idle()


async def test_a_stream_that_a_client_leaves_is_booked_no_longer(
    stack: Stack, claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI
) -> None:
    endless: dict[str, Any] = {"extra_body": {"vllm_xargs": {"output_tokens": 3_000}}}
    messages: list[Any] = [{"role": "user", "content": words(60)}]
    async with claude.messages.stream(model=MODEL, max_tokens=LIMIT, messages=messages, **endless) as stream:
        async for _ in stream.text_stream:
            break
    async with await client.responses.create(model=MODEL, input=words(60), stream=True, **endless) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                break
    await stack.client.until_idle()


@contextlib.asynccontextmanager
async def failing(stack: Stack) -> AsyncIterator[None]:
    """Every request fails in its engine, before its first token or after a few."""
    for mocker in stack.mockers:
        assert (await mocker.post("/mock/faults", {"fail_requests": 1}))[0] == 200
    try:
        yield
    finally:
        for mocker in stack.mockers:
            await mocker.post("/mock/faults", {"fail_requests": 0})


async def test_what_fails_in_every_engine_is_tried_again_by_the_clients_and_then_said(
    stack: Stack, claude: anthropic.AsyncAnthropic, client: openai.AsyncOpenAI
) -> None:
    import anthropic
    import openai

    messages: list[Any] = [{"role": "user", "content": words(60)}]
    before = sum(counts[0] for counts in (await _counts(stack)).values())
    async with failing(stack):
        with pytest.raises(anthropic.InternalServerError):
            await claude.with_options(max_retries=1).messages.create(model=MODEL, max_tokens=20, messages=messages)
        with pytest.raises(openai.InternalServerError):
            await client.with_options(max_retries=1).responses.create(model=MODEL, input=words(60))
        await stack.client.until_idle()
        assert sum(counts[0] for counts in (await _counts(stack)).values()) >= before + 4
        with pytest.raises(anthropic.APIError):
            async with claude.messages.stream(model=MODEL, max_tokens=20, messages=messages) as stream:
                await stream.get_final_message()
        with pytest.raises(openai.APIError):
            async for _ in await client.responses.create(model=MODEL, input=words(60), stream=True):
                pass
        await stack.client.until_idle()
    patient = claude.with_options(max_retries=5)  # a worker may be cooling down
    answer = await patient.messages.create(model=MODEL, max_tokens=20, messages=messages)
    assert answer.usage.output_tokens == 20
