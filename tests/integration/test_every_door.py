"""Every rpc and every HTTP route, found in the descriptors and in the table of routes: who is refused on each.

A method that is added is walked without a line here, and refused to whoever it is not for.
"""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from support.guarded_services import DESCRIPTORS, OURS, ROLES, THEIRS, Guarded, guarded_services
from yarl import URL

from kvscout import v1
from kvscout.ext_proc.v3 import ext_proc_pb2
from kvscout.v1 import events_pb2, scheduler_pb2, workers_pb2
from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import ALLOWED, AccessRole
from kvscout_common.transport import Transport
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.access import TENANT_HEADER
from kvscout_gateway.fronts.endpoint_picker.access_log import SERVICE as ACCESS_LOG
from kvscout_gateway.fronts.endpoint_picker.wire import SERVICE as PICKER
from kvscout_gateway.http.router import ENGINES_OWN, ROUTES

SECONDS = 20.0
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
OPENINGS: dict[str, Message] = {
    "Lifecycle": scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="o"), tenant=OURS),
    "PublishEvents": events_pb2.KvEventBatch(
        version=1, tenant=OURS, worker_id="pushed", model="m", block_size=16, epoch=1
    ),
}
"""First messages of streams that stay open after them."""
PLAUSIBLE: dict[str, Any] = {
    "model": "m",
    "request_id": "r",
    "worker_id": "w",
    "block_hashes": [1, 2, 3],
    "isl_tokens": 48,
    "id": 1,
}
"""Fields with which messages are what the extension answers by itself."""
BOTH = [Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])]


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a caller; "" = one without a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


async def status(
    channel: grpc.aio.Channel, path: str, token: str, *messages: bytes, streams: tuple[bool, bool]
) -> tuple[grpc.StatusCode, str]:
    """How a call ends. An open stream is left open: it must be the server that ends it."""
    make: Any = getattr(channel, "_".join("stream" if many else "unary" for many in streams))
    running = make(path)(*(() if streams[0] else messages), metadata=bearing(token), timeout=SECONDS)
    try:
        for message in messages if streams[0] else ():
            await running.write(message)
        while streams[1] and await running.read() is not grpc.aio.EOF:
            continue  # a status comes after all that was said before it
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # it has ended
    return await running.code(), await running.details()


def rpcs(service: str) -> list[MethodDescriptor]:
    """All of a service."""
    (described,) = DESCRIPTORS[service].services_by_name.values()
    return list(described.methods)


def foreign_messages(described: Descriptor, tenant: str) -> Iterator[tuple[str, Message]]:
    """(where, message) for each place in a message where a tenant can be named: it names this one there, and its own
    everywhere above."""
    for path in tenant_paths(described):
        message = GetMessageClass(described)()
        at: Any = message
        for name in path[:-1]:
            fill(at, own=True)
            child = getattr(at, name)
            at = child.add() if at.DESCRIPTOR.fields_by_name[name].is_repeated else child
        fill(at, own=False)
        at.tenant = tenant
        yield ".".join(path), message


def fill(message: Any, *, own: bool) -> None:
    """Makes a message plausible."""
    for name, value in PLAUSIBLE.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None or (isinstance(value, str) and field.cpp_type != field.CPPTYPE_STRING):
            continue
        if field.is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    if own and "tenant" in message.DESCRIPTOR.fields_by_name:
        message.tenant = OURS


def tenant_paths(described: Descriptor) -> Iterator[tuple[str, ...]]:
    """The way to each field of a message that names a tenant."""
    for field in described.fields:
        if field.name == "tenant":
            yield ("tenant",)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for rest in tenant_paths(field.message_type):
                yield (field.name, *rest)


