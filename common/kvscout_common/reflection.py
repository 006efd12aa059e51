"""Server reflection that also finds methods, which `grpcurl describe kvscout.v1.Gateway.Route` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import _async as aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


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
    """Adds the reflection service to a server.

    Args:
        service_names: Full names of its other services.
        server: Not started yet.
    """
    servicer = aio.ReflectionServicer((*service_names, reflection.SERVICE_NAME), pool=_Pool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
