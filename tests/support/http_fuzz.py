"""Every HTTP path of a gateway, called by a hostile tenant with any method, framing and body, by every role.

The counterpart of `rpc_fuzz`, and run where that is: whatever comes, the gateway must live, answer each well-framed
request with a status of its own or its engine's, keep its log free of tracebacks and its memory bounded, and neither
change nor show anything of another tenant. A client in a process of its own asks for `/health` all the time; how long
it waited at most is printed, and that none of its requests failed is required.

`FUZZ_SEED` makes the same requests again, each from its own number; how they interleave is not repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from support.fuzz_callers import Callers, seconds_and_seed
from support.hostile_messages import STRINGS
from support.hostile_world import CALLERS, HOSTILE, NOBODY, SECRET, HostileWorld, hostile_world, token_of

PARALLEL = 6
"""Requests at a time."""
REQUEST_SECONDS = 20.0
"""A request that takes longer hangs."""
MAX_ANSWER_BYTES = 4 << 20
UNEXPECTED: Final = b"the gateway has failed"
"""What the gateway says of an error that it did not expect."""
PATHS: Final = (
    "/health", "/ready", "/metrics", "/", "/v1/models", "/v1/models/mock", "/v1/models/a%2Fb", "/v1/models/",
    "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/", "/busy_threshold", "/dashboard/events",
    "/v1/responses", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/messages?beta=true", "/v1/embeddings",
    "/v1/audio/transcriptions", "/tokenize", "/detokenize", "/generate",
    "/score", "/rerank", "/pooling", "/classify", "/invocations", "/v1/load_lora_adapter", "/flush_cache",
    "/sleep", "/v1/admin/x", "/v1/abort_requests", "/v1/../metrics", "//metrics", "/v1/completions?x=%00&y=%ff",
    "/v1/%2e%2e/metrics", "/kv_event_sources", "/%", "/\xe9", "/" + "a" * 3_000, "*", "http://localhost/health",
)  # fmt: skip
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW", "post")
TYPES: Final = (
    "application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x",
    "multipart/form-data", 'multipart/form-data; boundary="', "application/x-www-form-urlencoded", "",
)  # fmt: skip
HEADERS: Final = (
    ("X-Request-Id", "r"), ("X-Request-Id", "\x7f" * 20), ("x-kvscout-tenant", "probe"), ("x-kvscout-tenant", "*"),
    ("x-prefiller-host-port", "127.0.0.1:1"), ("x-data-parallel-rank", "3"), ("x-session-id", "s" * 3_000),
    ("Expect", "100-continue"), ("Connection", "close"), ("Connection", "authorization"), ("Origin", "http://evil.test"),
    ("Host", "evil.test"), ("traceparent", "00-" + "f" * 32 + "-" + "f" * 16 + "-01"), ("Accept-Encoding", "gzip"),
    ("Transfer-Encoding", "identity"), ("Content-Length", "3"), ("Cookie", "a=b"),
)  # fmt: skip
NAMES: Final = (
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "priority",
    "tools", "tool_choice", "kv_transfer_params", "data_parallel_rank", "bootstrap_host", "rid", "logprobs", "input",
    "system", "instructions", "previous_response_id", "store", "max_output_tokens",
    "user", "lora_name", "cache_salt", "response_format", "echo", "active_decode_blocks_threshold", "suffix",
)  # fmt: skip
FRAMINGS: Final = ("length", "length", "length", "chunked", "short", "slow", "half-closed", "gone", "garbage")


@dataclass(frozen=True, slots=True)
class Request:
    """One request; all of it follows from the seed and its number."""

    number: int
    caller: str
    framing: str
    head: bytes
    body: bytes

    @property
    def is_whole(self) -> bool:
        """Whether it is framed as HTTP/1.1 says, so that it has to be answered."""
        return self.framing in ("length", "chunked", "slow", "half-closed")

    def __str__(self) -> str:
        shown = f"{self.head[:300]!r} {self.body[:300]!r}{'…' if len(self.body) > 300 else ''}"
        return f"#{self.number} by {self.caller}, {self.framing}: {shown}"


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(STRINGS[:24])
    if kind == 1:
        return rng.choice([0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, 10**400 if depth else 7])
    if kind == 2:
        return rng.choice([True, False, None])
    if kind == 3:
        return [rng.randrange(1 << 20) for _ in range(rng.choice([0, 1, 15, 16, 17, 3_000]))]
    if kind == 4:
        return "hello " * rng.choice([0, 1, 40, 20_000])
    if kind == 5:
        return {"role": rng.choice(["user", "system", "tool", "", 3]), "content": rng.choice(["hi", None, [], {}])}
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 50]))]
    return {rng.choice((*NAMES, *STRINGS[:12])): value(rng, depth + 1) for _ in range(rng.choice([0, 1, 4]))}


def document(rng: random.Random) -> bytes:
    """Return a body that is nearly what the gateway expects."""
    fields: dict[str, Any] = {"model": rng.choice(["mock", "mock", "mock", "probe-m", "hidden-m", "", 3])}
    fields["messages" if rng.random() < 0.5 else "prompt"] = rng.choice(
        ["hello", [1, 2, 3] * 20, [{"role": "user", "content": "hello"}], value(rng)]
    )
    if rng.random() < 0.6:
        fields |= {"max_tokens": rng.choice([1, 4, 8]), "stream": rng.random() < 0.5}
    for _ in range(rng.choice([0, 0, 1, 3])):
        fields[rng.choice(NAMES)] = value(rng)
    return json.dumps(fields).encode("utf-8", "surrogatepass")


BODIES: Final[tuple[Callable[[random.Random], bytes], ...]] = (
    *[document] * 8,
    lambda rng: b"",
    lambda rng: document(rng)[: rng.randrange(40)],
    lambda rng: bytes(rng.randrange(256) for _ in range(rng.choice([1, 30, 2_000]))),
    lambda rng: b"\xef\xbb\xbf" + document(rng),
    lambda rng: b'{"model":"\\ud800","prompt":"x"}',
    lambda rng: b'{"model":"mock","model":"mock","prompt":"x"}',
    lambda rng: b'{"model":"mock","prompt":' + b"[" * rng.choice([10, 2_000, 200_000]),
    lambda rng: b'{"model":"mock","messages":[' + b"[]," * rng.choice([1_000, 200_000]) + b"[]]}",
    lambda rng: b'{"model":"mock","prompt":[' + b"1," * rng.choice([1_000, 300_000]) + b"1]}",
    lambda rng: b"{" + b'"a":1,' * 20_000 + b'"model":"mock"}',
    lambda rng: b'{"model":"mock","prompt":NaN,"n":1e999}',
    lambda rng: b'name="model"\r\n' * rng.choice([10, 5_000]),
    lambda rng: b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nmock\r\n--x--\r\n',
    lambda rng: b"--x\r\n" * rng.choice([10, 20_000]) + b"\r\n",
)


def make_request(seed: str, number: int) -> Request:
    """Return the request of a seed and number."""
    rng = random.Random(f"{seed}/{number}")
    framing, body = rng.choice(FRAMINGS), rng.choice(BODIES)(rng)
    caller = rng.choice([*CALLERS, *[HOSTILE + "-admin"] * 4, *[HOSTILE + "-client"] * 6])
    method = rng.choice([*METHODS, *["POST"] * 12, "GET", "GET"])
    lines = [f"{method} {rng.choice(PATHS)} HTTP/1.1", "Host: localhost", f"Content-Type: {rng.choice(TYPES)}"]
    if caller != NOBODY:
        lines.append(rng.choice(["Authorization: Bearer {}", "x-api-key: {}"]).format(token_of(caller)))
    extra = [rng.choice(HEADERS) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    lines += [f"{name}: {text}" for name, text in extra]
    if framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
        size = rng.choice([1, 7, 1_000, 1 << 20])
        chunks = [body[at : at + size] for at in range(0, len(body[:20_000] if size == 1 else body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body) + (50 if framing == 'short' else 0)}")
    if framing == "garbage" or any(name in ("Content-Length", "Transfer-Encoding", "Expect") for name, _ in extra):
        framing = "garbage"
        body = bytes(rng.randrange(256) for _ in range(50)) + body
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    return Request(number, caller, framing, head, body)


@dataclass(slots=True)
class HttpFuzz:
    """A run over one world."""

    world: HostileWorld
    statuses: Counter[str] = field(default_factory=Counter)
    probe: dict[str, Any] = field(default_factory=dict)
    """What the honest client saw."""

    @property
    def _port(self) -> int:
        return int(self.world.services["gateway"].running.ready["http_port"])

    @asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Have an honest client ask for `/health` for the length of a block.

        Raises:
            AssertionError: One of its requests failed.
        """
        probe = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.http_probe", f"http://127.0.0.1:{self._port}/health",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert probe.stdin is not None
        try:
            yield
        finally:
            probe.stdin.close()
            self.probe = json.loads((await probe.communicate())[0])
        assert not self.probe["failures"], f"an honest client saw {self.probe}"

    async def send(self, request: Request) -> None:
        """Send a request and judge the answer.

        Raises:
            AssertionError: A finding.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._send(request)
        except TimeoutError:
            raise AssertionError(f"no answer to {request}") from None
        self._judge(request, answer)

    async def _send(self, request: Request) -> bytes:
        """Return all that the gateway says; an answer that streams on is left after `MAX_ANSWER_BYTES`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            if request.framing == "slow":
                for at in range(0, min(len(request.head), 200), 40):
                    writer.write(request.head[at : at + 40])
                    await asyncio.sleep(0.001)
                writer.write(request.head[at + 40 :])
            else:
                writer.write(request.head)
            writer.write(request.body)
            if request.framing == "gone":
                return b""
            if request.framing in ("half-closed", "short") and writer.can_write_eof():
                writer.write_eof()
            return await _answer(reader, to_head=request.head.startswith(b"HEAD"))
        except OSError:  # it was refused before all of it was sent
            return b""
        finally:
            writer.transport.abort()

    def _judge(self, request: Request, answer: bytes) -> None:
        status = re.match(rb"HTTP/1\.1 ([0-9]{3}) ", answer)
        self.statuses[status[1].decode() if status else "none"] += 1
        assert SECRET.encode() not in answer, f"the probe's secret is in the answer to {request}"
        assert b"Traceback" not in answer, f"a traceback is in the answer to {request}"
        assert not (status and status[1] == b"500" and UNEXPECTED in answer), f"{answer[:500]!r} to {request}"


