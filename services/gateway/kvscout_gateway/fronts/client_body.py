"""The body of a request that is passed on: its model, and what is not its client's to say taken out of it."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.http import Charge, Headers
from kvscout_common.http.json_fields import INLINE_BYTES
from kvscout_gateway.fronts.access import header
from kvscout_gateway.fronts.body import JsonBody, require_plain
from kvscout_gateway.fronts.multipart import field_of_form
from kvscout_gateway.fronts.reading import read_in_thread
from kvscout_gateway.fronts.reserved import RESERVED_FIELDS, changes_of

_OBJECT: Final = re.compile(rb"[\s\x00\xef\xbb\xbf\xfe\xff]*+\{")
"""Beginning of a JSON object, in any encoding that an engine may read."""


class ClientBody(NamedTuple):
    """A body that can be passed on."""

    data: bytes
    model: str = ""
    """"" = it names none."""
    whole_answer: bool = True
    """The answer is to come as a whole, and no stream."""


async def read_body(
    headers: Headers, data: bytes, *, max_priority: int | None, charge: Charge | None = None
) -> ClientBody:
    """Read the body of a request for a client's path: a JSON object, whatever its content type says, or a form.

    Args:
        headers: Of the request.
        data: Its body.
        max_priority: See `changes_of`.
        charge: What is charged for it; the thread that reads has it while it does.

    Raises:
        InvalidArgument: It is neither.
        HttpRefused: It is compressed: nobody here can read it.
    """
    if not data:
        return ClientBody(data)
    require_plain(header(headers, "content-encoding"))
    kind = header(headers, "content-type")
    if is_form(kind, data):
        return ClientBody(data, await model_of_form(kind, data, charge))
    if len(data) <= INLINE_BYTES:
        return _read(data, max_priority)
    return await read_in_thread(charge, _read, data, max_priority)


def is_form(kind: str, data: bytes) -> bool:
    """Return whether a body is read as a form; what begins as a JSON object is not, whatever its content type says.

    Args:
        kind: The header `Content-Type`.
        data: The body.
    """
    return kind.strip().lower().startswith("multipart/") and not _OBJECT.match(data)


async def model_of_form(kind: str, data: bytes, charge: Charge | None = None) -> str:
    """Return the model that a form names; "" = none.

    Args:
        kind: Its content type.
        data: The form.
        charge: What is charged for it; the thread that reads has it while it does.

    Raises:
        InvalidArgument: It is no form, or has a field that is reserved: clients must not set it.
    """
    if len(data) <= INLINE_BYTES:
        return _model_of_form(kind, data)
    return await read_in_thread(charge, _model_of_form, kind, data)


def _model_of_form(kind: str, data: bytes) -> str:
    return field_of_form(kind, data, "model", refused=RESERVED_FIELDS) or ""


def _read(data: bytes, max_priority: int | None) -> ClientBody:
    body = JsonBody(data)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidArgument("must be the name of a model", field="model")
    cleaned = body.changed(changes_of(body.fields, max_priority=max_priority))
    return ClientBody(cleaned, model or "", whole_answer=body.get("stream") is not True)
