"""Server reflection, v1 and v1alpha, that finds methods too: `grpcurl describe kvscout.v1.Gateway.Route` asks for one.

The messages of the two versions are the same but for their package. grpcio has v1alpha only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import _async as aio
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1 = "grpc.reflection.v1.ServerReflection"
_ALPHA_PACKAGE, _V1_PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


class _Pool:
    """The default pool; the file of a method is that of its service, which the pool itself does not know."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            descriptor = self._pool.FindServiceByName(service)  # KeyError: no such symbol at all
            if method not in descriptor.methods_by_name:
                raise
            return descriptor.file


def enable_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds the reflection services to a server.

    Args:
        service_names: Full names of its other services.
        server: Not started yet.
    """
    _describe_v1()
    servicer = aio.ReflectionServicer((*service_names, V1, reflection.SERVICE_NAME), pool=_Pool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, handlers),))
    server.add_registered_method_handlers(V1, handlers)


def _describe_v1() -> None:
    """Has the pool know v1: who lists the services describes each of them."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        file.name, file.package = _V1_FILE, _V1_PACKAGE
        for field in (field for message in file.message_type for field in message.field):
            if field.type_name:
                field.type_name = field.type_name.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
        for method in (method for service in file.service for method in service.method):
            method.input_type = method.input_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
            method.output_type = method.output_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
        pool.AddSerializedFile(file.SerializeToString())
