"""What a request asks for, read from its headers and body."""

from __future__ import annotations

from array import array

import pytest

from kvscout_common.errors import InvalidArgument
from kvscout_gateway.front.endpoint_picker.asked import Asked, asked_of

JSON = {"content-type": "application/json"}


def test_a_body_is_read_and_the_path_without_its_query() -> None:
    body = b'{"model": "m", "prompt": [1, 2, 70000], "max_tokens": 8}'
    asked = asked_of({**JSON, ":path": "/v1/completions?a=b"}, body, ("10.0.0.1:80",))
    fields = {"model": "m", "prompt": array("I", [1, 2, 70000]).tobytes(), "max_tokens": 8}
    assert asked == Asked("m", "/v1/completions", fields, len(body), ("10.0.0.1:80",))


def test_the_trace_that_a_proxy_names_is_read_with_and_without_a_body() -> None:
    named = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for headers, body in ((named, b""), ({**named, **JSON}, b'{"model": "m"}')):
        assert asked_of(headers, body, None).traceparent == named["traceparent"]


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
