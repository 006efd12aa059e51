"""Commands beside services that say anything: terminals obey none of it, and it is neither endless nor a traceback."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.grpc_server import serving
from support.processes import DEADLINE_SECONDS

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2
from kvscout_cli import output

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066[red][/nothing]\r\n"
MAX_OUTPUT = 1_000_000
"""Characters: a few texts of some thousand each, in a few rows."""
_NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.CPPTYPE_INT64: -(1 << 63),
    FieldDescriptor.CPPTYPE_INT32: -(1 << 31),
    FieldDescriptor.CPPTYPE_DOUBLE: float("nan"),
    FieldDescriptor.CPPTYPE_FLOAT: float("inf"),
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_ENUM: 1,
}


def hostile(of: Descriptor, text: str, depth: int = 5) -> Message:
    """A message with this text in each of its fields that hold any, and the strangest number in each other one."""
    message = GetMessageClass(of)()
    for field in of.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            if key.cpp_type == FieldDescriptor.CPPTYPE_STRING and value.message_type is None:
                getattr(message, field.name)[text] = _value(value, text)
        elif field.message_type is not None:
            if depth:
                inner = hostile(field.message_type, text, depth - 1)
                if field.is_repeated:
                    getattr(message, field.name).add().CopyFrom(inner)
                else:
                    getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field, text))
        else:
            setattr(message, field.name, _value(field, text))
    return message


def _value(field: FieldDescriptor, text: str) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    return _NUMBERS[field.cpp_type]


@asynccontextmanager
async def hostile_services(text: str, *, fails: bool = False) -> AsyncIterator[str]:
    """The address of gateway, indexer and scheduler in one, all of whose answers are hostile."""

    names: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    def add(server: grpc.aio.Server) -> None:
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        for file in (gateway_pb2, indexer_pb2, scheduler_pb2):
            for service in file.DESCRIPTOR.services_by_name.values():
                handlers = {method.name: _handler(method, text, fails=fails) for method in service.methods}
                generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
                server.add_generic_rpc_handlers((generic,))
                names.append(service.full_name)

        async def serve() -> None:
            for name in names:
                await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)

        tasks.append(asyncio.get_running_loop().create_task(serve()))

    ports: list[int] = []
    async with serving(add, on_port=ports.append):
        await asyncio.gather(*tasks)
        yield f"127.0.0.1:{ports[0]}"


def _handler(method: Any, text: str, *, fails: bool) -> grpc.RpcMethodHandler[Any, Any]:
    async def answer(request: Any, context: Any) -> Message:
        if fails:
            await context.abort(grpc.StatusCode.INTERNAL, text[:3000])
        return hostile(method.output_type, text)

    async def answers(request: Any, context: Any) -> AsyncIterator[Message]:
        yield await answer(request, context)

    take, give = GetMessageClass(method.input_type).FromString, GetMessageClass(method.output_type).SerializeToString
    if method.server_streaming:
        kind = (
            grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_stream_rpc_method_handler
        )
        return kind(answers, take, give)
    return grpc.unary_unary_rpc_method_handler(answer, take, give)


async def kvscout(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


COMMANDS = {
    "status": ("--gateway",),
    "doctor": ("--no-engines", "--gateway"),
    "top": ("--once", "--gateway"),
    "shadow": ("--gateway",),
    "workers list": ("--gateway",),
    "loads": ("--model", "m", "--gateway"),
    "requests": ("--gateway",),
    "replicas": ("--scheduler",),
    "route": ("1", "2", "--model", "m", "--explain", "--gateway"),
    "generate": ("1", "2", "--model", "m", "--gateway"),
    "dump": ("--gateway",),
}
AS_JSON = ("status", "route", "requests", "top")


def harmless(text: str) -> bool:
    """Whether a terminal obeys nothing of it."""
    return re.search(r"[^\n\t -~\u00a1-\u2000\u2010-\u2027\u2030-\u205f\u2070-\uffef]|\u202e|\u2066", text) is None


@pytest.mark.parametrize("command", COMMANDS)
async def test_no_terminal_obeys_what_a_service_says_and_it_has_an_end(command: str) -> None:
    async with hostile_services((EVIL * 1_500)[:60_000]) as address:
        code, out, err = await kvscout(*command.split(), *COMMANDS[command], address)
    assert code in (0, 1, 2, 3), err
    assert "Traceback" not in err, err[-3000:]
    assert harmless(out), ascii(out[:500])
    assert harmless(err), ascii(err[:500])
    assert len(out) + len(err) < MAX_OUTPUT


@pytest.mark.parametrize("command", AS_JSON)
async def test_neither_does_one_obey_json(command: str) -> None:
    async with hostile_services(EVIL) as address:
        code, out, err = await kvscout(*command.split(), "--json", *COMMANDS[command], address)
    assert code in (0, 1, 2, 3), err
    assert "Traceback" not in err, err[-3000:]
    assert harmless(out + err)
    if out:
        json.loads(out)


@pytest.mark.parametrize("command", ["status", "workers list", "generate"])
async def test_nor_an_error(command: str) -> None:
    async with hostile_services(EVIL, fails=True) as address:
        code, out, err = await kvscout(*command.split(), *COMMANDS[command], address)
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in err, err[-3000:]
    assert harmless(out + err)


def test_text_of_people_stays_as_it_is() -> None:
    for text in ("plain\ttext\n", "日本語\u3000です", "Ça va\u00a0?", "می\u200cخواهم", "👩\u200d💻"):
        assert output.shown(text) == text
    assert output.shown("a\x1b[31m\u202eb\x9b") == r"a\x1b[31m\u202eb\x9b"
    assert len(output.shown("x" * 10**6)) < 21_000
    assert len(output.shown("x" * 10**6, limit=None)) == 10**6
