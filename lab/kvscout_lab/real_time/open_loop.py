"""The open-loop driver: sends sessions through a target at their time, whatever is in flight.

No coordinated omission: a request has a due time that does not depend on other sessions, and its latency counts from
there, not from when the driver got round to sending it. Outstanding requests are bounded; what finds no place waits
(`delayed`, its latency runs on) and, when too many wait, is `refused`. Both are counted and shown, neither is hidden.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from kvscout_client import GenerateChunk, Router, StopConditions
from kvscout_common.errors import KvscoutError
from kvscout_common.worker import WorkerRank
from kvscout_lab.real_time.record import Replay, RequestRecord
from kvscout_lab.workloads.sessions import Session


class Target(Protocol):
    """Receiver of requests."""

    def __call__(self, token_ids: array[int], max_tokens: int, request_id: str) -> AsyncIterator[GenerateChunk]:
        """Run a prompt and stream its output; raises `KvscoutError` if it fails."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the driver."""

    max_outstanding: int = 512
    """Requests in flight."""
    max_waiting: int = 4096
    """Requests that wait for a place; one more is refused."""
    request_timeout_seconds: float = 120.0


def gateway_target(router: Router, model: str, limits: Limits) -> Target:
    """Send requests to a gateway; outputs always have the requested length."""

    def send(token_ids: array[int], max_tokens: int, request_id: str) -> AsyncIterator[GenerateChunk]:
        return router.generate(
            token_ids,
            model=model,
            request_id=request_id,
            stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            timeout_seconds=limits.request_timeout_seconds,
        )

    return send


class OpenLoop:
    """One replay. Used once, on one event loop."""

    def __init__(
        self, target: Target, limits: Limits = Limits(), on_record: Callable[[RequestRecord], None] = lambda _: None
    ) -> None:
        """Prepare a replay.

        Args:
            target: Receiver of the requests.
            limits: Bounds.
            on_record: Called with each record as its request ends, for live progress; must not block.
        """
        self._target = target
        self._on_record = on_record
        self._max_waiting = limits.max_waiting
        self._slots = asyncio.Semaphore(limits.max_outstanding)
        self._waiting = 0
        self._records: list[RequestRecord] = []
        self._abandoned = 0
        self._clock = asyncio.get_running_loop().time
        self._start = 0.0

    async def run(self, sessions: Iterable[Session]) -> Replay:
        """Send every session and return when the last turn has ended.

        Args:
            sessions: In order of their start; taken one by one, so that they may be made lazily.
        """
        self._start = self._clock()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                await self._until(session.start_seconds)
                group.create_task(self._session(session), name=session.session_id)
        return Replay(tuple(self._records), self._abandoned, self._now())

    def _now(self) -> float:
        return self._clock() - self._start

    async def _until(self, moment: float) -> None:
        # Yields even when late, or a burst of due sessions would start none before all were taken.
        await asyncio.sleep(max(0.0, moment - self._now()))

    async def _session(self, session: Session) -> None:
        history = array("I")
        due = session.start_seconds
        for number, turn in enumerate(session.turns):
            history += turn.new_tokens
            due += turn.think_seconds
            await self._until(due)
            record, reply = await self._place(_Request(session.session_id, number, history, turn.max_tokens, due))
            self._records.append(record)
            self._on_record(record)
            if record.error:
                # The next prompt would contain a reply that does not exist.
                self._abandoned += len(session.turns) - number - 1
                return
            history += reply
            due = record.finished

    async def _place(self, request: _Request) -> tuple[RequestRecord, array[int]]:
        delayed = self._slots.locked()
        if delayed and self._waiting >= self._max_waiting:
            now = self._now()
            return request.record(sent=now, finished=now, refused=True, error="refused by the driver"), array("I")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._send(request, delayed)
        finally:
            self._slots.release()

    async def _send(self, request: _Request, delayed: bool) -> tuple[RequestRecord, array[int]]:
        sent = self._now()
        arrivals: list[float] = []
        reply = array("I")
        worker: WorkerRank | None = None
        cached: int | None = None
        prompt_tokens = len(request.prompt)
        error = ""
        try:
            async for chunk in self._target(request.prompt, request.max_tokens, request.request_id):
                if chunk.token_ids:
                    arrivals.append(self._now())
                    reply.extend(chunk.token_ids)
                if chunk.decision is not None:
                    worker = chunk.decision.worker
                if chunk.usage is not None:
                    cached = chunk.usage.cached_tokens
                    # A chat template adds to what was sent.
                    prompt_tokens = chunk.usage.prompt_tokens or prompt_tokens
            if not reply:
                error = "no tokens came back"
        except KvscoutError as failure:
            error = f"{type(failure).__name__}: {failure}"
        record = request.record(
            sent=sent,
            finished=self._now(),
            first_token=arrivals[0] if arrivals else None,
            gaps_seconds=tuple(after - before for before, after in pairwise(arrivals)),
            prompt_tokens=prompt_tokens,
            output_tokens=len(reply),
            cached_tokens=cached,
            worker=worker,
            delayed=delayed,
            error=error,
        )
        return record, reply


class _Request(NamedTuple):
    session_id: str
    turn: int
    prompt: array[int]
    max_tokens: int
    due: float

    @property
    def request_id(self) -> str:
        return f"{self.session_id}/{self.turn}"

    def record(self, **values: Any) -> RequestRecord:
        values.setdefault("prompt_tokens", len(self.prompt))
        return RequestRecord(session_id=self.session_id, turn=self.turn, scheduled=self.due, **values)
