"""The same random calls over both transports, as client and as server: answers, statuses and trailers are equal."""

import asyncio
import json
import random
from typing import Any

import grpc
import pytest
from support.processes import eventually
from support.seeds import test_seed
from transport.echo_service import MAX_MESSAGE_BYTES, SERVICE, Echo, everyone

from kvscout_common.hashing import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: nothing to compare")

SEED = test_seed()
CALLS = 150
KINDS = ("Unary", "Synchronous", "Download", "Both", "SynchronousEach", "None", "hang", "cancel")
FAILS = (None, None, None, "invalid", "exhausted", "defect", "abort")
SHOWN = ("kvscout-error", "retry-after", "why", "raw-bin")


def padded(orders: dict[str, Any], size: int) -> bytes:
    return json.dumps(orders).encode() + b"\0" * size


def size_of(rnd: random.Random) -> int:
    return rnd.choice((0, 1, 100, 16_379, 16_384, 70_000, rnd.randrange(1_500_000)))


def random_call(rnd: random.Random) -> dict[str, Any]:
    """A call as plain values, so that it can be printed and repeated."""
    fail = rnd.choice(FAILS)
    call: dict[str, Any] = {"kind": rnd.choice(KINDS)}
    match call["kind"]:
        case "Unary":
            call["orders"] = {"fail": fail, "bytes": size_of(rnd), "show": ["a", "b-bin"]}
            call["metadata"] = [("a", "x y"), ("b-bin", bytes(rnd.randrange(256) for _ in range(9)))]
        case "Synchronous":
            call["orders"] = {"fail": fail if fail != "abort" else None}
        case "Download":
            count = rnd.randrange(20)
            at = rnd.randrange(count + 1) if fail and count else None
            call["orders"] = {"fail": fail, "count": count, "bytes": rnd.choice((0, 10, 70_000)), "fail_at": at}
        case "Both" | "SynchronousEach" as kind:
            call["sizes"] = [rnd.choice((0, 10, 70_000)) for _ in range(rnd.randrange(12))]
            call["fail"] = fail if kind == "Both" or fail != "abort" else None
            call["lockstep"] = rnd.random() < 0.5
        case "hang":
            call["method"] = rnd.choice(("Unary", "Download", "Both"))
        case "cancel":
            call["method"] = rnd.choice(("Download", "Both", "SynchronousEach"))
            call["after"] = rnd.randrange(4)
    call["pad"] = size_of(rnd)
    return call


async def outcome(channel: Any, call: dict[str, Any]) -> Any:
    """What a client sees."""
    answers: list[bytes] = []
    try:
        await make(channel, call, answers)
        status: Any = "OK"
    except grpc.aio.AioRpcError as error:
        trailers = {name: value for name, value in (error.trailing_metadata() or ()) if name in SHOWN}
        details = error.details() if call["kind"] not in ("None", "hang") else ""
        status = (error.code().name, details, trailers)
    except asyncio.CancelledError:
        status = "cancelled"
    return [len(answer) for answer in answers], [answer[:64] for answer in answers], status


async def make(channel: Any, call: dict[str, Any], answers: list[bytes]) -> None:
    kind = call["kind"]
    if kind == "None":
        await channel.unary_unary(f"/{SERVICE}/None")(padded({}, call["pad"]))
    elif kind in ("Unary", "Synchronous"):
        method = channel.unary_unary(f"/{SERVICE}/{kind}")
        answers.append(await method(padded(call["orders"], call["pad"]), timeout=30, metadata=call.get("metadata")))
    elif kind == "Download":
        async for answer in channel.unary_stream(f"/{SERVICE}/Download")(
            padded(call["orders"], call["pad"]), timeout=30
        ):
            answers.append(answer)
    elif kind in ("Both", "SynchronousEach"):
        requests = [padded({}, size) for size in call["sizes"]]
        if call["fail"]:
            requests.append(padded({"fail": call["fail"]}, 0))
        await exchange(channel.stream_stream(f"/{SERVICE}/{kind}")(timeout=30), requests, answers, call["lockstep"])
    elif kind == "hang":
        await hang(channel, call["method"])
    else:
        await cancel(channel, call, answers)


