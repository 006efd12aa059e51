"""Writes docs/api.md, the reference of the API, from the .proto files and their comments.

`reference.py` writes it; `reference.py --check` exits 1 if it is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from compatibility import ROOT, described
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

PAGE = ROOT.parent / "docs" / "api.md"
FILES = ("gateway", "scheduler", "indexer", "bridge", "workers", "types", "events")
"""Files that callers use, in this order. Those of replicas and snapshots are read by kvscout alone."""
HEAD = """# API

> [!TIP]
> Ask a running service for its API:
>
> ```sh
> grpcurl -plaintext localhost:7050 list
> grpcurl -plaintext localhost:7050 describe kvscout.v1.Gateway.Route
> ```

Written by `make protos` from the comments of [protos/kvscout/v1](../protos/kvscout/v1): do not edit.

Every service also answers `grpc.health.v1.Health` and reflection (`grpc.reflection.v1` and `v1alpha`):
[grpcurl](grpcurl.md) finds all of this by itself. Clients are [here](../clients/README.md).
"""
_LINTS = re.compile(r"^\s*buf:lint:ignore.*\n?", re.MULTILINE)
_CODES = re.compile(r"^(?:As \w+, and: )?[A-Z]{2,}[A-Z_, ]*: ", re.MULTILINE)
"""Beginning of the part of an rpc's comment that names a status."""


class Reference:
    """The page, made file by file."""

    def __init__(self) -> None:
        self._files = {
            file.name.rpartition("/")[2].removesuffix(".proto"): file for file in described(comments=True).file
        }
        self._known = {
            f".{file.package}.{name}"
            for file in (self._files[name] for name in FILES)
            for name in (*(one.name for one in file.message_type), *(one.name for one in file.enum_type))
        }

    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield HEAD
        yield _conventions(self._files["types"])
        yield "\n## Rpcs"
        for name in FILES:
            yield from self._services(self._files[name])
        yield "\n## Messages and enums"
        for name in FILES:
            yield from self._types(self._files[name])

    def _services(self, file: FileDescriptorProto) -> Iterator[str]:
        comments = _comments(file)
        for number, service in enumerate(file.service):
            yield f"\n### {service.name}\n\n{comments[6, number]}"
            for index, method in enumerate(service.method):
                asked, answered = self._type(method.input_type), self._type(method.output_type)
                asked = f"stream of {asked}" if method.client_streaming else asked
                answered = f"stream of {answered}" if method.server_streaming else answered
                told = _CODES.sub(r"\n* \g<0>", comments[6, number, 2, index])
                yield f"\n#### {service.name}.{method.name}\n\n{asked} → {answered}\n\n{told}"

    def _types(self, file: FileDescriptorProto) -> Iterator[str]:
        comments = _comments(file)
        for number, message in enumerate(file.message_type):
            yield f"\n### {message.name}\n\n{comments[4, number]}"
            maps = {f".{file.package}.{message.name}.{one.name}": one for one in message.nested_type}
            if message.field:
                yield "\n| field | type | meaning |\n|---|---|---|"
            for index, field in enumerate(message.field):
                entry = maps.get(field.type_name)
                if entry is not None and entry.options.map_entry:
                    kind = f"map of {self._kind(entry.field[0])} to {self._kind(entry.field[1])}"
                else:
                    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
                    kind = f"{'optional ' if field.proto3_optional else ''}{repeated}{self._kind(field)}"
                if field.HasField("oneof_index") and not field.proto3_optional:
                    kind += f", one of `{message.oneof_decl[field.oneof_index].name}`"
                yield f"| `{field.name}` = {field.number} | {kind} | {_cell(comments[4, number, 2, index])} |"
        for number, enum in enumerate(file.enum_type):
            yield f"\n### {enum.name}\n\n{comments[5, number]}\n\n| value | meaning |\n|---|---|"
            for index, value in enumerate(enum.value):
                yield f"| `{value.name}` = {value.number} | {_cell(comments[5, number, 2, index])} |"

    def _kind(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._type(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _type(self, name: str) -> str:
        short = name.rpartition(".")[2]
        return f"[{short}](#{short.lower()})" if name in self._known else f"`{name.lstrip('.')}`"


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    found = {}
    for location in file.source_code_info.location:
        text = _LINTS.sub("", location.leading_comments)
        found[tuple(location.path)] = "\n".join(
            line.removeprefix(" ").rstrip() for line in text.strip("\n").splitlines()
        )
    return found


def _conventions(file: FileDescriptorProto) -> str:
    """Return the comment on the whole API in types.proto, before its first statement."""
    _, _, rules = _comments(file)[12,].partition("Conventions of the whole API\n")
    return "## Conventions\n\n" + rules


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    text = Reference().text()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise SystemExit("docs/api.md is not up to date (run `make protos`)")


if __name__ == "__main__":
    main()
