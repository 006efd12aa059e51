"""Log probabilities of engines' events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscout.v1 import gateway_pb2
from kvscout_common.http.dialect import Dialect
from kvscout_gateway.engines.faults import EngineFailed
from kvscout_gateway.fronts.grpc.logprobs import LogprobSink
from kvscout_gateway.values.dialects import OPENAI, SGLANG


class Kept:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[gateway_pb2.GenerateResponse] = []

    async def write(self, data: bytes) -> None:
        self.messages.append(gateway_pb2.GenerateResponse.FromString(data))


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def run(dialect: Dialect, *events: bytes, max_tokens: int | None = None, size: int = 7) -> list[tuple[int, Any]]:
    """(token, its log probabilities) of a stream that comes in small chunks."""
    kept = Kept()
    sink, data = LogprobSink(kept, dialect, max_tokens), b"".join(events)
    for at in range(0, len(data), size):
        await sink.write(data[at : at + size])
    return [
        (token, (round(place.logprob, 3), list(place.top_token_ids)))
        for message in kept.messages
        for token, place in zip(message.token_ids, message.logprobs, strict=True)
    ]


def completion(tokens: list[int], values: list[float | None], tops: Any = None) -> bytes:
    logprobs = {"token_logprobs": values, "top_logprobs": tops, "tokens": [f"token_id:{t}" for t in tokens]}
    return event({"choices": [{"token_ids": tokens, "text": "", "logprobs": logprobs}]})


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_vllms_name_tokens_by_number_and_come_with_each_chunk(size: int) -> None:
    tops = [{"token_id:9": -2.0, "token_id:1": -0.5}, {"token_id:2": -0.25}]
    got = await run(OPENAI, completion([1, 2], [-0.5, None], tops), completion([3], [-1.0]), size=size)
    assert got == [(1, (-0.5, [1, 9])), (2, (float("-inf"), [2])), (3, (-1.0, []))]


@pytest.mark.parametrize("incremental", [False, True])
async def test_sglangs_come_with_those_before_them_or_without(incremental: bool) -> None:
    values = [[-0.5, 1, None], [-1.5, 2, None], [-2.5, 3, None]]
    tops = [[[-0.5, 1, None], [-3.0, 8, None]], None, [[-2.5, 3, None]]]
    events = []
    for until, since in ((1, 0), (3, 1)):
        begin = since if incremental else 0
        meta: dict[str, Any] = {"completion_tokens": until, "prompt_tokens": 4, "finish_reason": None}
        meta |= {"output_token_logprobs": values[begin:until], "output_top_logprobs": tops[begin:until]}
        events.append(event({"text": "", "output_ids": [1, 2, 3][begin:until], "meta_info": meta}))
    got = await run(SGLANG, *events)
    assert got == [(1, (-0.5, [1, 8])), (2, (-1.5, [])), (3, (-2.5, [3]))]


async def test_tokens_past_the_end_have_none_either() -> None:
    got = await run(OPENAI, completion([1, 2, 3], [-1.0, -2.0, -3.0]), max_tokens=2)
    assert [token for token, _ in got] == [1, 2]


@pytest.mark.parametrize(
    "logprobs",
    [
        7,
        {"token_logprobs": 7},
        {"token_logprobs": [-1, -2], "top_logprobs": [None]},
        {"tokens": []},
        {"token_logprobs": ["x"]},
    ],
)
async def test_nonsense_is_a_failure_of_the_engine(logprobs: Any) -> None:
    with pytest.raises(EngineFailed, match="log probabilities that are none"):
        await run(OPENAI, event({"choices": [{"token_ids": [1], "logprobs": logprobs}]}))
    with pytest.raises(EngineFailed, match="not a completion chunk"):
        await run(OPENAI, b"data: {\n")
