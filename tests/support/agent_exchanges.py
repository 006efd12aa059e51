"""Requests to `/v1/messages` and `/v1/responses`, and what a real engine answered to them.

    PYTHONPATH=tests python -m support.agent_exchanges URL VERSION

records the answers of an engine that serves the model of `examples/tiny_model.py` as `tiny`, with a context of 1,024
tokens, prompt token details, a store of responses and the scale-out endpoints, as `examples/real_vllm.md` starts it.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "data" / "agent_exchanges"
_WORDS = "w9 w10 w11 w12 " * 12
_USER = [{"role": "user", "content": _WORDS}]
_MESSAGE = {"model": "tiny", "max_tokens": 4, "messages": _USER}
_RESPONSE = {"model": "tiny", "max_output_tokens": 4, "input": _WORDS}
_LONG = "w9 " * 1100


class Ask(NamedTuple):
    """One request."""

    path: str
    body: dict[str, Any] | None
    """None = a GET."""


ASKED = {
    "message": Ask("/v1/messages", _MESSAGE),
    "message, cached": Ask("/v1/messages", _MESSAGE),
    "message, streamed": Ask("/v1/messages", _MESSAGE | {"stream": True}),
    "tokens counted": Ask("/v1/messages/count_tokens", {"model": "tiny", "messages": _USER}),
    "message without limit": Ask("/v1/messages", {"model": "tiny", "messages": _USER}),
    "message of an unknown model": Ask("/v1/messages", _MESSAGE | {"model": "nope"}),
    "message too long": Ask("/v1/messages", _MESSAGE | {"messages": [{"role": "user", "content": _LONG}]}),
    "message with a limit too high": Ask("/v1/messages", _MESSAGE | {"max_tokens": 32_000}),
    "message rendered": Ask("/v1/messages/render", _MESSAGE),
    "response": Ask("/v1/responses", _RESPONSE | {"priority": 3, "request_id": "resp_stored"}),
    "response, streamed": Ask("/v1/responses", _RESPONSE | {"stream": True}),
    "response continued": Ask("/v1/responses", _RESPONSE | {"previous_response_id": "resp_stored"}),
    "response stored": Ask("/v1/responses/resp_stored", None),
    "response not stored": Ask("/v1/responses/resp_unknown", None),
    "response cancelled": Ask("/v1/responses/resp_stored/cancel", {}),
    "response of the background": Ask("/v1/responses", _RESPONSE | {"background": True}),
    "response of an unknown model": Ask("/v1/responses", _RESPONSE | {"model": "nope"}),
    "response to nothing": Ask("/v1/responses", {"model": "tiny"}),
    "response too long": Ask("/v1/responses", _RESPONSE | {"input": _LONG}),
    "response with a limit too high": Ask("/v1/responses", _RESPONSE | {"max_output_tokens": 32_000}),
    "response continues nothing": Ask("/v1/responses", _RESPONSE | {"previous_response_id": "resp_unknown"}),
    "response must call no tool": Ask("/v1/responses", _RESPONSE | {"tool_choice": "required"}),
    "response rendered": Ask("/v1/responses/render", _RESPONSE),
}
"""By name, in the order in which they are sent."""


def recorded(version: str) -> dict[str, dict[str, Any]]:
    """Return the answers of an engine by name: `status` and `text`."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / f"{version}.json").read_text())
    return found


def _answer(url: str, ask: Ask) -> dict[str, Any]:
    data = None if ask.body is None else json.dumps(ask.body).encode()
    request = urllib.request.Request(url + ask.path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return {"status": response.status, "text": response.read().decode()}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "text": error.read().decode()}


if __name__ == "__main__":
    answers = {name: _answer(sys.argv[1], ask) for name, ask in ASKED.items()}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{sys.argv[2]}.json").write_text(json.dumps(answers, indent=1) + "\n")