async def exchange(stream: Any, requests: list[bytes], answers: list[bytes], lockstep: bool) -> None:
    async def send() -> None:
        for request in requests:
            await stream.write(request)
        await stream.done_writing()

    if lockstep:
        for request in requests:
            await stream.write(request)
            answer = await stream.read()
            assert answer is not grpc.aio.EOF
            answers.append(answer)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        return
    sending = asyncio.create_task(send())
    try:
        async for answer in stream:
            answers.append(answer)
    finally:
        await asyncio.wait({sending})
        if not sending.cancelled():
            sending.exception()


async def hang(channel: Any, method: str) -> None:
    orders = padded({"fail": "hang", "count": 1}, 0)
    if method == "Unary":
        await channel.unary_unary(f"/{SERVICE}/Unary")(orders, timeout=0.2)
    elif method == "Download":
        async for _ in channel.unary_stream(f"/{SERVICE}/Download")(orders, timeout=0.2):
            pass
    else:
        stream = channel.stream_stream(f"/{SERVICE}/Both")(timeout=0.2)
        await stream.write(orders)
        await stream.read()


async def cancel(channel: Any, call: dict[str, Any], answers: list[bytes]) -> None:
    if call["method"] == "Download":
        stream = channel.unary_stream(f"/{SERVICE}/Download")(padded({"count": 8, "fail": "hang"}, 0), timeout=30)
    else:
        stream = channel.stream_stream(f"/{SERVICE}/{call['method']}")(timeout=30)
        for _ in range(8):
            await stream.write(padded({}, 0))
    for _ in range(call["after"]):
        answers.append(await stream.read())
    stream.cancel()
    await stream.read()


async def test_random_calls_end_alike_whoever_serves_and_whoever_calls() -> None:
    rnd = random.Random(SEED)
    async with everyone() as pairs:
        for number in range(CALLS):
            call = random_call(rnd)
            seen = {name: await outcome(channel, call) for name, (channel, _) in pairs.items()}
            first = seen["grpcio→grpcio"]
            assert all(other == first for other in seen.values()), (number, call, seen)
        await nothing_runs(pairs)


async def test_random_calls_at_once_end_as_they_do_alone() -> None:
    rnd = random.Random(SEED ^ 1)
    calls = [random_call(rnd) for _ in range(60)]
    async with everyone() as pairs:
        reference = pairs["grpcio→grpcio"][0]
        alone = [await outcome(reference, call) for call in calls]
        for name, (channel, _) in pairs.items():
            if name != "grpcio→grpcio":
                together = await asyncio.gather(*(outcome(channel, call) for call in calls))
                for call, one, other in zip(calls, alone, together, strict=True):
                    assert one == other, (name, call)
        await nothing_runs(pairs)


async def nothing_runs(pairs: dict[str, tuple[Any, Echo]]) -> None:
    """Cancelled and expired calls end on the server, too."""
    for _, echo in pairs.values():

        async def idle(echo: Echo = echo) -> bool:
            return echo.running == 0

        await eventually(idle, what="no handler running")


async def test_a_message_over_the_limit_is_refused_by_either_side() -> None:
    size = MAX_MESSAGE_BYTES + 1
    async with everyone() as pairs:
        for name, (channel, _) in pairs.items():
            if name.startswith("grpcio"):
                continue  # it refuses to send it
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{SERVICE}/Unary")(b"\0" * size)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name
        for name, (channel, _) in pairs.items():
            if name.endswith("grpcio"):
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{SERVICE}/Unary")(padded({"bytes": size}, 0))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name


async def test_requests_that_are_compressed_are_taken() -> None:
    packed = {"compression": grpc.Compression.Gzip}
    async with everyone() as pairs:
        for name in ("grpcio→native", "grpcio→grpcio"):
            channel, _ = pairs[name]
            answer = await channel.unary_unary(f"/{SERVICE}/Unary")(padded({"bytes": 3}, 100_000), timeout=30, **packed)
            assert answer.endswith(b"\0" * 3), name
            requests = [padded({"number": number}, 1_000 * number) for number in range(5)]
            answers: list[bytes] = []
            stream = channel.stream_stream(f"/{SERVICE}/Both")(timeout=30, **packed)
            await exchange(stream, requests, answers, lockstep=True)
            assert answers == requests, name
