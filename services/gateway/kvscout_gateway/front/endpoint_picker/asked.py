"""What a request asks for, as far as its headers and body tell. Pure."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscout_common.errors import InvalidArgument

MODEL_HEADER = "x-gateway-model-name"
"""What Gateway API's body-based routing has read in the body, for pickers that get none."""
MAX_TOKENS = (1 << 32) - 1
BYTES_A_TOKEN = 4
"""Of text, about: for the load that a prompt brings, where its tokens are not known."""


class Asked(NamedTuple):
    """A request, before it is placed."""

    model: str
    """"" = it does not say: any worker will do."""
    path: str = ""
    request: Mapping[str, Any] = {}
    """Its body."""
    size: int = 0
    """Bytes of the body."""
    subset: tuple[str, ...] | None = None
    """The endpoints that it may go to; None = any."""

    @property
    def token_ids(self) -> bytes:
        """Of the prompt, little-endian u32, where it is given as such; else empty."""
        prompt = self.request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            [prompt] = prompt
        if not isinstance(prompt, list):
            return b""
        try:
            return array("I", prompt).tobytes()
        except (TypeError, OverflowError):
            return b""  # texts, several prompts, or what the engine will refuse

    @property
    def estimated_tokens(self) -> int:
        """Length of the prompt, about, where its tokens are not known."""
        prompts = (self.request.get(name) for name in ("prompt", "messages", "input"))
        return sum(map(_text_bytes, prompts)) // BYTES_A_TOKEN

    @property
    def max_tokens(self) -> int:
        """Bound of the output; 0 = not told."""
        for name in ("max_completion_tokens", "max_tokens"):
            bound = self.request.get(name)
            if isinstance(bound, int) and 0 < bound <= MAX_TOKENS:
                return int(bound)
        return 0


def asked_of(headers: Mapping[str, str], body: bytes, subset: tuple[str, ...] | None) -> Asked:
    """Reads a request.

    Args:
        headers: By their lower-case names.
        body: Whole; empty if there is none, or none was passed on.
        subset: As the proxy has it.

    Raises:
        InvalidArgument: The body is no JSON object, or has no model.
    """
    named, path = headers.get(MODEL_HEADER, ""), headers.get(":path", "").partition("?")[0]
    if not body or headers.get("content-type", "").startswith("multipart/"):
        return Asked(named, path, size=len(body), subset=subset)
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is no JSON: {error}", field="body") from error
    if not isinstance(request, dict):
        raise InvalidArgument("is no JSON object", field="body")
    model = request.get("model", named)
    if not isinstance(model, str) or not model:
        raise InvalidArgument("must be a string, and not empty", field="model")
    return Asked(model, path, request, len(body), subset)


def _text_bytes(value: Any) -> int:
    """Of the texts in prompts and messages: not of images, nor of names."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    if isinstance(value, dict):
        return sum(_text_bytes(value.get(name)) for name in ("content", "text"))
    return BYTES_A_TOKEN if isinstance(value, int) else 0
