"""A JSON object whose fields are changed in place: all else in it stays as its sender wrote it, byte for byte."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.http import Charge, Form, HttpCall, HttpRefused
from kvscout_common.http.json_fields import INLINE_BYTES, Fields
from kvscout_gateway.fronts.access import header
from kvscout_gateway.fronts.headers import JSON_HEADERS
from kvscout_gateway.fronts.reading import read_in_thread
from kvscout_gateway.values.dialects import ApiDialect

UNSUPPORTED_MEDIA_TYPE: Final = 415
_NO_FIELDS: Final = Fields()
_encoder: Final = json.JSONEncoder(separators=(",", ":"))


class JsonBody:
    """The body of a request: an object."""

    def __init__(self, data: bytes) -> None:
        """Read it. A byte order mark before it is left out.

        Raises:
            InvalidArgument: It is no JSON object, has NaN or infinity in it, a field twice, or is beyond a bound of
                `json_scan`.
        """
        self._data = data = data.removeprefix(codecs.BOM_UTF8)
        self.charge: Charge | None = None
        """Memory charged for the body, released with it."""
        try:
            self.fields = Fields.scanned(data)
        except ValueError as error:
            raise InvalidArgument(str(error), field="body") from error

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field.

        Raises:
            InvalidArgument: It is too long to be made here.
        """
        return self.fields.get(name, default)

    def settle(self) -> None:
        """Release the body."""
        self._data, self.fields, self.charge = b"", _NO_FIELDS, None

    @property
    def size(self) -> int:
        """Bytes of it."""
        return len(self._data)

    def changed(self, changes: Mapping[str, Any]) -> bytes:
        """Return the body with other values for some fields; None removes a field. `changed({})` is what came."""
        changes = {name: value for name, value in changes.items() if self._differs(name, value)}
        if not changes:
            return self._data
        # Made anew: a thousand streams would hold each prompt once more, for as long as they are answered.
        data, chunks = memoryview(self._data), list[bytes | memoryview]()
        places = self.fields.places
        if places and changes.keys().isdisjoint(places):
            # Only added to, as nearly all are: what is there is one piece.
            *_, last = places.values()
            added = memoryview(_encoder.encode(changes).encode())
            return b"".join((data[: last.end], b",", added[1:]))
        for name, place in places.items():
            if name not in changes:
                chunks += (b",", data[place.begin : place.end])
            elif changes[name] is not None:
                chunks += (b",", data[place.begin : place.value], _encoder.encode(changes[name]).encode())
        for name in changes:
            if name not in places:
                chunks += (b",", _encoder.encode({name: changes[name]})[1:-1].encode())
        return b"".join((b"{", *chunks[1:], b"}"))

    def _differs(self, name: str, value: Any) -> bool:
        if value is None or name not in self.fields.places:
            return (value is None) == (name in self.fields.places)
        return self.fields.is_long(name) or self.fields[name] != value


async def parsed(data: bytes, charge: Charge | None = None) -> JsonBody:
    """Read a body of any length.

    Args:
        data: The body.
        charge: What is charged for it; the result has it, and so has the thread that reads, while it does.

    Raises:
        InvalidArgument: As `JsonBody`.
    """
    read = JsonBody(data) if len(data) <= INLINE_BYTES else await read_in_thread(charge, _read_long, data)
    read.charge = charge
    return read


def _read_long(data: bytes) -> JsonBody:
    """Read a body, and the prompt in it, which is looked at on the event loop."""
    body = JsonBody(data)
    with suppress(InvalidArgument):  # raised again by whoever looks at it
        body.get("prompt")
    return body


def require_plain(encoding: str) -> None:
    """Refuse a body that nobody here can read.

    Args:
        encoding: The header `Content-Encoding`; "" = there is none.

    Raises:
        HttpRefused: It is compressed.
    """
    if encoding.strip().lower() not in ("", "identity"):
        raise HttpRefused(UNSUPPORTED_MEDIA_TYPE, "a body must not be compressed")


async def json_of(call: HttpCall, charge: Charge) -> JsonBody:
    """Read the body of a request that is a JSON object.

    Raises:
        InvalidArgument: There is none, or as `JsonBody`.
        HttpRefused: It is compressed.
    """
    require_plain(header(call.headers, "content-encoding"))
    body = await call.body(charge)
    if not body:
        raise InvalidArgument("must not be empty", field="body")
    return await parsed(body, charge)


async def respond_json(call: HttpCall, document: Any) -> None:
    """Answer with a JSON document."""
    await call.respond(200, JSON_HEADERS, json.dumps(document).encode())


def model_of(fields: Fields) -> str:
    """Return the model that a body names.

    Raises:
        InvalidArgument: It names none.
    """
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidArgument("must be the name of a model", field="model")
    return text_of(model, "model")


def text_of(value: str, field: str) -> str:
    """Return a value, which has halves of UTF-16 pairs in it where JSON escapes them.

    Raises:
        InvalidArgument: It has one.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("is not valid text: it contains half of a surrogate pair", field=field) from error
    return value


def with_usage(body: JsonBody, api: ApiDialect) -> tuple[Form, dict[str, Any]]:
    """Have an engine end a stream with its account of tokens: a client that has not requested it does not see it.

    Args:
        body: The client's.
        api: Its dialect.

    Returns:
        The form in which the answer is passed on, and the fields of the body that change.
    """
    if not api.asks_for_usage or body.fields.get("stream") is not True:
        return Form.BYTES, {}
    options = body.fields.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if options.get("include_usage") is True:
        return Form.BYTES, {}
    return Form.WITHOUT_USAGE, {"stream_options": {**options, "include_usage": True}}
