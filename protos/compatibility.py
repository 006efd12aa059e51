"""Breaks of the API for callers of an older one, by its descriptors alone.

`released.binpb` is the API of the last release, a `FileDescriptorSet`. What is in it keeps its name, number and type;
what goes leaves its number and name reserved. `compatibility.py` exits 1 on any difference that breaks somebody, and
`compatibility.py --release` makes the API as it is the released one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
API = Path("kvscout/v1")
RELEASED = ROOT / "released.binpb"


def described(*, comments: bool = False) -> FileDescriptorSet:
    """The API as the .proto files say it.

    Args:
        comments: Whether they are wanted, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "api.binpb"
        sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / API).glob("*.proto"))
        flags = ["--include_source_info"] if comments else []
        status = protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", *flags, *sources])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        return FileDescriptorSet.FromString(out.read_bytes())


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return what of an older API does not hold any more, one sentence each."""
    return list(_breaks(old, new))


def _breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> Iterator[str]:
    messages, enums, services = _messages(new), _enums(new), _services(new)
    for name, message in _messages(old).items():
        if name not in messages:
            yield f"message {name} is gone"
        else:
            yield from _fields(name, message, messages[name])
    for name, enum in _enums(old).items():
        if name not in enums:
            yield f"enum {name} is gone"
        else:
            yield from _values(name, enum, enums[name])
    for name, service in _services(old).items():
        if name not in services:
            yield f"service {name} is gone"
        else:
            yield from _methods(name, service, services[name])


def _fields(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    numbers = {field.number: field for field in new.field}
    for field in old.field:
        now = numbers.get(field.number)
        if now is None:
            reserved = any(there.start <= field.number < there.end for there in new.reserved_range)
            if not (reserved and field.name in new.reserved_name):
                yield f"{name}.{field.name} is gone and its number {field.number} and name are not reserved"
        elif _shape(old, field) != _shape(new, now):
            yield f"{name}.{field.name} = {field.number} was {_shape(old, field)}, is {_shape(new, now)}"


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    optional = "optional " if field.proto3_optional else ""
    within = field.HasField("oneof_index") and not field.proto3_optional
    oneof = f" in {message.oneof_decl[field.oneof_index].name}" if within else ""
    return f"{optional}{repeated}{kind} {field.name}{oneof}"


def _values(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    names = {value.number: value.name for value in new.value}
    for value in old.value:
        if names.get(value.number) != value.name:
            yield f"{name}: {value.number} was {value.name}, is {names.get(value.number, 'gone')}"


def _methods(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    there = {method.name: method for method in new.method}
    for method in old.method:
        now = there.get(method.name)
        if now is None:
            yield f"{name}.{method.name} is gone"
            continue
        for what in ("input_type", "output_type", "client_streaming", "server_streaming"):
            before, after = getattr(method, what), getattr(now, what)
            if before != after:
                yield f"{name}.{method.name}: {what} was {before}, is {after}"


def _messages(api: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found = {}
    for file in api.file:
        waiting = [(f"{file.package}.{message.name}", message) for message in file.message_type]
        while waiting:
            name, message = waiting.pop()
            found[name] = message
            waiting += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]
    return found


def _enums(api: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    return {f"{file.package}.{enum.name}": enum for file in api.file for enum in file.enum_type}


def _services(api: FileDescriptorSet) -> dict[str, ServiceDescriptorProto]:
    return {f"{file.package}.{service.name}": service for file in api.file for service in file.service}


def main() -> None:
    now = described()
    if "--release" in sys.argv[1:]:
        RELEASED.write_bytes(now.SerializeToString(deterministic=True))
        return
    found = breaks(FileDescriptorSet.FromString(RELEASED.read_bytes()), now)
    if found:
        raise SystemExit("this breaks callers of the last release:\n" + "\n".join(f"  {one}" for one in found))


if __name__ == "__main__":
    main()
