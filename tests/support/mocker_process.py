"""A real mocker process for tests: started on free ports, stopped when the block ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import zmq
import zmq.asyncio

from support.processes import START_SECONDS, Process, spawn

DEADLINE_SECONDS = 90.0


class MockerProcess(NamedTuple):
    """A running mocker and a client of it."""

    process: Process
    url: str
    ranks: list[dict[str, Any]]
    """As in the ready line: dp_rank, events, replay."""
    http: aiohttp.ClientSession
    bootstrap_port: int = 0
    """Of a prefill engine with SGLang's API."""
    grpc_port: int = 0
    """Of the stream of events; 0 = there is none."""

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON body of a POST."""
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(
        self, prompt: list[int] | str, headers: dict[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The answer of a completion that succeeds."""
        status, answer = await self.post("/v1/completions", {"prompt": prompt, **fields}, headers)
        assert status == 200, answer
        return answer

    async def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` by its name with labels."""
        async with self.http.get(self.url + "/metrics") as response:
            text = await response.text()
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def replay(self, start: int, rank: int = 0) -> list[list[bytes]]:
        """All answer frames of the replay socket from `start` on, the closing one included."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        try:
            socket.connect(self.ranks[rank]["replay"])
            await socket.send_multipart([b"", start.to_bytes(8, "big", signed=start < 0)])
            answers: list[list[bytes]] = []
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not answers or answers[-1][-2] != b"\xff" * 8:
                    answers.append(await socket.recv_multipart())
            return answers
        finally:
            socket.close()
            context.term()


def cached_tokens(answer: dict[str, Any]) -> int:
    """The cached tokens an answer reports."""
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@asynccontextmanager
async def running_mocker(*flags: str, environment: dict[str, str] | None = None) -> AsyncIterator[MockerProcess]:
    """Start `python -m kvscout_mocker.main` with free ports and a hundredfold speed, then stop it.

    Args:
        flags: Further command line flags; later ones win.
        environment: Replaces the environment if given.
    """
    ports = ("--port", "0", "--events-port", "0", "--replay-port", "0", "--bootstrap-port", "0", "--speedup", "100")
    process = await spawn("kvscout_mocker.main", *ports, *flags, environment=environment)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            ready = json.loads(await process.stdout.readline())
        assert ready["ready"] is True
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{ready['http_port']}"
            yield MockerProcess(process, url, ready["ranks"], http, ready["bootstrap_port"], ready["grpc_port"])
    finally:
        stopping = process.returncode is None
        if stopping:
            process.terminate()
        await process.communicate()
        assert not stopping or process.returncode == 0
