"""Answers of a real vLLM to agents' requests, and the mocker's: the same status, fields, events and kinds of errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.agent_exchanges import ASKED, recorded
from support.mocker_process import MockerProcess, running_mocker

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSION = "vllm-0.32.0"
NOT_SIMULATED = {
    *("content_parts", "ec_transfer_params", "output_mode", "return_token_ids"),
    *("reasoning_ended", "reasoning_parser_kwargs", "stream_options"),
}
"""Fields of rendered requests that the mocker leaves out."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answers() -> AsyncIterator[dict[str, tuple[int, str]]]:
    """The mocker's answers, in the order in which the engine was asked."""
    flags = ("--model", "tiny", "--block-size", "32", "--max-model-len", "1024")
    async with running_mocker(*flags, "--store-responses", "--render", "all") as mocker:
        yield {name: await _answer(mocker, name) for name in ASKED}


async def _answer(mocker: MockerProcess, name: str) -> tuple[int, str]:
    path, body = ASKED[name]
    method = "GET" if body is None else "POST"
    async with mocker.http.request(method, mocker.url + path, json=body) as response:
        return response.status, await response.text()


def shape(value: Any) -> Any:
    """Names and kinds of all fields."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in sorted(value.items()) if key not in ("param", "sampling_params")}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


def shapes(text: str) -> list[tuple[str, Any]]:
    """Shapes of the events of a stream, equal ones one after another once; of a whole answer one without a name."""
    if not text.startswith("event: "):
        document = json.loads(text)
        return [("", shape({key: each for key, each in document.items() if key not in NOT_SIMULATED}))]
    found: list[tuple[str, Any]] = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = name.removeprefix("event: "), shape(json.loads(data.removeprefix("data: ")))
        if event not in found[-1:]:
            found.append(event)
    return found


@pytest.mark.parametrize("name", ASKED)
async def test_an_answer_has_the_shape_of_vllms(answers: dict[str, tuple[int, str]], name: str) -> None:
    real = recorded(VERSION)[name]
    status, text = answers[name]
    assert status == real["status"], text
    if "rendered" in name:
        ours, theirs = (json.loads(each) for each in (text, real["text"]))
        assert {key for key in theirs if key not in NOT_SIMULATED} == ours.keys()
        return
    assert shapes(text) == shapes(real["text"])


@pytest.mark.parametrize("name", ["message", "message, cached", "message, streamed", "tokens counted", "response"])
async def test_tokens_are_counted_as_vllm_counts_them(answers: dict[str, tuple[int, str]], name: str) -> None:
    def counts(text: str) -> list[Any]:
        documents = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        return [_usage(document) for document in documents or [json.loads(text)]]

    assert [each for each in counts(answers[name][1]) if each] == [
        each for each in counts(recorded(VERSION)[name]["text"]) if each
    ]


def _usage(document: dict[str, Any]) -> Any:
    return document.get("usage") or (document.get("message") or {}).get("usage") or document.get("input_tokens")


@pytest.mark.parametrize("name", [name for name, one in recorded(VERSION).items() if one["status"] >= 400])
async def test_an_error_is_of_vllms_kind(answers: dict[str, tuple[int, str]], name: str) -> None:
    real, ours = (json.loads(text)["error"] for text in (recorded(VERSION)[name]["text"], answers[name][1]))
    # A body that its reader refuses has the kind of vLLM's web framework.
    assert ours["type"] == real["type"].replace("Bad Request", "BadRequestError")
