"""A proxy's access log ends picks by their names, and nothing else that a log may say does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.grpc_server import serving

from kvscout.accesslog.v3 import accesslog_pb2 as pb
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.access_log import SERVICE, AccessLog, Over, overs


def entry(headers: Mapping[str, str], status: int | None = None) -> pb.HttpAccessLogEntry:
    made = pb.HttpAccessLogEntry(request=pb.HttpRequestProperties(request_headers=headers))
    if status is not None:
        made.response.response_code.value = status
    return made


def message(*entries: pb.HttpAccessLogEntry) -> pb.StreamAccessLogsMessage:
    return pb.StreamAccessLogsMessage(http_logs=pb.HttpAccessLogEntries(log_entry=entries))


class Ended:
    """What an `Ender` is told."""

    def __init__(self) -> None:
        self.told: list[Over] = []

    def end(self, over: Over) -> None:
        self.told.append(over)


def test_entries_that_name_no_pick_are_nobodys() -> None:
    several = message(
        entry({wire.PICK: "a"}, 200), entry({}, 200), entry({"x-request-id": "b"}), entry({wire.PICK: "c"})
    )
    assert list(overs(several)) == [Over("a", 200), Over("c", 0)]
    assert list(overs(pb.StreamAccessLogsMessage())) == []


@asynccontextmanager
async def proxy(ended: Ended) -> AsyncIterator[grpc.aio.Channel]:
    """As a proxy sees it: none of our own clients sends logs."""
    ports: list[int] = []
    async with (
        serving(AccessLog(ended).add_to, on_port=ports.append),
        grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
    ):
        yield channel


async def test_a_log_is_read_as_it_comes_and_answered_at_its_end() -> None:
    ended = Ended()
    async with proxy(ended) as channel:
        call: Any = channel.stream_unary(
            f"/{SERVICE}/StreamAccessLogs", request_serializer=pb.StreamAccessLogsMessage.SerializeToString
        )()
        for name in ("a", "b"):
            await call.write(message(entry({wire.PICK: name}, 200)))
        await call.done_writing()
        assert await call == b""
    assert ended.told == [Over("a", 200), Over("b", 200)]


async def test_what_is_no_log_is_refused() -> None:
    async with proxy(Ended()) as channel:
        call: Any = channel.stream_unary(f"/{SERVICE}/StreamAccessLogs")()
        await call.write(b"\x12\xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
