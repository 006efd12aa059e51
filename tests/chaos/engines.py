"""Mockers under load: what they are asked, and what their caches hold."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import aiohttp
from support.free_ports import free_ports

from chaos.members import Member

BLOCK_SIZE = 16
MODEL = "mock"
PAUSE_SECONDS = 0.01
"""Between two requests: what fails is the subject, not what a machine can bear."""
_FAULTY = ("--drop-events", "0.05", "--duplicate-events", "0.02")


class Engine:
    """A mocker and a client that keeps it busy.

    Args:
        number: Which one.
        seed: Of its prompts and of its faults.
        drops: Whether it loses and repeats events.
    """

    def __init__(self, number: int, seed: int, *, drops: bool = True) -> None:
        self.worker_id = f"engine-{number}"
        self.port, self.events_port, self.replay_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.member = Member(
            self.worker_id, "kvscout_mocker.main", "--port", str(self.port), "--events-port", str(self.events_port),
            "--replay-port", str(self.replay_port), "--num-gpu-blocks", "256", "--block-size", str(BLOCK_SIZE),
            "--speedup", "50", "--model", MODEL, "--fault-seed", str(seed % 2**32), *(_FAULTY if drops else ()),
        )  # fmt: skip
        self._rng = Random(seed)
        self.answered = 0
        self.failed = 0

    @classmethod
    def custom(cls, number: int, seed: int, *targets: str) -> Engine:
        """An engine of one's own, which publishes its events itself; `targets` are flags that say where to."""
        engine = cls(number, seed)
        engine.member = Member(
            engine.worker_id, "chaos.custom_engine", "--port", str(engine.port), "--worker-id", engine.worker_id,
            "--seed", str(seed % 2**32), *targets,
        )  # fmt: skip
        return engine

    def prompt(self) -> list[int]:
        """A prompt that shares a beginning with others more often than not."""
        rng = self._rng
        topic = rng.randrange(6)
        tokens = [topic * 1000 + position for position in range(BLOCK_SIZE * rng.randint(1, 12))]
        return tokens + [rng.randrange(20_000, 30_000) for _ in range(rng.randint(1, 4 * BLOCK_SIZE))]

    async def keep_busy(self, http: aiohttp.ClientSession) -> None:
        """Asks for completions until cancelled; an engine that is away costs the request only."""
        while True:
            try:
                await self.complete(http, self.prompt(), max_tokens=self._rng.randint(1, 40))
                self.answered += 1
                await asyncio.sleep(PAUSE_SECONDS)
            except (aiohttp.ClientError, TimeoutError):
                self.failed += 1
                await asyncio.sleep(0.05)

    async def complete(self, http: aiohttp.ClientSession, prompt: list[int], *, max_tokens: int) -> int:
        """Runs a completion; returns the cached tokens that the engine reports."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
        async with http.post(self.url + "/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status}: {answer}")
            cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

    async def fault(self, http: aiohttp.ClientSession, **body: Any) -> None:
        """Asks for a fault; one that is away has none to give."""
        try:
            async with http.post(self.url + "/mock/faults", json=body) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return

    async def truth(self, http: aiohttp.ClientSession) -> dict[int, int]:
        """Copies of each cached block by the engine's hash, once all is published."""
        async with http.get(self.url + "/mock/kv_blocks") as response:
            rank = (await response.json())["0"]
        assert rank["unpublished"] == 0, "the engine is idle"
        return {int(block): copies for block, copies in rank["blocks"].items()}

    async def alive(self, http: aiohttp.ClientSession) -> None:
        """Waits until it answers."""
        async with asyncio.timeout(30):
            while True:
                try:
                    async with http.get(self.url + "/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
