"""Engines that cost next to nothing, as a process: each answers a completion with a script of events on a clock.

What is measured is what stands before them. They speak as much HTTP as vLLM does to a proxy: one request at a time on a
connection, a body by length, an answer in chunks, one event in each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"bench"}]}'
MODEL = "bench"
GAP_FIELD, LENGTH_FIELD = "bench_gap_ms", "bench_prompt_tokens"
"""Fields of a request: milliseconds between two events, tokens of its prompt."""


@cache
def _chunks(tokens: int, prompt_tokens: int) -> list[bytes]:
    """Return the chunks of an HTTP answer: an event for each token, and the last one with usage and the end."""
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    documents: list[dict[str, object]] = [
        {
            **head,
            "choices": [
                {
                    "index": 0,
                    "text": " token",
                    "token_ids": [1000 + number],
                    "logprobs": None,
                    "finish_reason": "length" if number == tokens - 1 else None,
                }
            ],
        }
        for number in range(tokens)
    ]
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    documents.append({**head, "choices": [], "usage": usage})
    *output, last, end = [_chunk(b"data: %s\n\n" % json.dumps(document).encode()) for document in documents]
    # The last token's event, the usage and the end come together, as vLLM sends them.
    return [*output, b"".join((last, end, _chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"))]


class _Engine(asyncio.Protocol):
    """One connection.

    Args:
        gap_ms: Between two events, where the request does not say.
    """

    def __init__(self, gap_ms: float) -> None:
        self._gap_ms = gap_ms
        self._loop = asyncio.get_running_loop()
        self._input = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._input += data
        while (end := self._input.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._input[:end]).split(b"\r\n")
            if not head[0].endswith(b"HTTP/1.1"):
                # A router asks whether this is HTTP/2.
                self._close()
                return
            fields = dict(line.lower().split(b":", 1) for line in head[1:])
            size = end + 4 + int(fields.get(b"content-length", b"0"))
            if len(self._input) < size:
                return
            body = bytes(self._input[end + 4 : size])
            del self._input[:size]
            self._answer(head[0].split(b" ")[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.startswith((b"/v1/completions", b"/v1/chat")):
            document = _MODELS if path.startswith(b"/v1/models") else b"{}"
            self._write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(document), document)
            )
            return
        # A long prompt is not parsed: what an engine computes is missing where it is measured.
        limit, prompt = int(_number("max_tokens", body, 1)), int(_number(LENGTH_FIELD, body, 1))
        self._write(_HEAD)
        self._next(_chunks(limit, prompt), 0, self._loop.time(), _number(GAP_FIELD, body, self._gap_ms) / 1e3)

    def _next(self, parts: Sequence[bytes], place: int, due: float, gap: float) -> None:
        self._write(parts[place])
        if place < len(parts) - 1:
            self._timer = self._loop.call_at(due + gap, self._next, parts, place + 1, due + gap, gap)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _number(field: str, body: bytes, default: float) -> float:
    """Return the number in a field of a request's body."""
    found = re.search(rb'"%s": *([0-9.]+)' % field.encode(), body)
    return float(found[1]) if found else default


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(engines: int, gap_ms: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Engine(gap_ms), "127.0.0.1", 0) for _ in range(engines)]
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    print(json.dumps({"ports": [server.sockets[0].getsockname()[1] for server in servers]}), flush=True)
    await stopped.wait()


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM; the first line of its output has the ports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    options = parser.parse_args(arguments)
    uvloop.run(_serve(options.engines, options.gap_ms))


if __name__ == "__main__":
    main(sys.argv[1:])
