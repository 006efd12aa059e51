"""Server reflection, v1 and v1alpha, that finds methods too: `grpcurl describe kvscout.v1.Gateway.Route` asks for one.

The messages of the two versions are the same but for their package; grpcio has v1alpha only. The details of errors are
described as well, so that tools show what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import _async as aio
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1 = "grpc.reflection.v1.ServerReflection"
_ALPHA_PACKAGE, _V1_PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"


class _Pool:
    """The default pool, and what no module of this process describes.

    The file of a method is that of its service, which pools themselves do not know.
    """

    def __init__(self) -> None:
        self._pools = (descriptor_pool.Default(), _further())

    def FindFileByName(self, name: str) -> Any:
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        try:
            return self._first(lambda pool: pool.FindFileContainingSymbol(symbol))
        except KeyError:
            service, _, method = symbol.rpartition(".")
            descriptor = self._first(lambda pool: pool.FindServiceByName(service))  # KeyError: no such symbol at all
            if method not in descriptor.methods_by_name:
                raise
            return descriptor.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pools[0], name)

    def _first(self, find: Any) -> Any:
        default, further = self._pools
        try:
            return find(default)
        except KeyError:
            return find(further)


def enable_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Add the reflection services to a server.

    Args:
        service_names: Full names of its other services.
        server: Not started yet.
    """
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


@cache
def _further() -> descriptor_pool.DescriptorPool:
    """Descriptions in a pool of their own: the default one is for generated modules, which others may import."""
    pool = descriptor_pool.DescriptorPool()
    for file in (_reflection_v1(), FileDescriptorProto.FromString(duration_pb2.DESCRIPTOR.serialized_pb), _details()):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _reflection_v1() -> FileDescriptorProto:
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _V1_PACKAGE
    for field in (field for message in file.message_type for field in message.field):
        if field.type_name:
            field.type_name = field.type_name.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
        method.output_type = method.output_type.replace(_ALPHA_PACKAGE, _V1_PACKAGE)
    return file


def _details() -> FileDescriptorProto:
    """Return google/rpc/error_details.proto, the messages that errors carry."""
    file = FileDescriptorProto(
        name="google/rpc/error_details.proto",
        package="google.rpc",
        syntax="proto3",
        dependency=[duration_pb2.DESCRIPTOR.name],
    )
    request = file.message_type.add(name="BadRequest")
    violation = request.nested_type.add(name="FieldViolation")
    for number, name in enumerate(("field", "description"), 1):
        _add(violation, name, number, Field.TYPE_STRING)
    violations = _add(request, "field_violations", 1, Field.TYPE_MESSAGE, ".google.rpc.BadRequest.FieldViolation")
    violations.label = Field.LABEL_REPEATED
    _add(file.message_type.add(name="RetryInfo"), "retry_delay", 1, Field.TYPE_MESSAGE, ".google.protobuf.Duration")
    return file


def _add(
    message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: Field.Type.ValueType, type_name: str = ""
) -> Field:
    return message.field.add(
        name=name, number=number, type=kind, label=Field.LABEL_OPTIONAL, type_name=type_name or None
    )
