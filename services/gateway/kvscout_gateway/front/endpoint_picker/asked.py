"""What a request asks for, as far as its headers and body tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscout_gateway.front.openai.body import JsonBody
from kvscout_gateway.front.wishes import model_of

MODEL_HEADER = "x-gateway-model-name"
"""What Gateway API's body-based routing has read in the body, for pickers that get none."""


class Asked(NamedTuple):
    """A request, before it is placed."""

    model: str
    """"" = it does not say: any worker will do."""
    path: str = ""
    fields: Mapping[str, Any] = {}
    """Of its body."""
    size: int = 0
    """Bytes of the body."""
    subset: tuple[str, ...] | None = None
    """The endpoints that it may go to; None = any."""
    traceparent: str = ""
    """W3C trace context; "" = it has none."""


def asked_of(headers: Mapping[str, str], body: bytes, subset: tuple[str, ...] | None) -> Asked:
    """Reads a request.

    Args:
        headers: By their lower-case names.
        body: Whole; empty if there is none, or none was passed on.
        subset: As the proxy has it.

    Raises:
        InvalidArgument: The body is no JSON object, or has no model.
    """
    trace = headers.get("traceparent", "")
    named, path = headers.get(MODEL_HEADER, ""), headers.get(":path", "").partition("?")[0]
    if not body or headers.get("content-type", "").startswith("multipart/"):
        return Asked(named, path, size=len(body), subset=subset, traceparent=trace)
    read = JsonBody(body)
    fields = {"model": named, **read.fields} if named else read.fields
    return Asked(model_of(fields), path, fields, read.size, subset, trace)
