"""Each service tells of itself what a caller needs: rpcs are called here from reflection alone.

Nothing of `kvscout.v1` is imported: messages are made from the descriptors that the server sends, in a pool of their
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.processes import Running, running

from kvscout_common.rpc.channel import open_channel

SERVICES = {
    "kvscout_indexer.main": "kvscout.v1.Indexer",
    "kvscout_scheduler.main": "kvscout.v1.Scheduler",
    "kvscout_gateway.main": "kvscout.v1.Gateway",
}
TIMEOUT = 30.0


class Reflected:
    """Calls what a server describes; blocks, so not on the event loop."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    def services(self) -> list[str]:
        """Names of all services."""
        return sorted(self._database.get_services())

    def methods(self, service: str) -> list[str]:
        """Names of a service's rpcs."""
        return [method.name for method in self._pool.FindServiceByName(service).methods]

    def unary(self, service: str, name: str, **fields: Any) -> Any:
        """Calls a unary rpc."""
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        request = message_factory.GetMessageClass(method.input_type)(**fields)
        respond = message_factory.GetMessageClass(method.output_type)
        invoke = self._channel.unary_unary(
            f"/{service}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=respond.FromString,
        )
        return invoke(request, timeout=TIMEOUT)


@asynccontextmanager
async def serving(module: str) -> AsyncIterator[Running]:
    """A service's process; a gateway has a scheduler to talk to."""
    async with AsyncExitStack() as stack:
        flags: list[str] = []
        if module == "kvscout_gateway.main":
            helper = await stack.enter_async_context(running("kvscout_scheduler.main"))
            flags = ["--no-indexer", "--scheduler", helper.address]
        yield await stack.enter_async_context(running(module, *flags))


@pytest.mark.parametrize("module", SERVICES)
async def test_an_rpc_is_called_from_reflection_alone(module: str) -> None:
    service = SERVICES[module]
    async with serving(module) as process:

        def explore() -> None:
            with grpc.insecure_channel(process.address) as channel:
                server = Reflected(channel)
                assert server.services() == sorted(
                    [
                        service,
                        "grpc.health.v1.Health",
                        *(f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")),
                    ]
                )
                methods = server.methods(service)
                assert {"RegisterWorker", "ListWorkers", "GetStatus"} <= set(methods)
                worker = {"worker_id": "w", "model": "m", "block_size": 16}
                registered = server.unary(service, "RegisterWorker", worker=worker)
                assert registered.created
                listed = server.unary(service, "ListWorkers")
                assert [(entry.worker.worker_id, entry.worker.dp_size) for entry in listed.workers] == [("w", 1)]
                assert server.unary(service, "GetStatus").service.version

        await asyncio.to_thread(explore)


@pytest.mark.parametrize("module", SERVICES)
async def test_health_is_told_for_the_server_and_for_its_service(module: str) -> None:
    service = SERVICES[module]
    async with serving(module) as process:
        channel = open_channel(process.address)
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", service):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=TIMEOUT)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        finally:
            await channel.close()
