"""Errors carry google.rpc.Status, as clients of other languages read it, beside the text and the trailers of ours."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from transport.echo_service import SERVICE, grpcio, native

from kvscout_common.errors import InvalidArgument, KvscoutError, NotFound, Unavailable
from kvscout_common.hashing import native_available
from kvscout_common.transport.rich_status import DETAILS_TRAILER, MAX_DETAILS_BYTES, details_of
from kvscout_common.transport.statuses import status_of

status_pb2: Any = pytest.importorskip("google.rpc.status_pb2", reason="googleapis-common-protos is not installed")
error_details_pb2: Any = pytest.importorskip("google.rpc.error_details_pb2")

SERVED = [grpcio, *([native] if native_available() else [])]


def read(details: bytes) -> tuple[Any, list[Any]]:
    """The status, and what is in its details."""
    status = status_pb2.Status.FromString(details)
    found = []
    for one in status.details:
        kind = getattr(error_details_pb2, one.type_url.rpartition(".")[2])()
        assert one.Unpack(kind)
        found.append(kind)
    return status, found


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("shape", ["Unary", "Download", "Both", "Synchronous"])
async def test_the_field_at_fault_and_the_time_to_wait_are_told_over_both_transports(served: Any, shape: str) -> None:
    async with served() as there, grpc.aio.insecure_channel(f"127.0.0.1:{there.port}") as channel:
        calls: Any = channel

        async def refused(orders: str) -> tuple[grpc.aio.AioRpcError, bytes]:
            request = json.dumps({"fail": orders}).encode()
            method = f"/{SERVICE}/{shape}"
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                match shape:
                    case "Download":
                        await calls.unary_stream(method)(request, timeout=10).read()
                    case "Both":
                        await calls.stream_stream(method)(iter([request]), timeout=10).read()
                    case _:
                        await calls.unary_unary(method)(request, timeout=10)
            error = failed.value
            trailers = dict(error.trailing_metadata() or ())
            return error, trailers.get(DETAILS_TRAILER, b"")

        error, details = await refused("invalid")
        status, [bad] = read(details)
        assert (status.code, status.message) == (error.code().value[0], error.details())
        [violation] = bad.field_violations
        assert (violation.field, violation.description) == ("orders", "is wrong: 100 % naïve\n")

        error, details = await refused("exhausted")
        status, [soon] = read(details)
        assert (status.code, status.message) == (error.code().value[0], error.details())
        assert (soon.retry_delay.seconds, soon.retry_delay.nanos) == (1, 500_000_000)

        assert not (await refused("defect"))[1], "of a defect nothing is told but that it is one"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, (0, 0)), (-1.0, (0, 0)), (2.25, (2, 250_000_000)), (float("inf"), (315_576_000_000, 0))],
)
def test_any_time_to_wait_is_a_duration(seconds: float, expected: tuple[int, int]) -> None:
    trailers = dict(status_of(Unavailable("later", retry_after_seconds=seconds), "m").trailers)
    details = trailers[DETAILS_TRAILER]
    assert isinstance(details, bytes)
    _, [soon] = read(details)
    assert (soon.retry_delay.seconds, soon.retry_delay.nanos) == expected


@pytest.mark.parametrize("error", [NotFound("no worker"), InvalidArgument("names no field"), KvscoutError("")])
def test_an_error_with_nothing_to_add_has_no_details(error: KvscoutError) -> None:
    assert DETAILS_TRAILER not in dict(status_of(error, "m").trailers)


def test_details_that_are_too_long_for_headers_stay_away_and_the_text_is_told() -> None:
    error = InvalidArgument("🜁" * 5_000, field="model")
    status = status_of(error, "m")
    assert status.text.startswith("model: 🜁")
    assert DETAILS_TRAILER not in dict(status.trailers)
    for length in range(0, 3_000, 100):
        told = InvalidArgument("x" * length, field="model")
        assert len(details_of(grpc.StatusCode.INVALID_ARGUMENT, str(told), told)) <= MAX_DETAILS_BYTES
