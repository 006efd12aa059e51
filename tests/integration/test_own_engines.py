"""An engine of one's own: OpenAI's API by Python's HTTP server, and events by the publisher library."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from support.gateway_stack import Stack, running_stack
from support.processes import eventually

from kvscout_client import KvEventPublisher

MODEL, BLOCK = "own", 16
PROMPT = list(range(640))


class OwnEngine(ThreadingHTTPServer):
    """Answers /v1/completions, and nothing else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        """Of all that was asked."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OwnEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.send_error(404)

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
        choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
        answer = {"id": "own-1", "object": "text_completion", "model": body["model"], "choices": [choice]}
        if not body.get("stream"):
            self._send("application/json", json.dumps({**answer, "usage": usage}).encode())
            return
        events = [answer, {**answer, "choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def own_engine() -> Iterator[OwnEngine]:
    with OwnEngine() as engine:
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()


@asynccontextmanager
async def publishing(
    stack: Stack, server: OwnEngine, worker_id: str, engine: str = "custom"
) -> AsyncIterator[KvEventPublisher]:
    async with KvEventPublisher(
        worker_id=worker_id, model=MODEL, block_size=BLOCK, transport="grpc", indexers=[stack.indexer.address],
        http_endpoint=server.url, engine=engine,
    ) as publisher:  # fmt: skip
        yield publisher


async def ask(stack: Stack, **body: Any) -> tuple[int, str, str, str]:
    """Status, text, worker and cached tokens."""
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **body}) as answer,
    ):
        headers = answer.headers
        text = await answer.text()
        return (
            answer.status,
            text,
            headers.get("x-kvscout-worker", ""),
            headers.get("x-kvscout-cached-tokens", ""),
        )


@pytest.mark.parametrize("kind", ["openai", "trtllm"])
async def test_an_engine_with_openais_api_is_dispatched_to_and_asked_for_nothing_else(kind: str) -> None:
    with own_engine() as first, own_engine() as second:
        async with (
            running_stack("--http-port", "0", mockers=()) as stack,
            publishing(stack, first, "a", engine=kind),
            publishing(stack, second, "b", engine=kind) as events,
        ):
            await stack.client.until_known("a", "b")
            events.publish_stored(PROMPT, [BLOCK] * 40, list(range(1, 41)))
            await stack.client.until_indexed(PROMPT, 40, model=MODEL)

            async def is_scheduled() -> bool:
                """The gateway has passed on to the scheduler what was registered at the indexer."""
                return not (await stack.client.route(PROMPT, model=MODEL)).degraded

            await eventually(is_scheduled, what="a decision of the scheduler")
            for stream in (False, True):
                status, text, worker, cached = await ask(stack, stream=stream)
                assert (status, worker, cached) == (200, "b", "624"), text
                assert '"text": "hi"' in text
            assert text.endswith("data: [DONE]\n\n")
        assert (first.paths, second.paths) == ([], ["/v1/completions"] * 2)


async def test_a_custom_engine_is_not_dispatched_to() -> None:
    with own_engine() as engine:
        async with running_stack("--http-port", "0", mockers=()) as stack, publishing(stack, engine, "a"):
            await stack.client.until_known("a")
            status, text, _, _ = await ask(stack)
        assert (status >= 400, engine.paths) == (True, [])
        assert "a" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "openia", "http_endpoint": "http://a"}, "engine 'openia' is not one of"),
        ({"engine": "openai"}, "http_endpoint must be given for an engine 'openai'"),
    ],
)
def test_a_wrong_engine_is_named(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KvEventPublisher(
            worker_id="a", model=MODEL, block_size=BLOCK, transport="grpc", indexers=["i:1"],
            **options,  # type: ignore[arg-type]  # texts
        )  # fmt: skip
