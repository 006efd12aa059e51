"""The stream of a model's events is there after anybody asked for it, and keeps one copy of a message sent twice."""

from __future__ import annotations

import nats
import pytest
from support.nats_server import nats_server

from kvscout_blocks.publish.event_stream import MSG_ID, ensure_stream, message_id
from kvscout_common.nats.names import NatsNames
from kvscout_common.worker import WorkerRank

NAMES = NatsNames("test")
MODEL = "meta/Llama 3.1:8B"


async def test_the_first_one_makes_the_stream_and_later_ones_leave_it_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nats_server() as server, await nats.connect(server.url) as client:
        js = client.jetstream()
        name = await ensure_stream(js, NAMES, "default", MODEL, max_age_seconds=600)
        assert await ensure_stream(js, NAMES, "default", MODEL, max_age_seconds=600) == name
        assert not caplog.messages
        assert await ensure_stream(js, NAMES, "default", MODEL, max_age_seconds=60) == name
        assert "keeps events for 600 s" in caplog.text
        config = (await js.stream_info(name)).config
        assert (config.max_age, config.subjects) == (600, [NAMES.stream_subjects("default", MODEL)])


async def test_a_message_that_is_sent_twice_is_stored_once() -> None:
    async with nats_server() as server, await nats.connect(server.url) as client:
        js = client.jetstream()
        name = await ensure_stream(js, NAMES, "default", MODEL)
        rank = WorkerRank("w.0", 1)
        subject = NAMES.stream_events("default", MODEL, rank)
        for _ in range(2):
            for event_id in range(3):
                await js.publish(subject, b"x", headers={MSG_ID: message_id(rank, 7, event_id)})
        assert (await js.stream_info(name)).state.messages == 3
