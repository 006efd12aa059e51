"""Reads one field of a multipart form, in one pass and within bounds: RFC 7578, as engines' parsers read it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from kvscout_common.errors import InvalidArgument

MAX_PARTS: Final = 1000
"""Engines refuse forms of more."""
MAX_PART_HEADERS_BYTES: Final = 8192
MAX_BOUNDARY_BYTES: Final = 70
"""RFC 2046 allows no more."""
DISPOSITION: Final = "content-disposition"
MAX_VALUE_BYTES: Final = 1024
"""Longest field that is read, in bytes."""
_SLICE_BYTES: Final = 256 * 1024
"""Bytes of one search: between two of them another thread may run."""
_KIND: Final = re.compile(r'[ \t]*+[^\s;"]++[ \t]*+')
"""Media type of a header's value: the part before its parameters."""
_PARAMETER: Final = re.compile(
    r';[ \t]*+([^\s=;"]++)[ \t]*+=[ \t]*+(?:"((?:[^"\\]|\\[^\\])*+)"|([^\s;"<>]*+))[ \t]*+', re.DOTALL
)
"""Never goes back on what it has matched, so that it costs one pass whatever the header. What engines' parsers read in
other ways (backslashes in pairs, a value within <>) does not match."""
_END: Final = re.compile(r"[; \t]*+")
_ESCAPED: Final = re.compile(r"\\(.)")


def field_of_form(content_type: str, body: bytes, name: str, *, refused: Collection[str] = ()) -> str | None:
    """Return the value of a field; None = the form has none of this name.

    Args:
        content_type: Of the form: names the boundary between its parts.
        body: The form.
        name: Of the field.
        refused: Names of fields that no form may have.

    Raises:
        InvalidArgument: The body is no form, has more than `MAX_PARTS` parts, a refused field, or the field twice.
    """
    found: str | None = None
    for headers, begin, end in _parts(body, _boundary(content_type)):
        named = _name(headers)
        if named in refused:
            raise InvalidArgument("is reserved: clients must not set it", field=named)
        if named != name:
            continue
        if found is not None:
            raise InvalidArgument("is given twice", field=name)
        if end - begin > MAX_VALUE_BYTES:
            raise InvalidArgument(f"has {end - begin} bytes, at most {MAX_VALUE_BYTES} are allowed", field=name)
        try:
            found = body[begin:end].decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument("is not UTF-8 text", field=name) from error
    return found


def _boundary(content_type: str) -> bytes:
    boundary = _parameter(content_type, "boundary", header="content-type")
    if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES or not boundary.isascii():
        raise InvalidArgument(f"must name a boundary of 1 to {MAX_BOUNDARY_BYTES} characters", field="content-type")
    return boundary.encode()


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the headers of each part, and where its content begins and ends."""
    delimiter = b"\r\n--" + boundary
    # The first one may stand at the very beginning, where nothing is to be separated from it.
    at = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _behind(body, delimiter, 0)
    headers, begin = b"", -1
    for _ in range(MAX_PARTS + 1):
        line_end = body.find(b"\r\n", at, at + 128)
        last = body.startswith(b"--", at)
        if last or (line_end >= 0 and not body[at:line_end].strip(b" \t")):
            if begin >= 0:
                yield headers, begin, at - len(delimiter)
            if last:
                return
            # A part without headers has its empty line right behind the delimiter.
            headers_end = body.find(b"\r\n\r\n", line_end, line_end + MAX_PART_HEADERS_BYTES)
            if headers_end < 0:
                raise InvalidArgument(
                    f"the headers of a part do not end within {MAX_PART_HEADERS_BYTES} bytes", field="body"
                )
            headers, begin = body[line_end:headers_end], headers_end + 4
            at = begin
        at = _behind(body, delimiter, at)
    raise InvalidArgument(f"has more than {MAX_PARTS} parts", field="body")


def _behind(body: bytes, delimiter: bytes, at: int) -> int:
    """Behind the next delimiter."""
    while at < len(body):
        found = body.find(delimiter, at, at + _SLICE_BYTES + len(delimiter))
        if found >= 0:
            return found + len(delimiter)
        at += _SLICE_BYTES
    raise InvalidArgument("is not a multipart form, or its last boundary is missing", field="body")


def _name(headers: bytes) -> str:
    """Return the name of a part's field; "" = it has none."""
    # In Latin-1 as engines read them: of a byte that is no ASCII it depends whether it is space.
    lines = (line.partition(":") for line in headers.decode("latin-1").split("\r\n"))
    found = [value for key, _, value in lines if key.strip().lower() == DISPOSITION]
    if len(found) > 1:
        raise InvalidArgument("is given twice in a part of the form", field=DISPOSITION)
    return _parameter(found[0], "name", header=DISPOSITION) if found else ""


def _parameter(value: str, wanted: str, *, header: str) -> str:
    """Return a parameter of a header's value; "" = it has none. Parsers differ in which of several counts, and in
    where a broken one ends: so that an engine reads no other one, all of them must be whole, and the wanted one alone.

    Args:
        value: The header's.
        wanted: The parameter's name, in lower case.
        header: Its name, for errors.

    Raises:
        InvalidArgument: A parameter is broken, or the wanted one is there twice or in parts.
    """
    kind = _KIND.match(value)
    at = kind.end() if kind is not None else 0
    found: str | None = None
    while (parameter := _PARAMETER.match(value, at)) is not None:
        at = parameter.end()
        name = parameter[1].lower()
        if name.partition("*")[0] != wanted:
            continue
        if found is not None or name != wanted:
            raise InvalidArgument(f"has more than one {wanted}", field=header)
        quoted = parameter[2]
        found = parameter[3] if quoted is None else _ESCAPED.sub(r"\1", quoted)
    if kind is None or _END.fullmatch(value, at) is None:
        raise InvalidArgument(f"has a broken parameter: {value[at : at + 100]!r}", field=header)
    return found or ""
