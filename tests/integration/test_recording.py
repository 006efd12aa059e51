"""Requests of real processes recorded over the wire, and what is made of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.gateway_stack import MODEL, Stack, running_stack
from support.processes import eventually

from kvscout.v1 import gateway_pb2
from kvscout_client import ClientSecurity, Router
from kvscout_common.errors import PermissionDenied
from kvscout_lab.workloads.recording import from_recording, read_recording

KEY = bytes(range(16))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack("--http-port", "0") as stack:
        yield stack


class Recorded:
    """Requests that are recorded from now on."""

    def __init__(self, router: Router, **arguments: Any) -> None:
        self.requests: list[gateway_pb2.RecordedRequest] = []
        self._stream = router.record(KEY, **arguments)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._stream:
            assert not message.lost
            self.requests += message.requests

    async def begun(self, stack: Stack) -> None:
        """Waits until a request is recorded."""

        async def seen() -> bool:
            return await post(stack, prompt=[1]) == 200 and bool(self.requests)

        await eventually(seen, what="a recorded request")

    async def long(self, number: int) -> list[gateway_pb2.RecordedRequest]:
        """Waits until so many are there whose prompts are more than a token."""

        async def there() -> bool:
            return len(self._long) >= number

        await eventually(there, what=f"{number} recorded requests")
        return self._long

    @property
    def _long(self) -> list[gateway_pb2.RecordedRequest]:
        return [request for request in self.requests if request.prompt_tokens > 1]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stream.aclose()


async def post(stack: Stack, **body: Any) -> int:
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json={"model": MODEL, "max_tokens": 4} | body) as answer:
        await answer.read()
        return answer.status


@pytest.mark.asyncio(loop_scope="module")
async def test_what_engines_say_and_how_requests_end_is_recorded(stack: Stack) -> None:
    tokens = [random.randrange(30_000) for _ in range(200)]
    async with Router(stack.gateway.address) as router:
        recorded = Recorded(router, tokens_per_hash=16)
        await recorded.begun(stack)
        assert await post(stack, prompt=tokens) == 200
        await stack.client.until_indexed(tokens, 12)
        assert await post(stack, prompt=tokens, stream=True) == 200
        assert await post(stack, prompt=tokens, model="nope") == 404
        first, second, *_ = await recorded.long(2)
        await recorded.stop()
    assert [(one.prompt_tokens, one.output_tokens, one.outcome) for one in (first, second)] == [(200, 4, "ok")] * 2
    assert (first.cached_tokens, second.cached_tokens, second.predicted_tokens) == (0, 192, 192)
    assert (first.streamed, second.streamed) == (False, True)
    assert 0 < second.ttft_seconds <= second.seconds
    assert first.worker_id == second.worker_id
    assert len(first.prefix_hashes) == 200 // 16
    assert first.prefix_hashes == second.prefix_hashes
    assert first.session == second.session != 0, "the second goes on where the first was"


async def test_only_admins_record(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "tokens:\n" + "".join(f"  - {{token: of-{role}, role: {role}}}\n" for role in ("viewer", "client"))
    )
    flags = ("--auth-tokens", str(tokens))
    async with running_stack(*flags, mockers=()) as stack:
        for role in ("viewer", "client"):
            (tmp_path / role).write_text(f"of-{role}")
            security = ClientSecurity(token_file=tmp_path / role)
            async with Router(stack.gateway.address, security=security) as router:
                with pytest.raises(PermissionDenied):
                    await anext(router.record(KEY))


def texts_of(directory: Path) -> list[bytes]:
    """What can be read of files that are still written to."""
    return [zlib.decompressobj(wbits=31).decompress(path.read_bytes()) for path in directory.glob("*.gz")]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_recording_of_a_stack_is_a_workload(stack: Stack, tmp_path: Path) -> None:
    """By the command, over a gateway that is restarted: what came before and after is in the files."""
    recorder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_cli.main", "record", "--gateway", stack.gateway.address, "--directory",
        str(tmp_path / "files"), "--key-file", str(tmp_path / "key"), "--tokens-per-hash", "16",
        stderr=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    rng = random.Random(5)
    system = [rng.randrange(30_000) for _ in range(64)]

    def recorded() -> int:
        return sum(path.stat().st_size > 0 for path in (tmp_path / "files").glob("*.gz"))

    async def begun() -> bool:
        await post(stack, prompt=[1])
        return bool(recorded())

    await eventually(begun, what="a file")
    for _ in range(25):
        assert await post(stack, prompt=[*system, *(rng.randrange(30_000) for _ in range(40))]) == 200

    async def written() -> bool:
        await post(stack, prompt=[1])  # a file is flushed as it is written to
        return sum(text.count(b'"input_length":104,') for text in texts_of(tmp_path / "files")) == 25

    await eventually(written, what="the requests in the file")
    recorder.send_signal(signal.SIGINT)
    _, stderr = await recorder.communicate()
    assert recorder.returncode == 0, stderr.decode()
    assert b"requests in 1 files" in stderr
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    recording = read_recording(list((tmp_path / "files").glob("*.gz")))
    assert {one.worker_id for one in recording.workers} == {"w0", "w1"}
    long = [one for one in recording.requests if one.prompt_tokens == 104]
    assert len(long) == 25
    assert len({one.hash_ids[:4] for one in long}) == 1, "they share their system prompt"
    assert len({one.hash_ids for one in long}) == 25
    assert from_recording("r", recording).requests == len(recording.requests)
