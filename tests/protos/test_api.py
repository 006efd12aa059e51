"""The API keeps its own rules, and its word to those who call an older one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from kvscout.v1 import bridge_pb2, gateway_pb2, indexer_pb2, scheduler_pb2

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "protos"))

from compatibility import RELEASED, breaks, described  # noqa: E402  # beside the .proto files
from reference import PAGE, Reference  # noqa: E402

NOT_ITS_OWN = {"Gateway.DumpEvents", "Indexer.Dump", "Indexer.PublishEvents", "Scheduler.SelectAndReserve"}
"""Rpcs that carry what others carry; why is said at each."""
LISTS = {"ListWorkers", "ListActiveRequests", "ListFailures"}
"""Rpcs whose answer grows with the fleet or its load, and can be asked for in parts."""


def methods() -> Iterator[MethodDescriptor]:
    for module in (bridge_pb2, gateway_pb2, indexer_pb2, scheduler_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def test_an_rpc_has_a_request_and_a_response_of_its_own_name() -> None:
    used: defaultdict[str, set[str]] = defaultdict(set)
    for method in methods():
        service = method.containing_service.name
        for message, end in ((method.input_type.name, "Request"), (method.output_type.name, "Response")):
            if f"{service}.{method.name}" not in NOT_ITS_OWN:
                assert message in (f"{method.name}{end}", f"{service}{method.name}{end}")
                used[message].add(method.name)
    assert {message: names for message, names in used.items() if len(names) > 1} == {}


def test_what_names_one_request_names_it_by_the_same_fields() -> None:
    ref = scheduler_pb2.RequestRef.DESCRIPTOR.fields
    for kind in ("FreeRequest", "MarkPrefillCompleteRequest", "AddOutputRequest", "SelectRequest"):
        there = scheduler_pb2.DESCRIPTOR.message_types_by_name[kind].fields_by_number
        for field in ref:
            assert (there[field.number].name, there[field.number].type) == (field.name, field.type), kind


def test_long_lists_come_in_pages() -> None:
    for method in methods():
        if method.name in LISTS:
            assert {"page_size", "page_token"} <= set(method.input_type.fields_by_name), method.full_name
            assert "next_page_token" in method.output_type.fields_by_name, method.full_name


def test_nothing_that_was_released_is_broken() -> None:
    assert not breaks(FileDescriptorSet.FromString(RELEASED.read_bytes()), described())


def test_the_reference_is_what_the_proto_files_say() -> None:
    assert PAGE.read_text() == Reference().text(), "run `make protos`"


def _api() -> FileDescriptorProto:
    file = FileDescriptorProto(name="a.proto", package="a", syntax="proto3")
    message = file.message_type.add(name="M")
    message.field.add(name="x", number=1, type=FieldDescriptorProto.TYPE_UINT32, label=1)
    message.nested_type.add(name="Inner").field.add(name="y", number=1, type=FieldDescriptorProto.TYPE_STRING, label=1)
    file.enum_type.add(name="E").value.add(name="E_UNSPECIFIED", number=0)
    file.service.add(name="S").method.add(name="Do", input_type=".a.M", output_type=".a.M")
    return file


def _reserved_number_alone(file: FileDescriptorProto) -> None:
    del file.message_type[0].field[:]
    file.message_type[0].reserved_range.add(start=1, end=2)


def _type(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].type = FieldDescriptorProto.TYPE_INT64


def _repeated(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].label = FieldDescriptorProto.LABEL_REPEATED


def _name(file: FileDescriptorProto) -> None:
    file.message_type[0].field[0].name = "z"


def _oneof(file: FileDescriptorProto) -> None:
    file.message_type[0].oneof_decl.add(name="o")
    file.message_type[0].field[0].oneof_index = 0


def _value(file: FileDescriptorProto) -> None:
    file.enum_type[0].value[0].name = "E_NONE"


def _streams(file: FileDescriptorProto) -> None:
    file.service[0].method[0].server_streaming = True


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.ClearField("message_type"), "message a.M is gone"),
        (lambda file: file.message_type[0].ClearField("nested_type"), "message a.M.Inner is gone"),
        (lambda file: file.message_type[0].ClearField("field"), "a.M.x is gone and its number 1"),
        (_reserved_number_alone, "a.M.x is gone and its number 1 and name are not reserved"),
        (_type, "a.M.x = 1 was uint32 x, is int64 x"),
        (_repeated, "was uint32 x, is repeated uint32 x"),
        (_name, "was uint32 x, is uint32 z"),
        (_oneof, "was uint32 x, is uint32 x in o"),
        (_value, "a.E: 0 was E_UNSPECIFIED, is E_NONE"),
        (lambda file: file.ClearField("enum_type"), "enum a.E is gone"),
        (_streams, "a.S.Do: server_streaming was False, is True"),
        (lambda file: file.service[0].ClearField("method"), "a.S.Do is gone"),
        (lambda file: file.ClearField("service"), "service a.S is gone"),
    ],
)
def test_every_kind_of_break_is_found(change: Callable[[FileDescriptorProto], None], told: str) -> None:
    old, new = FileDescriptorSet(file=[_api()]), FileDescriptorSet(file=[_api()])
    assert not breaks(old, new)
    change(new.file[0])
    assert any(told in one for one in breaks(old, new)), breaks(old, new)


def test_what_is_added_or_reserved_when_it_goes_breaks_nobody() -> None:
    old, new = FileDescriptorSet(file=[_api()]), FileDescriptorSet(file=[_api()])
    message = new.file[0].message_type[0]
    message.field.add(name="z", number=2, type=FieldDescriptorProto.TYPE_UINT32, label=1)
    del message.field[0]
    message.reserved_range.add(start=1, end=2)
    message.reserved_name.append("x")
    new.file[0].enum_type[0].value.add(name="E_MORE", number=1)
    assert not breaks(old, new)


BUF = shutil.which("buf", path=os.pathsep.join((os.environ.get("PATH", ""), str(Path.home() / "go" / "bin"))))


@pytest.mark.skipif(BUF is None, reason="buf is not installed: go install github.com/bufbuild/buf/cmd/buf@latest")
@pytest.mark.parametrize("arguments", [("lint",), ("breaking", "--against", "protos/released.binpb")])
def test_buf_finds_nothing(arguments: tuple[str, ...]) -> None:
    assert BUF is not None
    done = subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