async def _answer(reader: asyncio.StreamReader, *, to_head: bool) -> bytes:
    """Return the head and body of one answer, by its own framing."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = await reader.read(1 << 16)
        if not data:
            return answer
        answer += data
        if answer.startswith(b"HTTP/1.1 100"):
            answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    while not to_head and len(body) < MAX_ANSWER_BYTES:
        if length is not None and len(body) >= int(length[1]):
            break
        if b"chunked" in head.lower() and body.endswith(b"0\r\n\r\n"):
            break
        data = await reader.read(1 << 16)
        if not data:
            break
        body += data
    return head + b"\r\n\r\n" + body


async def fuzz_http(seconds: float, seed: str) -> HttpFuzz:
    """Start everything and send requests for so long.

    Raises:
        AssertionError: A finding.
    """
    async with hostile_world() as world:
        fuzz = HttpFuzz(world)
        async with fuzz.probing():
            await Callers(world, seed, make_request, fuzz.send, count=PARALLEL).run(seconds)
    return fuzz


def main() -> int:
    """Run for `FUZZ_SECONDS`; 0 if nothing was found."""
    seconds, seed = seconds_and_seed()
    fuzz = asyncio.run(fuzz_http(seconds, seed))
    print(f"{sum(fuzz.statuses.values())} HTTP requests, answered {dict(fuzz.statuses)}; meanwhile {fuzz.probe}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
