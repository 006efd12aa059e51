"""Answers that come as a whole: engines that are slow, engines that hang, and what their clients get."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import aiohttp
from support.gateway_stack import MODEL, Stack, fresh_prompt, running_stack
from support.processes import DEADLINE_SECONDS, eventually

SLOW = ("--speedup", "1", "--step-base-ms", "100")
"""Ten tokens a second."""
CHECKED = ("--engine-health-seconds", "0.3")


async def complete(stack: Stack, max_tokens: int) -> tuple[int, dict[str, Any]]:
    """Status and body of a completion that is not streamed."""
    body = {"model": MODEL, "prompt": fresh_prompt(64).tolist(), "max_tokens": max_tokens, "stream": False}
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        return response.status, json.loads(await response.read())


async def running_at(stack: Stack) -> int:
    """The engine that runs a request, as soon as there is one."""

    async def found() -> list[int]:
        counts = [await mocker.metrics() for mocker in stack.mockers]
        return [
            index + 1
            for index, figures in enumerate(counts)
            if any(value for name, value in figures.items() if name.startswith("vllm:num_requests_running"))
        ]

    [index] = await eventually(found, what="a running request")
    return int(index) - 1


async def charged(stack: Stack) -> list[tuple[int, int]]:
    """Requests that each worker was sent, and failures that it was charged with, fewest first."""
    return sorted((worker.requests, worker.failures) for worker in (await stack.client.status()).workers)


async def test_an_engine_that_hangs_loses_what_waits_for_it_to_another_one() -> None:
    async with running_stack(*CHECKED, mockers=[SLOW, SLOW]) as stack:
        asked = asyncio.create_task(complete(stack, 40))
        struck = await running_at(stack)
        stack.mockers[struck].process.send_signal(signal.SIGSTOP)
        try:
            # Three checks of two seconds each.
            status, answer = await asyncio.wait_for(asked, DEADLINE_SECONDS)
        finally:
            stack.mockers[struck].process.send_signal(signal.SIGCONT)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 40)
        assert await charged(stack) == [(1, 0), (1, 1)]
        await stack.client.until_idle()


async def test_a_slow_engine_that_is_well_has_its_time_and_then_its_client_is_told_once() -> None:
    async with running_stack(*CHECKED, "--engine-answer-seconds", "5", mockers=[SLOW, SLOW]) as stack:
        status, answer = await complete(stack, 10)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 10)
        status, answer = await complete(stack, 1_000)
        assert (status, answer["error"]["type"]) == (504, "timeout_error")
        assert "not complete after" in answer["error"]["message"]
        await stack.client.until_idle()
        sent = await charged(stack)
        assert (sum(requests for requests, _ in sent), sum(failures for _, failures in sent)) == (2, 0)