@asynccontextmanager
async def opened(served: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a service."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        yield channel


def test_no_service_is_left_out_of_the_walk() -> None:
    names = [found.name for found in pkgutil.iter_modules(v1.__path__) if found.name.endswith("_pb2")]
    described = {name for one in names for name in import_module(f"kvscout.v1.{one}").DESCRIPTOR.services_by_name}
    assert described == {name for file in DESCRIPTORS.values() for name in file.services_by_name}


@pytest.mark.parametrize("transport", BOTH)
async def test_every_rpc_refuses_who_has_no_token_the_wrong_role_or_another_tenant(transport: Transport) -> None:
    async with guarded_services(transport, *DESCRIPTORS) as services:
        for service in DESCRIPTORS:
            async with opened(services[service]) as channel:
                if service == "indexer":
                    await register_publisher(channel)
                for method in rpcs(service):
                    await refuses_strangers_and_roles(channel, method)
                    await refuses_other_tenants(channel, method)


async def register_publisher(channel: grpc.aio.Channel) -> None:
    """A worker whose events may be published, so that a stream of them can be opened."""
    worker = workers_pb2.Worker(
        worker_id="pushed", model="m", tenant=OURS, block_size=16, transport=workers_pb2.EVENT_TRANSPORT_GRPC
    )
    request = workers_pb2.RegisterWorkerRequest(tenant=OURS, worker=worker).SerializeToString()
    path = "/kvscout.v1.Indexer/RegisterWorker"
    assert (await status(channel, path, "ours-admin", request, streams=(False, False)))[0] is grpc.StatusCode.OK


async def refuses_strangers_and_roles(channel: grpc.aio.Channel, method: MethodDescriptor) -> None:
    """Before a message is looked at: garbage does not get far enough to be called that."""
    name, path = method.name, f"/{method.containing_service.full_name}/{method.name}"
    streams = (method.client_streaming, method.server_streaming)
    sent = () if streams[0] else (b"\xff garbage",)
    for token in ("", "nobody's"):
        assert (await status(channel, path, token, *sent, streams=streams))[0] is UNAUTHENTICATED, (path, token)
    for role in ROLES[:-1]:
        if name in ALLOWED[AccessRole(role)]:
            continue
        code, text = await status(channel, path, f"ours-{role}", *sent, streams=streams)
        assert (code, text) == (DENIED, f"role {role} may not call {name}"), path


async def refuses_other_tenants(channel: grpc.aio.Channel, method: MethodDescriptor) -> None:
    """Wherever a message can name one, in the first message and in later ones."""
    name, path = method.name, f"/{method.containing_service.full_name}/{method.name}"
    streams = (method.client_streaming, method.server_streaming)
    assert any(tenant_paths(method.input_type)), f"{path}: whose is it?"
    # Its own is named in the message around each: "" would be the default tenant, which is another one.
    wrong = [*foreign_messages(method.input_type, THEIRS), *foreign_messages(method.input_type, "default")]
    # There it means all that the caller may see.
    if name not in ("ListWorkers", "ListFailures", "GetLadder", "GetStatus"):
        wrong += foreign_messages(method.input_type, ALL_TENANTS)
    if "tenant" in method.input_type.fields_by_name:
        wrong.append(("nowhere", GetMessageClass(method.input_type)()))
    for where, message in wrong:
        answered = await status(channel, path, "ours-admin", message.SerializeToString(), streams=streams)
        assert answered[0] is DENIED and "not for tenant" in answered[1], (path, where, answered)
        if name in OPENINGS:
            second: Any = message
            if name == "PublishEvents":
                second = events_pb2.KvEventBatch()
                second.CopyFrom(OPENINGS[name])
                second.tenant = getattr(message, "tenant")  # noqa: B009 - not part of Message's type
            both = (OPENINGS[name].SerializeToString(), second.SerializeToString())
            answered = await status(channel, path, "ours-admin", *both, streams=streams)
            allowed = (DENIED, grpc.StatusCode.INVALID_ARGUMENT)  # or: a stream is of one source
            assert answered[0] in allowed, (path, where, "after an opening", answered)


@pytest.mark.parametrize("transport", BOTH)
async def test_every_http_route_refuses_who_has_no_key_the_wrong_role_or_another_tenant(transport: Transport) -> None:
    async with guarded_services(transport, "gateway") as services, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{services['gateway'].http_port}"

        async def ask(method: str, path: str, token: str, **headers: str) -> int:
            sent = {"Authorization": f"Bearer {token}", **headers} if token else headers
            target = URL(url + path, encoded=True)
            async with http.request(method, target, headers=sent, data=b"garbage") as answer:
                return answer.status

        walked = [(path, method, rpc) for path, methods in ROUTES.items() for method, rpc in methods.items()]
        walked += [("/v1/models/m", "GET", "ListWorkers")]
        others = ("/v1/embeddings", "/sleep", "/nothing", "//", "/../metrics")
        walked += [(path, "POST", ENGINES_OWN) for path in others]
        for path, method, rpc in walked:
            for token in ("", "nobody's"):
                assert await ask(method, path, token) == 401, (method, path, token)
            for role in ROLES[:-1]:
                if rpc not in ALLOWED[AccessRole(role)]:
                    assert await ask(method, path, f"ours-{role}") == 403, (method, path, role)
            foreign = await ask(method, path, "ours-admin", **{TENANT_HEADER: THEIRS})
            assert foreign == 403, (method, path, "another tenant")
        # What is of all tenants together is for nobody's own key, and what engines' operators use is for admins.
        assert await ask("GET", "/metrics", "ours-admin") == 403
        assert await ask("POST", "/sleep", "ours-client") == 403
        change = b'{"model": "m", "active_prefill_tokens_threshold": 1}'
        for role in ROLES[:-1]:
            headers = {"Authorization": f"Bearer ours-{role}"}
            async with http.post(f"{url}/busy_threshold", data=change, headers=headers) as answer:
                assert answer.status == 403, role
        for path in ("/health", "/ready"):
            assert await ask("GET", path, "") == 200


@pytest.mark.parametrize("transport", BOTH)
async def test_the_ports_of_proxies_refuse_who_has_no_token_or_the_wrong_role(transport: Transport) -> None:
    calls = [(f"/{PICKER}/Process", (True, True)), (f"/{ACCESS_LOG}/StreamAccessLogs", (True, False))]
    async with guarded_services(transport, "gateway") as services:
        address = f"127.0.0.1:{services['gateway'].picker_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            for path, streams in calls:
                for token in ("", "nobody's"):
                    assert (await status(channel, path, token, streams=streams))[0] is UNAUTHENTICATED, path
            for role in ("viewer", "worker"):
                assert await pick(channel, role) == 403, role
            assert await pick(channel, "client") != 403


async def pick(channel: grpc.aio.Channel, role: str) -> int:
    """The status with which a request is refused, by the picker or by its call."""
    headers = ext_proc_pb2.HttpHeaders(end_of_stream=True)
    message = ext_proc_pb2.ProcessingRequest(request_headers=headers)
    make: Any = channel.stream_stream(
        f"/{PICKER}/Process",
        request_serializer=ext_proc_pb2.ProcessingRequest.SerializeToString,
        response_deserializer=ext_proc_pb2.ProcessingResponse.FromString,
    )
    running = make(metadata=bearing(f"ours-{role}"), timeout=SECONDS)
    await running.write(message)
    answer = await running.read()
    running.cancel()
    return int(answer.immediate_response.status.code)


@pytest.mark.parametrize("transport", BOTH)
async def test_reflection_wants_a_token_of_any_kind_and_health_none(transport: Transport) -> None:
    async with guarded_services(transport, "indexer") as services, opened(services["indexer"]) as channel:
        listing = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        for token, refused in (("", True), ("nobody's", True), ("ours-viewer", False)):
            path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            make: Any = channel.stream_stream(path)
            running = make(iter([] if refused else [listing]), metadata=bearing(token), timeout=SECONDS)
            assert refused or await running.read() is not grpc.aio.EOF
            assert (await running.code() is UNAUTHENTICATED) is refused, token
        code, _ = await status(channel, "/grpc.health.v1.Health/Check", "", b"", streams=(False, False))
        assert code is grpc.StatusCode.OK
