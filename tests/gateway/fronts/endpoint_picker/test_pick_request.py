"""What a request asks for, read from its headers and body."""

from __future__ import annotations

import gzip
import json
from array import array

import pytest

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.http import HttpRefused
from kvscout_common.http.json_fields import INLINE_BYTES, Fields
from kvscout_gateway.fronts.endpoint_picker.pick_request import (
    REWRITE_HEADERS,
    PickRequest,
    read_request,
)
from kvscout_gateway.fronts.terms import OBJECTIVE_HEADERS

JSON = {"content-type": "application/json"}
FORM = "multipart/form-data; boundary=b"


def form(**fields: bytes) -> bytes:
    parts = (f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() for name in fields)
    return b"".join(head + value + b"\r\n" for head, value in zip(parts, fields.values(), strict=True)) + b"--b--\r\n"


async def test_a_body_is_read_and_the_path_without_its_query() -> None:
    body = b'{"model": "m", "prompt": [1, 2, 70000], "max_tokens": 8}'
    headers = {**JSON, ":path": "/v1/completions?a=b"}
    asked = await read_request(headers, body, ("10.0.0.1:80",))
    fields = {"model": "m", "prompt": array("I", [1, 2, 70000]).tobytes(), "max_tokens": 8}
    assert asked.fields == fields
    assert dict(asked.headers) == {**JSON, ":path": "/v1/completions?a=b"}
    plain = asked._replace(fields=Fields(), headers=())
    assert plain == PickRequest("m", "/v1/completions", Fields(), len(body), ("10.0.0.1:80",))


async def test_the_trace_that_a_proxy_names_is_read_with_and_without_a_body() -> None:
    named = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for headers, body in ((named, b""), ({**named, **JSON}, b'{"model": "m"}')):
        assert (await read_request(headers, body, None)).traceparent == named["traceparent"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions?x=1"])
@pytest.mark.parametrize(("body", "field"), [
    (b"{", "body"), (b"[]", "body"), (b"\xff", "body"), (b"[" * 100_000, "body"),
    (b'{"model": ""}', "model"), (b'{"model": 1}', "model"),
])  # fmt: skip
async def test_a_completion_that_is_no_json_or_whose_model_is_no_name_is_refused_and_says_why(
    path: str, body: bytes, field: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await read_request({**JSON, ":path": path}, body, None)
    assert raised.value.field == field


@pytest.mark.parametrize("body", [b"[]", b"\xff", b"not JSON", b"--x\r\n", b"model=m&kv_transfer_params=x"])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "", FORM])
async def test_what_cannot_be_read_is_refused_on_every_path(body: bytes, kind: str) -> None:
    for headers in ({":path": "/v1/embeddings"}, {":path": "/upload", "x-gateway-model-name": "m"}):
        with pytest.raises(InvalidArgument) as raised:
            await read_request({**headers, "content-type": kind}, body, None)
        assert raised.value.field == "body"


@pytest.mark.parametrize("length", [10, 3 * INLINE_BYTES])
async def test_a_form_names_its_model_and_goes_on_as_it_came(length: int) -> None:
    body = form(model=b"whisper", file=b"x" * length)
    headers = {":path": "/v1/audio/transcriptions", "content-type": FORM}
    asked = await read_request(headers, body, None)
    assert (asked.model, asked.size, asked.changed) == ("whisper", len(body), None)
    assert (await read_request({**headers, "x-gateway-model-name": "m"}, body, None)).model == "m"
    assert (await read_request(headers, form(file=b"x"), None)).model == ""


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_host", "rid"])
@pytest.mark.parametrize("kind", [FORM, "Multipart/Form-Data; Boundary=b", f" {FORM}"])
@pytest.mark.parametrize("further", [{}, {"x-gateway-model-name": "m"}])
async def test_a_form_that_says_where_it_runs_is_refused(field: str, kind: str, further: dict[str, str]) -> None:
    headers = {":path": "/v1/audio/transcriptions", "content-type": kind, **further}
    with pytest.raises(InvalidArgument) as raised:
        await read_request(headers, form(**{"model": b"whisper", field: b"x"}), None)
    assert raised.value.field == field


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_compressed_body_is_refused(path: str) -> None:
    packed = gzip.compress(b'{"model": "m", "kv_transfer_params": {}}')
    with pytest.raises(HttpRefused) as raised:
        await read_request({**JSON, ":path": path, "content-encoding": "gzip"}, packed, None)
    assert raised.value.status == 415


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("text", ['{"kv_transfer_params": 1, "kv_transfer_params": 2}', ' {"rid": 1', '{"rid": NaN}'])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
async def test_what_an_engine_may_read_as_an_object_is_passed_on_only_if_it_was_read_here(
    kind: str, text: str, encoding: str
) -> None:
    with pytest.raises(InvalidArgument):
        await read_request({":path": "/v1/responses", "content-type": kind}, text.encode(encoding), None)


@pytest.mark.parametrize("body", [b"{}", b'{"model": null}'])
async def test_a_body_may_name_no_model(body: bytes) -> None:
    asked = await read_request({**JSON, ":path": "/v1/completions"}, body, None)
    assert (asked.model, asked.size) == ("", len(body))


async def test_without_a_body_or_with_a_form_the_header_names_the_model() -> None:
    named = {"x-gateway-model-name": "m"}
    assert (await read_request(named, b"", None)).model == "m"
    assert (await read_request({**named, "content-type": FORM}, form(file=b"x"), None)).model == "m"
    assert (await read_request({**named, **JSON}, b"{}", None)).model == "m"
    assert (await read_request({}, b"", None)).model == ""


@pytest.mark.parametrize("name", REWRITE_HEADERS)
async def test_a_model_that_a_header_names_takes_the_place_of_the_body_s_and_goes_to_the_engine(name: str) -> None:
    headers = {**JSON, ":path": "/v1/completions", name: "m-v2"}
    asked = await read_request(headers, b'{"model": "m", "prompt": [1]}', None)
    assert asked.model == "m-v2"
    assert json.loads(asked.changed or b"") == {"model": "m-v2", "prompt": [1]}
    without = await read_request(headers, b'{"prompt": [1]}', None)
    assert (without.model, json.loads(without.changed or b"")) == ("m-v2", {"prompt": [1], "model": "m-v2"})
    # What cannot be changed goes where the engine knows its name.
    shown_none = await read_request({"x-gateway-model-name": "m", name: "m-v2"}, b"", None)
    assert (shown_none.model, shown_none.changed) == ("m", None)


async def test_what_is_not_a_client_s_to_say_is_taken_out_of_a_body_and_else_it_stays_as_it_came() -> None:
    headers = {**JSON, ":path": "/v1/completions"}
    body = b'{"model": "m", "kv_transfer_params": {"remote_host": "10.9.9.9"}, "vllm_xargs": {"rid": "x", "a": 1}}'
    changed = (await read_request(headers, body, None)).changed
    assert json.loads(changed or b"") == {"model": "m", "vllm_xargs": {"a": 1}}
    assert (await read_request(headers, b'{"model": "m", "priority": 7}', None)).changed is None
    limited = await read_request(headers, b'{"model": "m", "priority": 7}', None, max_priority=3)
    assert json.loads(limited.changed or b"") == {"model": "m", "priority": 3}


async def test_an_objective_is_named_by_a_header_with_or_without_a_body() -> None:
    for name in OBJECTIVE_HEADERS:
        assert dict((await read_request({name: "batch"}, b"", None)).headers)[name] == "batch"
        assert dict((await read_request({**JSON, name: "batch"}, b'{"model": "m"}', None)).headers)[name] == "batch"
