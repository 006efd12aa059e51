"""The same random exchanges over both transports: the same bytes, the same report, the same kind of failure."""

import asyncio
import json
import random
from dataclasses import asdict
from typing import Any

import pytest
from support.http_peers import (
    DONE,
    LAST_CHUNK,
    TRANSPORTS,
    USAGE,
    Gathered,
    RawEngine,
    chunk,
    event,
    exchange,
    made_of,
    raw_engine,
    served,
    tokens,
)
from support.seeds import test_seed

from kvscout_common.http.factory import connect
from kvscout_common.http.http import Form, HttpCall, HttpFailed, HttpRequest
from kvscout_gateway.values.dialects import OPENAI, SGLANG

CASES = 60


def body_of(rng: random.Random) -> bytes:
    """A stream of events, whole or not, or something else."""
    if rng.random() < 0.15:
        return rng.randbytes(rng.choice([0, 1, 100, 200_000]))
    parts = [b": ping\n\n"] * rng.randrange(2)
    for number in range(rng.choice([0, 1, 3, 30])):
        parts.append(
            rng.choice(
                [
                    tokens(number, text="x" * rng.choice([0, 1, 3000])),
                    event({"choices": [{"delta": {"content": "ü\ud800"}}]}),
                    event({"choices": [{"delta": {"role": "assistant"}}]}),
                ]
            )
        )
    for last in (tokens(finish="stop"), USAGE, event({"error": {"code": 500}}), b"data: nonsense\n\n", DONE):
        if rng.random() < (0.1 if b"error" in last or b"nonsense" in last else 0.7):
            parts.append(last)
    return b"".join(parts)


def answer_of(rng: random.Random) -> tuple[bytes, bool]:
    """The bytes of an answer, and whether the connection ends with it."""
    body = body_of(rng)
    status = rng.choice(["200 OK", "200 OK", "404 Not Found", "503 Busy"])
    content = rng.choice(["text/event-stream", "text/event-stream; charset=utf-8", "application/json"])
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\nX-Odd: \u00e9\r\n".encode()
    framing = rng.randrange(3)
    if framing == 0:
        sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == 1:
        size = rng.choice([1, 7, 1000, 100_000]) if len(body) < 20_000 else 50_000
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, pieces)) + LAST_CHUNK
    else:
        sent = head + b"\r\n" + body
    if rng.random() < 0.15:
        return sent[: rng.randrange(len(sent) + 1)], True
    return sent, framing == 2


async def run(seed: int) -> tuple[Any, ...]:
    """One exchange, as the seed says."""
    rng = random.Random(seed)
    sent, closes = answer_of(rng)
    cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.choice([0, 1, 4])))
    ends = [*cuts, len(sent)]
    form, dialect, max_tokens = rng.choice(list(Form)), rng.choice([OPENAI, SGLANG]), rng.choice([None, 2])
    reads = rng.random() < 0.3
    sink = Gathered()

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = 0
        for end in ends:
            writer.write(sent[start:end])
            await writer.drain()
            await asyncio.sleep(0.001)
            start = end
        if closes:
            writer.close()

    client = connect()
    async with raw_engine(script) as engine:
        try:
            answer = await client.send(HttpRequest(engine.url, body=rng.randbytes(50)), connect_seconds=5)
            odd = [value for name, value in answer.headers if name.lower() == "x-odd"]
            if reads:
                return answer.status, odd, await answer.read(100_000)
            first: list[int] = []
            report = await answer.relay(
                sink, form, dialect, max_tokens=max_tokens, on_first_output=lambda: first.append(1)
            )
            told = {name: value for name, value in asdict(report).items() if not name.endswith(("_at", "_since"))}
            told["error"] = told["error"] and json.loads(told["error"])
            # Pieces are cut where reads were.
            passed = sink.data if form is not Form.MESSAGES else len(sink.data) > 0
            told["passed"] = told["passed"] if form is not Form.MESSAGES else 0
            return answer.status, odd, passed, told, first
        except HttpFailed as failed:
            return failed.kind, sink.data if form is not Form.MESSAGES else b""
        finally:
            await client.close()


@pytest.mark.slow
async def test_the_same_answers_become_the_same() -> None:
    if len(TRANSPORTS) < 2:
        pytest.skip("the extension is not built")
    base = test_seed()
    for seed in range(base, base + CASES):
        found = []
        for transport in TRANSPORTS:
            with made_of(transport):
                async with asyncio.timeout(20):
                    found.append(await run(seed))
        if isinstance(found[0][0], str) and isinstance(found[1][0], str):
            # What had come before a connection broke may have been passed on or not.
            assert found[0][0] == found[1][0], f"seed {seed}: {found}"
        else:
            assert found[0] == found[1], f"seed {seed}: {found}"


async def answered(seed: int) -> tuple[int, bytes]:
    """What a server makes of a random request: its status and the body."""
    rng = random.Random(seed)
    body = rng.randbytes(rng.choice([0, 1, 1000, 150_000]))
    head = (
        f"{rng.choice(['POST', 'PUT', 'GET'])} /a%20b?{rng.randrange(9)} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    )
    if rng.random() < 0.5:
        request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        size = rng.choice([1000, 70_000])
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        request = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, pieces)) + LAST_CHUNK
    fault = rng.randrange(6)
    if fault == 0:
        at = rng.randrange(len(head))
        request = request[:at] + b"\0" + request[at:]
    streams = rng.random() < 0.5
    at = rng.randrange(len(request) + 1)

    async def handle(call: HttpCall) -> None:
        got = await call.body()
        if streams:
            await call.start(200, [])
            for start in range(0, len(got), 40_000):
                await call.write(got[start : start + 40_000])
            await call.end()
        else:
            await call.respond(200, [], f"{call.method} {call.path} {call.query} ".encode() + got)

    async with served(handle) as (_, port):
        answer = await exchange(port, request[:at], request[at:])
    head_of, _, rest = answer.partition(b"\r\n\r\n")
    status = int(head_of.split(b" ")[1]) if answer.startswith(b"HTTP/1.") else 0
    if b"transfer-encoding: chunked" in head_of.lower():
        whole = b""
        while rest:
            size_of, _, rest = rest.partition(b"\r\n")
            length = int(size_of, 16)
            whole += rest[:length]
            rest = rest[length + 2 :]
        rest = whole
    return status, rest if status == 200 else b""


async def test_the_same_requests_are_answered_alike() -> None:
    if len(TRANSPORTS) < 2:
        pytest.skip("the extension is not built")
    base = test_seed()
    for seed in range(base, base + CASES):
        found = []
        for transport in TRANSPORTS:
            with made_of(transport):
                async with asyncio.timeout(20):
                    found.append(await answered(seed))
        # A damaged head may be no head at all, for one as for the other.
        refused = [status != 200 for status, _ in found]
        assert refused[0] == refused[1] and (refused[0] or found[0] == found[1]), f"seed {seed}: {found}"
