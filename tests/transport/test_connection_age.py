"""A connection that is old takes no new calls; those it has go on, and a client that calls again connects anew."""

from __future__ import annotations

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.processes import eventually, running
from transport.echo_service import SERVICE, native, native_channel

from kvscout.v1 import indexer_pb2_grpc, types_pb2
from kvscout_common.hashing import native_available
from kvscout_common.transport import Transport

NATIVE = pytest.mark.skipif(not native_available(), reason="the extension is not built")
SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")


@pytest.mark.parametrize("transport", [Transport.GRPCIO, pytest.param(Transport.NATIVE, marks=NATIVE)])
async def test_an_old_connection_takes_no_new_calls_and_those_it_has_go_on(transport: Transport) -> None:
    flags = ("--rpc-transport", transport, "--max-connection-age-seconds", "0.3")
    async with running("kvscout_indexer.main", *flags) as indexer:
        async with grpc.aio.insecure_channel(indexer.address) as channel:
            stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await stream.write(SERVICES)
            assert await stream.read() is not grpc.aio.EOF
            await eventually(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, what="GOAWAY")
            stub: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(channel)
            assert (await stub.GetStatus(types_pb2.GetStatusRequest(), timeout=10)).service.version
            await stream.write(SERVICES)
            assert await stream.read() is not grpc.aio.EOF
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF


@NATIVE
async def test_a_client_that_goes_on_calling_moves_from_connection_to_connection_and_no_call_fails() -> None:
    async with native(max_age_seconds=0.1) as served, native_channel(served.port) as channel:
        connections = set()

        async def moved_twice() -> bool:
            assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"{}", timeout=10)
            connections.add(channel.ready())
            return len(connections - {None}) > 2

        await eventually(moved_twice)
