"""Peers that send frames without end, or parts of a call without ever finishing it: others are served meanwhile."""

import asyncio
import gzip
import json
import struct
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest
from support.http2_resets import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    headers_of,
)
from support.processes import eventually
from transport.echo_service import SERVICE, native, native_channel

from kvscout_common.hashing import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")

CONTINUATION, PRIORITY, WINDOW_UPDATE = 9, 2, 8
UNARY = f"/{SERVICE}/Unary"
TIMES = 20_000
MAX_HELD = 8 << 20
"""Bytes that the server may hold for one such peer."""

OPENED = frame(HEADERS, END_HEADERS, 1, headers_of(UNARY))
UNFINISHED = frame(HEADERS, 0, 1, headers_of(UNARY))
FLOODS = {
    "pings": (b"", frame(PING, 0, 0, bytes(8))),
    "settings": (b"", frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))),
    "empty data": (OPENED, frame(DATA, 0, 1)),
    "priorities": (OPENED, frame(PRIORITY, 0, 1, bytes(5))),
    "windows": (OPENED, frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "continuations": (UNFINISHED, frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 50)),
    "unknown frames": (OPENED, frame(77, 0, 1, bytes(100))),
}
"""What begins it, and what is sent again and again."""


@pytest.mark.parametrize("name", FLOODS)
async def test_frames_without_end_whose_answers_nobody_reads_hold_nobody_up(name: str) -> None:
    begun, again = FLOODS[name]
    async with native() as served, native_channel(served.port) as channel:
        assert await channel.unary_unary(UNARY)(b"{}", timeout=20)
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.transport.set_write_buffer_limits(high=1)
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun)

        async def send() -> None:
            with suppress(ConnectionError):
                for _ in range(TIMES // 100):
                    writer.write(again * 100)
                    await writer.drain()

        sending = asyncio.create_task(send())
        for _ in range(30):
            assert await channel.unary_unary(UNARY)(b"{}", timeout=20)
        assert served.server.stats()["queued_bytes"] < MAX_HELD
        sending.cancel()
        await asyncio.wait({sending})
        writer.transport.abort()
        await eventually(lambda: bool(served.server.stats()["connections"] <= 1), what="the peer is forgotten")


async def test_calls_that_are_begun_and_never_finished_are_bounded_and_end_with_their_connection() -> None:
    async with native(max_streams=50) as served, native_channel(served.port) as channel:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        headers = headers_of(UNARY)
        begun = b"".join(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, 0, stream, b"\0\0\0\x40\0" + bytes(10))
            for stream in range(1, 1001, 2)
        )
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun)
        await eventually(lambda: bool(served.server.stats()["calls"]))
        assert json.loads(await channel.unary_unary(UNARY)(b"{}", timeout=20)) == {}
        assert served.server.stats()["calls"] <= 50
        assert served.echo.running == 0
        writer.transport.abort()
        await eventually(lambda: not served.server.stats()["calls"], what="nothing is left of them")


async def test_small_messages_that_unpack_to_large_ones_are_refused_once_there_is_no_room_for_what_is_in_them() -> None:
    from kvscout_native import RPC_EVENTS, Rpc

    mib, bombs = 1 << 20, 50
    packed = gzip.compress(bytes(mib))
    headers = headers_of(UNARY, {"grpc-encoding": "gzip"})
    rpc = Rpc(max_message_bytes=mib, queue_bytes=4 * mib)
    _, port = rpc.listen("127.0.0.1", 0, [(UNARY, False, False)])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    streams = range(1, 2 * bombs, 2)
    # All are open before the first of them is full: none is refused for what others hold already.
    opened = b"".join(frame(HEADERS, END_HEADERS, stream, headers) for stream in streams)
    message = struct.pack(">BI", 1, len(packed)) + packed
    filled = b"".join(frame(DATA, END_STREAM, stream, message) for stream in streams)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0) + opened + filled)
    refused, taken = 0, 0

    async def count_refused() -> None:
        nonlocal refused
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            refused += head[3] == HEADERS and bool(head[4] & END_STREAM)

    counting = asyncio.create_task(count_refused())

    async def all_seen() -> bool:
        nonlocal taken
        taken += sum(event[0] == RPC_EVENTS["OPEN"] for event in rpc.poll())
        rpc.flush()
        return bool(taken + refused == bombs)

    await eventually(all_seen)
    assert taken == 4
    assert 4 * mib <= rpc.stats()["queued_bytes"] <= 4 * mib + 4096
    counting.cancel()
    await asyncio.wait({counting})
    writer.transport.abort()


async def test_a_message_that_comes_too_slowly_ends_and_what_was_charged_for_it_is_given_back() -> None:
    from kvscout_native import RPC_EVENTS, ByteBudget, Rpc

    budget = ByteBudget(1 << 20, 1 << 19)
    rpc = Rpc(budget=budget, message_window_seconds=0.3)
    _, port = rpc.listen("127.0.0.1", 0, [(UNARY, False, False)])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = b"".join(
        frame(HEADERS, END_HEADERS, stream, headers_of(UNARY)) + frame(DATA, 0, stream, b"\0\0\1\0\0" + bytes(10_000))
        for stream in (1, 3)
    )
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun + frame(HEADERS, END_HEADERS, 5, headers_of(UNARY)))
    admitted = 0

    async def turned(until: Callable[[], bool]) -> bool:
        nonlocal admitted
        for event in rpc.poll():
            assert event[0] == RPC_EVENTS["HEAD"]
            rpc.admit(event[1], "a")
            admitted += 1
        rpc.tick()
        rpc.flush()
        return until()

    await eventually(lambda: turned(lambda: admitted == 3))
    assert budget.held >= 20_000
    await eventually(lambda: turned(lambda: rpc.stats()["calls"] == 0))
    assert (budget.held, rpc.stats()["calls_refused"]) == (0, 3)
    writer.transport.abort()


async def test_messages_that_are_coming_are_within_the_budget_and_the_share_of_their_tenant() -> None:
    from kvscout_native import RPC_EVENTS, ByteBudget, Rpc

    mib = 1 << 20
    budget = ByteBudget(4 * mib, 2 * mib)
    rpc = Rpc(budget=budget)
    _, port = rpc.listen("127.0.0.1", 0, [(UNARY, False, False)])
    channels = [native_channel(port) for _ in range(4)]
    whole = [0]

    async def turn() -> None:
        while True:
            for event in rpc.poll():
                if event[0] == RPC_EVENTS["HEAD"]:
                    rpc.admit(event[1], "a")
                elif event[0] == RPC_EVENTS["OPEN"]:
                    whole[0] += 1
            assert budget.held <= 2 * mib
            rpc.flush()
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    calls = [channel.unary_unary(UNARY)(bytes(mib), timeout=20) for channel in channels]
    codes = []
    for ended in asyncio.as_completed([call.code() for call in calls]):
        codes.append(await ended)
        if len(codes) == 2:
            break
    assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()

    async def nothing_held() -> bool:
        assert not turning.done(), turning.exception()
        return budget.held == 0

    await eventually(nothing_held)
    turning.cancel()
    await asyncio.wait({turning})
    assert whole[0] <= 2
