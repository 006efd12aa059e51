"""Bodies are changed in place, and what is no body is refused."""

from __future__ import annotations

import json
import threading
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.json_fields import INLINE_BYTES, MAX_FIELD_BYTES, MAX_FIELD_VALUES, Prompts
from kvscout_common.http.json_scan import load_value
from kvscout_gateway.fronts.body import JsonBody, parsed

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
# Prompts are read in a form of their own, see below; Hypothesis draws such names from the code's constants.
NAMES = st.text().filter(lambda name: name not in {"prompt", "messages", "input"})
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


def written(fields: dict[str, Any], indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def test_token_ids_of_a_prompt_are_packed_and_stay_as_they_were_written() -> None:
    data = b'{"prompt" :[1, 2,\n300 ] ,"stop":[1, 2]}'
    body = JsonBody(data)
    assert body.fields == {"prompt": array("I", [1, 2, 300]).tobytes(), "stop": [1, 2]}
    assert body.changed({"n": 1}) == b'{"prompt" :[1, 2,\n300 ] ,"stop":[1, 2],"n":1}'
    assert JsonBody('{"a": "é", "prompt": [1]}'.encode()).fields["prompt"] == array("I", [1]).tobytes()


@pytest.mark.parametrize("prompt", ["[1, -2]", "[1.5]", "[true]", "[4294967296]", '"text"'])
def test_any_other_prompt_is_as_python_reads_it(prompt: str) -> None:
    assert JsonBody(f'{{"prompt":{prompt}}}'.encode()).fields["prompt"] == json.loads(prompt)


@pytest.mark.parametrize(("prompt", "made"), [
    ("[[1, 2]]", Prompts(array("I", [1, 2]).tobytes(), 1, 0)),
    ("[[1], [2, 3]]", Prompts(array("I", [1]).tobytes(), 2, 8)),
    ('["a\\n", "bcd"]', Prompts("a\n", 2, 3)), ("[[-1], 2]", Prompts(None, 2, 8)), ("[[]]", Prompts(b"", 1, 0)),
])  # fmt: skip
def test_of_several_prompts_only_the_first_is_made(prompt: str, made: Prompts) -> None:
    assert JsonBody(f'{{"prompt":{prompt}}}'.encode()).fields["prompt"] == made


def test_a_field_with_too_much_in_it_is_passed_on_and_not_made() -> None:
    many = b"[" + b"[]," * MAX_FIELD_VALUES + b"0]"
    long = b'"' + b"x" * MAX_FIELD_BYTES + b'"'
    for value in (many, long):
        body = JsonBody(b'{"a":' + value + b',"b":1,"prompt":[' + value + b"]}")
        assert body.fields["prompt"].first is None
        assert body.get("b") == 1
        assert "a" in body.fields
        with pytest.raises(InvalidArgument) as raised:
            body.get("a")
        assert raised.value.field == "a"
        assert body.changed({"b": 2}) == b'{"a":' + value + b',"b":2,"prompt":[' + value + b"]}"
        assert body.changed({"a": 0, "prompt": None}) == b'{"a":0,"b":1}'


def test_only_what_tells_a_prompt_may_be_longer_than_is_read_on_the_event_loop() -> None:
    value = b'"' + b"x" * INLINE_BYTES + b'"'
    body = JsonBody(b'{"messages":' + value + b',"tool_choice":' + value + b"}")
    assert len(body.get("messages")) == INLINE_BYTES
    with pytest.raises(InvalidArgument):
        body.get("tool_choice")


async def test_the_prompt_of_a_long_body_is_made_in_the_thread_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made_in = set[int]()

    def noted(data: bytes, begin: int, end: int) -> object:
        made_in.add(threading.get_ident())
        return load_value(data, begin, end)

    monkeypatch.setattr("kvscout_common.http.json_fields.load_value", noted)
    text = "a\n" * INLINE_BYTES
    body = await parsed(json.dumps({"prompt": text}).encode())
    assert body.get("prompt") == text
    assert len(made_in) == 1
    assert threading.get_ident() not in made_in


def test_text_is_counted_whatever_its_length() -> None:
    text = "é" * MAX_FIELD_BYTES
    body = JsonBody(json.dumps({"messages": [{"role": "user", "content": text}], "x": "y"}).encode())
    assert body.fields.characters == len(text)


@given(fields=OBJECTS, changes=OBJECTS, indent=st.sampled_from([None, 0, 3]), ascii_only=st.just(True))
def test_changes_change_what_they_name_and_nothing_else(
    fields: dict[str, Any], changes: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    data = written(fields, indent, ascii_only)
    body = JsonBody(data)
    assert body.fields == fields
    assert body.changed({}) == data
    expected = {name: value for name, value in {**fields, **changes}.items() if changes.get(name, 0) is not None}
    changed = json.loads(body.changed(changes))
    assert changed == expected
    assert list(changed) == list(expected)


def test_what_is_not_changed_stays_byte_for_byte() -> None:
    data = (
        '{ "a" :1.0e2, "täg":"\\u00e4ä\\/" ,\n"big": 123456789012345678901234567890, "model": "x", "z":{"k":[1 , 2]}}'
    )
    body = JsonBody(data.encode())
    changed = body.changed({"model": "y", "new": {"a": 1}, "absent": None}).decode()
    for kept in ('"a" :1.0e2', '"täg":"\\u00e4ä\\/"', '"big": 123456789012345678901234567890', '"z":{"k":[1 , 2]}'):
        assert kept in changed
    assert json.loads(changed)["model"] == "y"
    assert body.changed({"model": "x"}) == data.encode()


def test_a_field_is_taken_out_by_none() -> None:
    assert JsonBody(b'{"a": 1, "b": 2}').changed({"a": None}) == b'{"b": 2}'
    assert JsonBody(b'{"a": 1}').changed({"a": None}) == b"{}"
    assert JsonBody(b"{}").changed({"a": 1}) == b'{"a":1}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a" 1}',
        b"{a: 1}",
        b"{1: 1}",
        b'{"a": 1} x',
        b'{"a": 1}{',
        b'{"a": NaN}',
        b'{"a": [Infinity]}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}',
        b'{"a": 1e999}',
        b'{"a":[' + b"[]," * 2_000_000 + b"0]}",
        b'{"a":' + b"[" * 100_000,
        b'{"a": 1}' + b" " * 5000 + b"x",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="body: "):
        JsonBody(data)


def test_white_space_around_is_no_fault() -> None:
    assert JsonBody(b" \n{ } \r\n").fields == {}
    assert JsonBody(b' {\t"a" : 1 } ').fields == {"a": 1}


def test_fields_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_common.http.json_scan.MAX_FIELDS", 3)
    with pytest.raises(InvalidArgument, match="3 fields"):
        JsonBody(json.dumps(dict.fromkeys("abcd")).encode())
