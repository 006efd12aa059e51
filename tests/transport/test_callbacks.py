"""Streams whose messages are received, and sent, in callbacks."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from support.processes import eventually
from transport.echo_service import SERVICE, everyone, native, native_channel

from kvscout_common.hashing import native_available
from kvscout_common.rpc.callbacks import can_send_now, receive_each

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: there are no callbacks")

BOTH = f"/{SERVICE}/Both"


async def download(channel: Any, orders: dict[str, Any], received: Any) -> grpc.StatusCode:
    call = channel.unary_stream(f"/{SERVICE}/Download")(json.dumps(orders).encode())
    try:
        await receive_each(call, received)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


async def test_what_is_heard_is_each_message_in_order_and_then_how_the_call_ended() -> None:
    async with everyone() as pairs:
        for pair, (channel, _) in pairs.items():
            for fails, status in (({}, "OK"), ({"fail": "invalid", "fail_at": 20}, "INVALID_ARGUMENT")):
                received: list[bytes] = []
                ended = await download(channel, {"count": 21 if fails else 20, "bytes": 9, **fails}, received.append)
                assert received == [str(number).encode() + b"\0" * 9 for number in range(20)], pair
                assert ended.name == status, pair


async def test_what_hearing_raises_is_raised_to_who_waits_and_nothing_is_heard_after_it() -> None:
    received: list[bytes] = []

    def fails(message: bytes) -> None:
        received.append(message)
        raise ValueError("unheard of")

    async with everyone() as pairs:
        for pair, (channel, _) in pairs.items():
            received.clear()
            with pytest.raises(ValueError, match="unheard of"):
                await download(channel, {"count": 5}, fails)
            assert received == [b"0"], pair
            other: list[bytes] = []
            assert await download(channel, {"count": 2}, other.append) is grpc.StatusCode.OK, pair
            assert other == [b"0", b"1"], f"{pair}: the connection goes on"


async def test_a_message_is_sent_at_once_only_where_there_is_a_connection_and_room() -> None:
    message = b"{}" + b"\0" * 50_000
    async with native() as served, native_channel(served.port) as channel:
        call = channel.stream_stream(BOTH)()
        assert not can_send_now(call), "it is not connected"
        await call.write(message)
        sent = 1
        while can_send_now(call):
            call.send_now(message)
            sent += 1
        received: list[bytes] = []
        hearing = asyncio.ensure_future(receive_each(call, received.append))
        await eventually(lambda: can_send_now(call), what="room again")
        call.send_now(b"{}")
        await call.done_writing()
        await hearing
        assert received == [*[message] * sent, b"{}"]
        assert not can_send_now(call), "it has ended"
