"""What stands wrongly between kvscout and its engines, for tests of what is found to be wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import zmq
from aiohttp import web

from support.openai_stack import engine

SITECUSTOMIZE = """
import os, resource, time
if ahead := float(os.environ.get("TEST_CLOCK_AHEAD", "0")):
    right = time.time
    time.time = lambda: right() + ahead
if limit := int(os.environ.get("TEST_DESCRIPTORS", "0")):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
"""


def altered(
    folder: Path, environment: Mapping[str, str], *, clock_ahead: float = 0, descriptors: int = 0
) -> dict[str, str]:
    """The environment of a Python process whose machine has a wrong clock, or lets it open few files.

    Args:
        folder: Takes the file that makes it so.
        environment: What it has else.
        clock_ahead: Seconds.
        descriptors: Files that it may open; 0 = as many as we.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {
        **environment,
        "PYTHONPATH": str(folder),
        "TEST_CLOCK_AHEAD": str(clock_ahead),
        "TEST_DESCRIPTORS": str(descriptors),
    }


@asynccontextmanager
async def between(
    url: str,
    alter: Callable[[dict[str, Any]], dict[str, Any] | None],
    tell: Callable[[bytes], bytes] = lambda answer: answer,
) -> AsyncIterator[str]:
    """A proxy in front of an engine that does something to completions; its URL.

    Args:
        url: Of the engine.
        alter: What becomes of the body of a completion; None = it is answered with a 500.
        tell: What becomes of the whole answer.
    """

    async def forward(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/v1/completions":
            altered_body = alter(json.loads(body))
            if altered_body is None:
                return web.json_response({"error": {"message": "out of memory"}}, status=500)
            body = json.dumps(altered_body).encode()
        headers = {"Content-Type": "application/json"} if body else {}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, url + request.raw_path, data=body or None, headers=headers) as upstream,
        ):
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await answer.prepare(request)
            await answer.write(tell(await upstream.read()))
            await answer.write_eof()
            return answer

    async with engine(forward) as proxy:
        yield proxy.url


class MuteSocket:
    """A PUB socket that says what a test says, and nothing else."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._sequence = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def send(self, *payloads: bytes) -> None:
        """Publishes batches."""
        for payload in payloads:
            self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
            self._sequence += 1

    def close(self) -> None:
        """Ends it."""
        self._context.destroy(linger=0)

    def __enter__(self) -> MuteSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
