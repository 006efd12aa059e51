"""A workload of the laboratory, sent to a gateway's OpenAI API in real time, as clients would.

What stands for a block becomes token ids, the same ones wherever that block stands, so that prompts share what they
share in the laboratory. What a client says (`max_tokens`, `stream`) and what the engine generates are two things: the
length of an output travels in `vllm_xargs.output_tokens`, which simulated engines read and nothing between does.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any, Final

import aiohttp

from kvscout_lab.record import RequestRecord, Run
from kvscout_lab.workload import Flow, Turn, Workload

TOKENS: Final = range(1_000, 31_000)
"""Ids that prompts are made of."""
MAX_BOUND: Final = 4_096
"""What requests say of which the workload knows no bound: without one a completion ends after 16 tokens."""


def first_prompt(flow: Flow, number: int, block_size: int) -> array[int]:
    """The token ids of a flow's first prompt.

    Args:
        flow: The flow.
        number: Of it; what follows the last complete block no other flow has.
        block_size: Tokens a block.
    """
    turn = flow.turns[0]
    blocks, rest = divmod(turn.prompt_tokens, block_size)
    tokens = array("I")
    for node in turn.nodes[:blocks]:
        tokens.extend(Random(node).choices(TOKENS, k=block_size))
    tokens.extend(Random(f"rest {number}").choices(TOKENS, k=rest))
    return tokens


def new_tokens(flow: Flow, number: int) -> Iterator[array[int]]:
    """What each later prompt of a flow adds to the one before it and its answer."""
    for place, (before, turn) in enumerate(pairwise(flow.turns), 1):
        count = turn.prompt_tokens - before.prompt_tokens - before.output_tokens
        yield array("I", Random(f"turn {number} {place}").choices(TOKENS, k=count))


def body_of(turn: Turn, model: str, prompt: array[int]) -> dict[str, Any]:
    """A turn as a client asks for it.

    Args:
        turn: The turn.
        model: That is asked.
        prompt: Its tokens.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt.tolist(),
        "max_tokens": max(turn.max_tokens or MAX_BOUND, turn.output_tokens),
        "return_token_ids": True,
        "vllm_xargs": {"output_tokens": turn.output_tokens, "tells_first_token": not turn.streamed},
    }
    if turn.streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


class RealTime:
    """One run. Used once.

    Args:
        url: Of the OpenAI API, up to `/v1`.
        model: That is asked.
        timeout_seconds: Longest wait for one answer.
    """

    def __init__(self, url: str, model: str, timeout_seconds: float = 120.0) -> None:
        self._url = f"{url}/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(timeout_seconds)
        self._clock = asyncio.get_running_loop().time
        self._start = 0.0
        self._start_unix = 0.0
        self._records: list[RequestRecord] = []
        self._abandoned = 0

    async def run(self, workload: Workload) -> Run:
        """Sends every flow at its time; returns when the last turn has ended. As many requests are under way as there
        are flows at most."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout) as http:
            self._start, self._start_unix = self._clock(), time.time()
            async with asyncio.TaskGroup() as group:
                for number, flow in enumerate(workload.flows):
                    await self._until(flow.start_seconds)
                    group.create_task(self._flow(http, number, flow, workload.block_size))
        return Run(tuple(self._records), self._abandoned, self._now())

    def _now(self) -> float:
        return self._clock() - self._start

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._now()))

    async def _flow(self, http: aiohttp.ClientSession, number: int, flow: Flow, block_size: int) -> None:
        history, due = first_prompt(flow, number, block_size), flow.start_seconds
        added = new_tokens(flow, number)
        for place, turn in enumerate(flow.turns):
            if place:
                history += next(added)
                due += turn.think_seconds
                await self._until(due)
            record, reply = await self._ask(http, turn, history, name=f"{number}/{place}", place=place, due=due)
            self._records.append(record)
            if record.error:
                self._abandoned += len(flow.turns) - place - 1
                return
            history += reply
            due = record.finished

    async def _ask(
        self, http: aiohttp.ClientSession, turn: Turn, prompt: array[int], *, name: str, place: int, due: float
    ) -> tuple[RequestRecord, array[int]]:
        answer = _Answer()
        sent, error = self._now(), ""
        try:
            data = json.dumps(body_of(turn, self._model, prompt), separators=(",", ":"))
            headers = {"Content-Type": "application/json"}
            async with http.post(self._url, data=data, headers=headers) as response:
                if response.status != 200:
                    error = f"{response.status}: {(await response.text())[:200]}"
                elif turn.streamed:
                    async for line in response.content:
                        answer.take_line(line, self._now())
                else:
                    answer.take_whole(await response.json(), self._start_unix)
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not error and len(answer.tokens) != turn.output_tokens:
            error = f"{len(answer.tokens)} of {turn.output_tokens} tokens came"
        arrivals = answer.arrivals
        return RequestRecord(
            session_id=name,
            turn=place,
            scheduled=due,
            sent=sent,
            finished=self._now(),
            prompt_tokens=len(prompt),
            first_token=arrivals[0] if arrivals else None,
            gaps_seconds=tuple(after - before for before, after in pairwise(arrivals)),
            output_tokens=len(answer.tokens),
            cached_tokens=answer.cached,
            error=error,
        ), answer.tokens


class _Answer:
    """What came of an answer."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self.arrivals: list[float] = []
        self.cached: int | None = None

    def take_line(self, line: bytes, now: float) -> None:
        """A line of a stream of events."""
        if not line.startswith(b"data: {"):
            return
        document = json.loads(line[6:])
        if self._take(document):
            self.arrivals.append(now)

    def take_whole(self, document: dict[str, Any], start_unix: float) -> None:
        """An answer that came at once; `start_unix` = what its times count from."""
        if self._take(document):
            self.arrivals.append(document["first_token_unix_seconds"] - start_unix)

    def _take(self, document: dict[str, Any]) -> int:
        usage = document.get("usage")
        if usage:
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if "error" in document:
            raise ValueError(str(document["error"])[:200])
        came = [token for choice in document["choices"] for token in choice["token_ids"]]
        self.tokens.extend(came)
        return len(came)
