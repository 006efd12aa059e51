"""Reflection finds whatever a service has: itself, its methods, its messages and their fields."""

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.grpc_server import serving

from kvscout.v1 import gateway_pb2  # noqa: F401  # its descriptors are what is asked for
from kvscout_common.rpc.reflection import enable_reflection


def add(server: grpc.aio.Server) -> None:
    enable_reflection(["kvscout.v1.Gateway"], server)


async def ask(symbol: str, version: str = "v1alpha") -> Any:
    async with serving(add) as channel:
        reflect: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        return await reflect(iter([request])).read()


@pytest.mark.parametrize(
    "symbol",
    [
        *("kvscout.v1.Gateway", "kvscout.v1.Gateway.Route", "kvscout.v1.RouteRequest", "kvscout.v1.RouteRequest.model"),
        *("google.rpc.BadRequest", "google.rpc.RetryInfo"),
        "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
    ],
)
async def test_every_kind_of_symbol_is_found(symbol: str) -> None:
    assert (await ask(symbol)).file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_both_versions_tell_of_the_services_and_of_one_another(version: str) -> None:
    for symbol in ("kvscout.v1.Gateway", f"grpc.reflection.{version}.ServerReflection"):
        [file] = (await ask(symbol, version)).file_descriptor_response.file_descriptor_proto[:1]
        services = descriptor_pb2.FileDescriptorProto.FromString(file).service
        assert [service.name for service in services] == [symbol.rpartition(".")[2]]
        assert {method.input_type.rpartition(".")[0] for method in services[0].method} == {
            "." + symbol.rpartition(".")[0]
        }


@pytest.mark.parametrize("symbol", ["kvscout.v1.Gateway.Rout", "kvscout.v1.Nothing", "x"])
async def test_what_does_not_exist_is_not_found(symbol: str) -> None:
    assert (await ask(symbol)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
