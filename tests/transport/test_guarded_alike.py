"""Who may call, over both transports and for both kinds of handlers: refused before a handler sees a byte."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from transport.echo_service import SERVERS, SERVICE, Served, grpcio_channel

from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.guard import Guard

METHODS = ("Unary", "Download", "Both", "Synchronous", "SynchronousEach")
REFUSED = [
    ((), grpc.StatusCode.UNAUTHENTICATED),
    ((("authorization", "Bearer wrong"),), grpc.StatusCode.UNAUTHENTICATED),
    ((("authorization", "Basic secret"),), grpc.StatusCode.UNAUTHENTICATED),
]
TEAM = (("authorization", "Bearer secret"),)


@pytest.fixture(params=[name for name in SERVERS if name != "native" or native_available()])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{token: secret, role: admin, tenant: team}]")
    serve: Any = SERVERS[request.param]
    async with serve(guard=Guard(TokenTable.load(path))) as served:
        yield served


def ask(channel: Any, method: str, metadata: Any, request: bytes = b"{}", *, writes: bool = True) -> Any:
    if method in ("Both", "SynchronousEach"):
        requests = iter([request]) if writes else None
        return channel.stream_stream(f"/{SERVICE}/{method}")(requests, metadata=metadata, timeout=10)
    shape = channel.unary_stream if method == "Download" else channel.unary_unary
    return shape(f"/{SERVICE}/{method}")(request, metadata=metadata, timeout=10)


@pytest.mark.parametrize("method", METHODS)
async def test_who_has_no_token_is_refused_and_no_handler_runs(served: Served, method: str) -> None:
    async with grpcio_channel(served.port) as channel:
        for metadata, code in REFUSED:
            # Nothing is written to a stream: grpc's client takes a status for its own failure while it writes.
            call = ask(channel, method, metadata, b"this would make the handler fail", writes=False)
            assert await call.code() is code
            assert dict(await call.trailing_metadata())["kvscout-error"] == "Unauthenticated"


async def test_a_handler_knows_its_caller_and_nobody_else_does(served: Served) -> None:
    async with grpcio_channel(served.port) as channel:
        assert await ask(channel, "Synchronous", TEAM) == b"{}team"
        assert [answer async for answer in ask(channel, "SynchronousEach", TEAM)] == [b"{}team"]
        assert await ask(channel, "Unary", TEAM, b'{"who": true}') == b"{}team"
        # Of tasks that run one call after the other, none brings the last caller along.
        assert await ask(channel, "Unary", (), b'{"who": true}').code() is grpc.StatusCode.UNAUTHENTICATED
