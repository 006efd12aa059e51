"""The open-loop driver, against targets that answer when the test says so."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

from kvscout_client import GenerateChunk, Usage
from kvscout_common.errors import Unavailable
from kvscout_lab.real_time.open_loop import Limits, OpenLoop
from kvscout_lab.real_time.record import RequestRecord
from kvscout_lab.workloads.sessions import Session, Turn


def session(name: str, *turns: tuple[int, ...], start: float = 0.0) -> Session:
    return Session(name, start, tuple(Turn(array("I", new), 2, 0.0) for new in turns))


class Engine:
    """Answers 8, 9 to everything, once the gate is open."""

    def __init__(self, *, open_gate: bool = True) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.in_flight = self.most_in_flight = 0
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.failing: set[str] = set()
        if open_gate:
            self.gate.set()

    async def __call__(self, token_ids: array[int], max_tokens: int, request_id: str) -> AsyncIterator[GenerateChunk]:
        self.prompts[request_id] = token_ids.tolist()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.started.set()
        try:
            await self.gate.wait()
            if request_id in self.failing:
                raise Unavailable("gone")
            yield GenerateChunk(token_ids=(8,))
            yield GenerateChunk(token_ids=(9,), usage=Usage(len(token_ids), 2, 1))
        finally:
            self.in_flight -= 1


async def test_each_prompt_is_the_history_with_the_models_own_replies() -> None:
    engine = Engine()
    run = await OpenLoop(engine).run([session("s", (1, 2), (3,), (4,))])
    assert engine.prompts == {"s/0": [1, 2], "s/1": [1, 2, 8, 9, 3], "s/2": [1, 2, 8, 9, 3, 8, 9, 4]}
    assert [record.cached_tokens for record in run.records] == [1, 1, 1]
    assert [record.output_tokens for record in run.records] == [2, 2, 2]


async def test_sessions_start_whatever_is_in_flight() -> None:
    engine = Engine(open_gate=False)
    replay = asyncio.create_task(OpenLoop(engine).run([session(str(n), (1,)) for n in range(20)]))
    async with asyncio.timeout(30):
        while engine.in_flight < 20:
            engine.started.clear()
            await engine.started.wait()
    engine.gate.set()
    run = await replay
    assert len(run.records) == 20
    assert not any(record.delayed for record in run.records)


async def test_beyond_the_limits_requests_wait_with_their_latency_running_or_are_refused_and_counted() -> None:
    engine = Engine(open_gate=False)
    records: list[RequestRecord] = []
    refused = asyncio.Event()

    def on_record(record: RequestRecord) -> None:
        records.append(record)
        refused.set()

    driver = OpenLoop(engine, Limits(max_outstanding=1, max_waiting=2), on_record)
    replay = asyncio.create_task(driver.run([session(str(n), (1,), (2,)) for n in range(4)]))
    async with asyncio.timeout(30):
        await refused.wait()
    engine.gate.set()
    run = await replay
    assert [(record.session_id, record.refused) for record in records[:1]] == [("3", True)]
    assert run.abandoned_turns == 1
    assert sum(bool(record.error) for record in run.records) == 1
    assert engine.most_in_flight == 1
    waited = [record for record in run.records if record.delayed]
    assert len(waited) >= 2
    assert all(
        record.first_token is not None
        and record.ttft_seconds == record.first_token - record.scheduled
        and record.sent > record.scheduled
        for record in waited
    )


async def test_a_failed_turn_ends_its_session_alone() -> None:
    engine = Engine()
    engine.failing.add("a/0")
    run = await OpenLoop(engine).run([session("a", (1,), (2,), (3,)), session("b", (1,), (2,))])
    assert run.abandoned_turns == 2
    assert sorted((r.session_id, r.turn, r.error) for r in run.records) == [
        ("a", 0, "Unavailable: gone"),
        ("b", 0, ""),
        ("b", 1, ""),
    ]


async def test_a_later_turn_is_due_its_think_time_after_the_reply() -> None:
    turns = (Turn(array("I", [1]), 2, 0.0), Turn(array("I", [2]), 2, 0.02))
    run = await OpenLoop(Engine()).run([Session("s", 0.01, turns)])
    first, second = run.records
    assert first.scheduled == 0.01
    assert second.scheduled == first.finished + 0.02
    assert second.sent >= second.scheduled
