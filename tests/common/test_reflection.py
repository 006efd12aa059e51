"""Reflection finds whatever a service has: itself, its methods, its messages and their fields."""

from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_server import serving

from kvscout.v1 import gateway_pb2  # noqa: F401  # its descriptors are what is asked for
from kvscout_common.reflection import enable_reflection


def add(server: grpc.aio.Server) -> None:
    enable_reflection(["kvscout.v1.Gateway"], server)


async def ask(symbol: str) -> Any:
    async with serving(add) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        return await stub.ServerReflectionInfo(iter([request])).read()


@pytest.mark.parametrize(
    "symbol",
    ["kvscout.v1.Gateway", "kvscout.v1.Gateway.Route", "kvscout.v1.RouteRequest", "kvscout.v1.RouteRequest.model"],
)
async def test_every_kind_of_symbol_is_found(symbol: str) -> None:
    assert (await ask(symbol)).file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("symbol", ["kvscout.v1.Gateway.Rout", "kvscout.v1.Nothing", "x"])
async def test_what_does_not_exist_is_not_found(symbol: str) -> None:
    assert (await ask(symbol)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
