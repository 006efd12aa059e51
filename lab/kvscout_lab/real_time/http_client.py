"""A simulated workload, sent to a gateway's HTTP API in real time, as clients would.

The node of a block becomes token ids, the same ones wherever that block stands, so that prompts share what they
share in the laboratory. What a client says (`max_tokens`, `stream`) and what the engine generates are two things: the
length of an output travels in `vllm_xargs.output_tokens`, which simulated engines read and nothing between does.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from random import Random
from typing import Any, Final

import aiohttp

from kvscout_client import GenerateChunk
from kvscout_common.errors import InternalError, Unavailable
from kvscout_lab.real_time.apis import Api, Completions
from kvscout_lab.real_time.open_loop import Limits, OpenLoop
from kvscout_lab.real_time.record import Replay
from kvscout_lab.workloads.sessions import Session
from kvscout_lab.workloads.sessions import Turn as SessionTurn
from kvscout_lab.workloads.workload import Flow, Turn, Workload

TOKENS: Final = range(1_000, 31_000)
"""Ids that prompts are made of."""


def first_prompt(flow: Flow, number: int, block_size: int) -> array[int]:
    """Return the token ids of a flow's first prompt.

    Args:
        flow: The flow.
        number: Number of the flow; tokens after its last complete block are its own.
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
    """Yield the tokens that each later prompt of a flow adds to the one before it and its answer."""
    for place, (before, turn) in enumerate(pairwise(flow.turns), 1):
        count = turn.prompt_tokens - before.prompt_tokens - before.output_tokens
        yield array("I", Random(f"turn {number} {place}").choices(TOKENS, k=count))


class HttpReplay:
    """One replay of a workload over HTTP. Used once.

    Args:
        urls: URL of the OpenAI API, up to `/v1`; of several, each request goes to the next.
        model: Model of the requests.
        api: Makes the API of each session.
        timeout_seconds: Longest wait for one answer.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        api: Callable[[], Api] = Completions,
        timeout_seconds: float = 120.0,
    ) -> None:
        self._urls = cycle([urls] if isinstance(urls, str) else urls)
        self._model = model
        self._api = api
        self._timeout = aiohttp.ClientTimeout(timeout_seconds)
        self._start_unix = 0.0
        self._first_tokens: dict[str, float] = {}
        """First token of each answer that came as a whole, in seconds from the start, by request id."""

    async def run(self, workload: Workload) -> Replay:
        """Send every flow at its time and return when the last turn has ended.

        At most one request of each flow is under way.
        """
        turns = {
            f"{number}/{place}": turn
            for number, flow in enumerate(workload.flows)
            for place, turn in enumerate(flow.turns)
        }
        apis = [self._api() for _ in workload.flows]

        def send(token_ids: array[int], max_tokens: int, request_id: str) -> AsyncIterator[GenerateChunk]:
            flow, _, place = request_id.partition("/")
            last = int(place) == len(workload.flows[int(flow)].turns) - 1
            api = apis[int(flow)]
            body = api.body(turns[request_id], self._model, token_ids, last=last)
            return self._send(http, turns[request_id], api, body, request_id)

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout) as http:
            self._start_unix = time.time()
            driver = OpenLoop(send, Limits(max_outstanding=len(workload.flows)))
            replay = await driver.run(sessions_of(workload))
        records = [
            replace(
                record, first_token=self._first_tokens.get(f"{record.session_id}/{record.turn}", record.first_token)
            )
            for record in replay.records
        ]
        return replace(replay, records=tuple(records))

    async def _send(
        self, http: aiohttp.ClientSession, turn: Turn, api: Api, body: dict[str, Any], request_id: str
    ) -> AsyncIterator[GenerateChunk]:
        came = array("I")
        try:
            data = json.dumps(body, separators=(",", ":"))
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{next(self._urls)}/{api.path}", data=data, headers=headers) as response:
                if response.status != 200:
                    raise InternalError(f"{response.status}: {(await response.text())[:200]}")
                if turn.streamed:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            chunk = api.chunk(json.loads(line[6:]))
                            came.extend(chunk.token_ids)
                            yield chunk
                else:
                    document = await response.json()
                    chunk = api.chunk(document)
                    came.extend(chunk.token_ids)
                    if chunk.token_ids:
                        self._first_tokens[request_id] = document["first_token_unix_seconds"] - self._start_unix
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            raise Unavailable(f"{type(failure).__name__}: {failure}") from failure
        if len(came) != turn.output_tokens:
            raise InternalError(f"{len(came)} of {turn.output_tokens} tokens came")
        api.answered(came)


def sessions_of(workload: Workload) -> Iterator[Session]:
    """Yield the sessions of a workload with the tokens of their prompts; session n is flow n."""
    for number, flow in enumerate(workload.flows):
        prompts = [first_prompt(flow, number, workload.block_size), *new_tokens(flow, number)]
        yield Session(
            str(number),
            flow.start_seconds,
            tuple(
                SessionTurn(prompt, turn.output_tokens, turn.think_seconds if place else 0.0)
                for place, (prompt, turn) in enumerate(zip(prompts, flow.turns, strict=True))
            ),
        )
