"""Generate with log probabilities: an engine's events, byte for byte, become messages here, in Python.

Requests with them are few, and each of their tokens has many numbers anyhow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvscout.v1 import gateway_pb2
from kvscout_common.http.dialect import Dialect
from kvscout_common.http.engine_http import parsed
from kvscout_common.http.event_relay import EventRelay
from kvscout_common.http.http import Form, Sink, StreamReport
from kvscout_common.http.json_scan import load_json
from kvscout_gateway.engines.faults import EngineFailed
from kvscout_gateway.values.dialects import SGLANG

MAX_VALUES = 500_000
"""In one event: SGLang's has those of all tokens until then."""
_NAMED = "token_id:"
"""Prefix of a token's name where vLLM names tokens by their ids."""


class LogprobSink:
    """Takes the bytes of a stream of events, gives messages.

    Args:
        sink: Takes the messages.
        dialect: Of the events.
        max_tokens: Number of tokens at which the output ends; None = the engine knows when.
    """

    def __init__(self, sink: Sink, dialect: Dialect, max_tokens: int | None) -> None:
        self._sink = sink
        self._chunks = EventRelay(Form.MESSAGES, dialect, max_tokens, StreamReport())
        self._read = _SglangLogprobs() if dialect is SGLANG else _of_completion
        self._line: list[bytes] = []
        """Chunks of a line that has not ended; the transport bounds it."""

    async def write(self, data: bytes) -> None:
        """See `Sink`.

        Raises:
            EngineFailed: The engine sends something else.
        """
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._line.append(data)
            return
        head = b"".join((*self._line, head))
        self._line = [rest]
        now = asyncio.get_running_loop().time()
        message = gateway_pb2.GenerateResponse.FromString(self._chunks.feed(head + newline, now))
        if self._chunks.failure:
            raise EngineFailed(f"the engine sent {self._chunks.failure}")
        try:
            for line in head.split(b"\n"):
                payload = line[5:].strip() if line.startswith(b"data:") else b""
                if payload.startswith(b"{"):
                    document = await parsed(payload, partial(load_json, max_values=MAX_VALUES))
                    message.logprobs.extend(self._read(document))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise EngineFailed(f"the engine sent log probabilities that are none: {error}") from error
        del message.logprobs[len(message.token_ids) :]  # of tokens past the end
        if message.ByteSize():
            await self._sink.write(message.SerializeToString())


def _of_completion(document: dict[str, Any]) -> list[gateway_pb2.TokenLogprobs]:
    choices = document.get("choices")
    reported = choices[0].get("logprobs") if choices else None
    if not reported:
        return []
    values = reported["token_logprobs"]
    tops = reported.get("top_logprobs") or [None] * len(values)
    return [
        _place(value, [(_token_id(name), top) for name, top in (likeliest or {}).items()])
        for value, likeliest in zip(values, tops, strict=True)
    ]


def _token_id(name: str) -> int:
    if not name.startswith(_NAMED):
        raise ValueError(f"{name!r} does not name a token by its number")
    return int(name[len(_NAMED) :])


class _SglangLogprobs:
    """Each document has those of all tokens until then, or of its own."""

    def __init__(self) -> None:
        self._reported = 0

    def __call__(self, document: dict[str, Any]) -> list[gateway_pb2.TokenLogprobs]:
        meta = document["meta_info"]
        values: Sequence[Any] = meta.get("output_token_logprobs") or ()
        tops: Sequence[Any] = meta.get("output_top_logprobs") or [None] * len(values)
        total = int(meta["completion_tokens"])
        new = max(0, total - self._reported)
        self._reported = max(total, self._reported)
        places = list(zip(values, tops, strict=True))[len(values) - min(new, len(values)) :]
        return [
            _place(value, [(token_id, top) for top, token_id, *_ in likeliest or ()])
            for (value, *_), likeliest in places
        ]


def _place(value: float | None, likeliest: list[tuple[int, float]]) -> gateway_pb2.TokenLogprobs:
    likeliest.sort(key=lambda pair: -pair[1])
    return gateway_pb2.TokenLogprobs(
        # JSON has no minus infinity: vLLM writes null.
        logprob=float("-inf") if value is None else value,
        top_token_ids=[token_id for token_id, _ in likeliest],
        top_logprobs=[top for _, top in likeliest],
    )
