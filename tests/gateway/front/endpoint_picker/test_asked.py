"""What a request asks for, read from its headers and body."""

from __future__ import annotations

import json
from array import array

import pytest

from kvscout_common.errors import InvalidArgument
from kvscout_gateway.front.endpoint_picker.asked import asked_of

JSON = {"content-type": "application/json"}


def test_token_ids_are_taken_as_they_are() -> None:
    body = b'{"model": "m", "prompt": [1, 2, 70000], "max_tokens": 8}'
    asked = asked_of({**JSON, ":path": "/v1/completions?a=b"}, body, ("10.0.0.1:80",))
    assert asked[:2] == ("m", "/v1/completions")
    assert asked[3:] == (len(body), ("10.0.0.1:80",))
    assert (asked.token_ids, asked.max_tokens) == (array("I", [1, 2, 70000]).tobytes(), 8)


def test_one_prompt_in_a_list_is_that_prompt_and_of_several_the_length_is_estimated() -> None:
    assert asked_of(JSON, b'{"model": "m", "prompt": [[1, 2]]}', None).token_ids == array("I", [1, 2]).tobytes()
    several = asked_of(JSON, b'{"model": "m", "prompt": [[1, 2], [3, 4]]}', None)
    assert (several.token_ids, several.estimated_tokens) == (b"", 4)


@pytest.mark.parametrize("body", [
    {"prompt": "x" * 40},
    {"prompt": ["x" * 20, "y" * 20]},
    {"messages": [{"role": "user", "content": "x" * 40}]},
    {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}},
    ]}]},
    {"input": "x" * 40},
])  # fmt: skip
def test_of_text_the_length_is_estimated_and_no_image_is_counted(body: dict[str, object]) -> None:
    asked = asked_of(JSON, json.dumps({"model": "m", **body}).encode(), None)
    assert (asked.token_ids, asked.estimated_tokens) == (b"", 10)


@pytest.mark.parametrize("prompt", ['[1, "a"]', "[-1]", "[4294967296]", "[1.5]", "{}", "null", "[]"])
def test_what_is_no_prompt_is_left_to_the_engine(prompt: str) -> None:
    assert asked_of(JSON, f'{{"model": "m", "prompt": {prompt}}}'.encode(), None).token_ids == b""


@pytest.mark.parametrize(("body", "field"), [
    (b"{", "body"), (b"[]", "body"), (b"\xff", "body"), (b"[" * 100_000, "body"),
    (b"{}", "model"), (b'{"model": ""}', "model"), (b'{"model": 1}', "model"), (b'{"model": null}', "model"),
])  # fmt: skip
def test_a_body_that_names_no_model_is_refused_and_says_why(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        asked_of(JSON, body, None)
    assert raised.value.field == field


def test_without_a_body_or_with_a_form_the_header_names_the_model() -> None:
    named = {"x-gateway-model-name": "m"}
    assert asked_of(named, b"", None).model == "m"
    assert asked_of({**named, "content-type": "multipart/form-data; boundary=x"}, b"--x", None).model == "m"
    assert asked_of({**named, **JSON}, b"{}", None).model == "m"
    assert asked_of({}, b"", None).model == ""


@pytest.mark.parametrize(("bound", "tokens"), [
    ('"max_completion_tokens": 5, "max_tokens": 7', 5), ('"max_tokens": -1', 0), ('"max_tokens": "9"', 0),
])  # fmt: skip
def test_the_bound_of_the_output_is_read(bound: str, tokens: int) -> None:
    assert asked_of(JSON, f'{{"model": "m", {bound}}}'.encode(), None).max_tokens == tokens
