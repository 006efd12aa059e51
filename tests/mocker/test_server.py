"""A real mocker process over real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from support.mocker_process import DEADLINE_SECONDS, MockerProcess, cached_tokens, running_mocker

PROMPT = list(range(100, 150))


@pytest.fixture
async def mocker() -> AsyncIterator[MockerProcess]:
    async with running_mocker("--lora", "adapter") as process:
        yield process


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.01)


async def chunks_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_completion_reports_tokens_and_what_was_cached(mocker: MockerProcess) -> None:
    first = await mocker.complete(PROMPT, max_tokens=5, return_token_ids=True)
    [choice] = first["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 5
    assert choice["text"] == "".join(f" w{token}" for token in choice["token_ids"])
    assert choice["finish_reason"] == "length"
    usage = {"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55}
    assert first["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 48}}
    again = await mocker.complete(PROMPT, max_tokens=5, return_token_ids=True)
    assert again["choices"] == first["choices"]
    assert cached_tokens(again) == 48


async def test_the_next_turn_hits_the_generated_blocks_also_as_text(mocker: MockerProcess) -> None:
    prompt = " ".join(f"word{i}" for i in range(40))
    answer = await mocker.complete(prompt, max_tokens=30)
    following = await mocker.complete(prompt + answer["choices"][0]["text"] + " and now", max_tokens=1)
    assert cached_tokens(following) == 64


async def test_a_stream_ends_with_usage_and_done(mocker: MockerProcess) -> None:
    whole = await mocker.complete(PROMPT, max_tokens=6, return_token_ids=True)
    body = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Request-Id": "abc"}
    async with mocker.http.post(mocker.url + "/v1/completions", json=body, headers=headers) as response:
        assert response.content_type == "text/event-stream"
        *deltas, last = await chunks_of(response)
    assert {chunk["id"] for chunk in [*deltas, last]} == {"cmpl-abc"}
    choices = [chunk["choices"][0] for chunk in deltas]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "prompt_token_ids" in choices[0]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert last["choices"] == []
    assert cached_tokens(last) == 48


async def test_salt_and_adapter_have_caches_of_their_own(mocker: MockerProcess) -> None:
    variants: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "adapter"}]
    for expected in (0, 48):
        answers = [await mocker.complete(PROMPT, max_tokens=1, **variant) for variant in variants]
        assert [cached_tokens(answer) for answer in answers] == [expected] * 4
    assert [answer["model"] for answer in answers] == ["mock", "mock", "mock", "adapter"]


async def test_a_client_that_goes_away_leaves_no_block_referenced() -> None:
    async with running_mocker("--speedup", "1") as mocker:
        running, usage = (
            f'vllm:{name}{{engine="0",model_name="mock"}}' for name in ("num_requests_running", "kv_cache_usage_perc")
        )
        body = {"prompt": PROMPT, "max_tokens": 30_000, "stream": True}
        response = await mocker.http.post(mocker.url + "/v1/completions", json=body)
        await response.content.readline()
        waiting = asyncio.create_task(mocker.complete(PROMPT, max_tokens=30_000))

        async def both_run() -> bool:
            return (await mocker.metrics())[running] == 2

        await until(both_run)
        assert (await mocker.metrics())[usage] > 0
        response.close()
        waiting.cancel()

        async def idle() -> bool:
            return (await mocker.metrics())[running] == 0

        await until(idle)
        assert (await mocker.metrics())[usage] == 0
        _, answer = await mocker.post("/reset_prefix_cache", None)
        assert answer == {"success": True}


async def test_a_full_queue_answers_503_with_retry_after() -> None:
    flags = ("--speedup", "1", "--max-num-seqs", "1", "--max-waiting", "1")
    async with running_mocker(*flags) as mocker:
        body = {"prompt": PROMPT, "max_tokens": 30_000, "stream": True}
        held = []
        for running, waiting in ((1, 0), (1, 1)):
            held.append(asyncio.create_task(mocker.http.post(mocker.url + "/v1/completions", json=body)))

            async def placed(expected: tuple[int, int] = (running, waiting)) -> bool:
                samples = await mocker.metrics()
                names = ("num_requests_running", "num_requests_waiting")
                return expected == tuple(samples[f'vllm:{name}{{engine="0",model_name="mock"}}'] for name in names)

            await until(placed)
        async with mocker.http.post(mocker.url + "/v1/completions", json=body) as refused:
            assert refused.status == 503
            assert refused.headers["Retry-After"] == "1"
            assert "waiting queue is full" in (await refused.json())["error"]["message"]
        (await held[0]).close()
        (await held[1]).close()


async def test_ranks_have_caches_of_their_own_and_share_what_names_no_rank() -> None:
    async with running_mocker("--dp-size", "2") as mocker:
        ranked = [{"X-data-parallel-rank": str(rank)} for rank in (1, 1, 0)]
        answers = [await mocker.complete(PROMPT, headers, max_tokens=1) for headers in ranked]
        assert [cached_tokens(answer) for answer in answers] == [0, 48, 0]
        await asyncio.gather(*(mocker.complete(PROMPT, max_tokens=5) for _ in range(6)))
        samples = await mocker.metrics()
        done = [samples[f'vllm:generation_tokens_total{{engine="{rank}",model_name="mock"}}'] for rank in (0, 1)]
        assert done == [1 + 15, 2 + 15]
        status, answer = await mocker.post("/v1/completions", {"prompt": PROMPT}, {"X-data-parallel-rank": "2"})
        assert (status, answer["error"]["param"]) == (400, "X-data-parallel-rank")


async def test_metrics_carry_vllms_names_and_count_what_happened(mocker: MockerProcess) -> None:
    for _ in range(2):
        await mocker.complete(PROMPT, max_tokens=2)
    samples = await mocker.metrics()
    labels = '{engine="0",model_name="mock"}'
    assert samples[f"vllm:prefix_cache_queries_total{labels}"] == 100
    assert samples[f"vllm:prefix_cache_hits_total{labels}"] == 48
    assert samples[f"vllm:num_requests_waiting{labels}"] == 0
    info = [name for name in samples if name.startswith("vllm:cache_config_info")]
    assert len(info) == 1
    assert 'block_size="16"' in info[0]
    assert 'num_gpu_blocks="4096"' in info[0]


async def test_models_tokenize_and_health(mocker: MockerProcess) -> None:
    async with mocker.http.get(mocker.url + "/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("mock", None), ("adapter", "mock")]
    status, answer = await mocker.post("/tokenize", {"messages": [{"role": "user", "content": "w9"}]})
    assert (status, answer["tokens"], answer["count"]) == (200, [4, 9, 7, 5], 4)
    async with mocker.http.get(mocker.url + "/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "kind"),
    [
        ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "BadRequestError"),
        ({"prompt": [2**40]}, 400, "prompt", "BadRequestError"),
        ({"prompt": "x", "model": "gpt"}, 404, "model", "NotFoundError"),
    ],
)
async def test_errors_have_openais_shape_and_name_the_field(
    mocker: MockerProcess, body: dict[str, Any], status: int, param: str, kind: str
) -> None:
    answered, answer = await mocker.post("/v1/completions", body)
    error = answer["error"]
    assert (answered, error["code"], error["param"], error["type"]) == (status, status, param, kind)
    assert error["message"].startswith(f"{param}: ")


async def test_what_is_not_json_and_unknown_paths_have_openais_shape_too(mocker: MockerProcess) -> None:
    for data in (b"{", b"\xff", b"[" * 100_000):
        async with mocker.http.post(mocker.url + "/v1/completions", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"
    async with mocker.http.get(mocker.url + "/v2") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_breaks_off_open_streams_and_exits_0(number: signal.Signals) -> None:
    async with running_mocker("--speedup", "1") as mocker:
        body = {"prompt": PROMPT, "max_tokens": 30_000, "stream": True}
        async with mocker.http.post(mocker.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            mocker.process.send_signal(number)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await mocker.process.wait() == 0


async def test_a_taken_port_exits_1(mocker: MockerProcess) -> None:
    taken = mocker.url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_mocker.main", "--events-port", "0", "--replay-port", "0",
        env=os.environ | {"KVSCOUT_MOCKER_PORT": taken},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert taken in err.decode()
