"""What a request asks for, as far as its headers and body tell. Pure."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscout_common.errors import InvalidArgument

MODEL_HEADER = "x-gateway-model-name"
"""What Gateway API's body-based routing has read in the body, for pickers that get none."""
MAX_TOKEN_ID = (1 << 32) - 1
BYTES_A_TOKEN = 4
"""Of text, about: for the load that a prompt brings, where its tokens are not known."""


class Asked(NamedTuple):
    """A request, before it is placed."""

    model: str
    """"" = it does not say: any worker will do."""
    token_ids: bytes = b""
    """Of the prompt, little-endian u32; empty = not known."""
    isl_tokens: int = 0
    """Length of the prompt; an estimate where the tokens are not known."""
    max_tokens: int = 0
    """Bound of the output; 0 = not told."""
    subset: tuple[str, ...] | None = None
    """The endpoints that it may go to; None = any."""


def asked_of(headers: Mapping[str, str], body: bytes, subset: tuple[str, ...] | None) -> Asked:
    """Reads a request.

    Args:
        headers: By their lower-case names.
        body: Whole; empty if there is none, or none was passed on.
        subset: As the proxy has it.

    Raises:
        InvalidArgument: The body is no JSON object, or has no model.
    """
    named = headers.get(MODEL_HEADER, "")
    if not body or headers.get("content-type", "").startswith("multipart/"):
        return Asked(named, subset=subset)
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is no JSON: {error}", field="body") from error
    if not isinstance(request, dict):
        raise InvalidArgument("is no JSON object", field="body")
    model = request.get("model", named)
    if not isinstance(model, str) or not model:
        raise InvalidArgument("must be a string, and not empty", field="model")
    token_ids = _token_ids(request.get("prompt"))
    return Asked(
        model,
        token_ids,
        isl_tokens=len(token_ids) // array("I").itemsize or _estimated_tokens(request),
        max_tokens=_bound(request),
        subset=subset,
    )


def _token_ids(prompt: Any) -> bytes:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        [prompt] = prompt
    if not isinstance(prompt, list):
        return b""
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""  # texts, several prompts, or what the engine will refuse


def _estimated_tokens(request: Mapping[str, Any]) -> int:
    prompts = (request.get(name) for name in ("prompt", "messages", "input"))
    return sum(map(_text_bytes, prompts)) // BYTES_A_TOKEN


def _text_bytes(value: Any) -> int:
    """Of the texts in prompts and messages: not of images, nor of names."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    if isinstance(value, dict):
        return sum(_text_bytes(value.get(name)) for name in ("content", "text"))
    return BYTES_A_TOKEN if isinstance(value, int) else 0


def _bound(request: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        bound = request.get(name)
        if isinstance(bound, int) and 0 < bound <= MAX_TOKEN_ID:
            return int(bound)
    return 0
