"""Both scanners find what Python's json finds, refuse the same, and cost one pass."""

from __future__ import annotations

import json
import random
import threading
from array import array
from types import ModuleType
from typing import Any

import pytest
from support.cpu_cost import TIMES, assert_in_proportion
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_common.http import json_scan, json_scan_reference

BACKENDS: list[ModuleType] = [json_scan_reference]
if native_available():
    import kvscout_native

    BACKENDS.append(kvscout_native)
BOUNDS: dict[str, Any] = {
    "max_fields": 10,
    "max_values": 1000,
    "strict": True,
    "packed": "prompt",
    "text_fields": json_scan.TEXT_FIELDS,
    "text_keys": json_scan.TEXT_KEYS,
}


@pytest.fixture(params=BACKENDS, ids=lambda module: module.__name__.split(".")[-1])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def packed(*token_ids: int) -> bytes:
    return array("I", token_ids).tobytes()


def refusal(backend: ModuleType, data: bytes, **bounds: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - its text is what is asked for
        backend.scan_object(data, **(BOUNDS | bounds))
    return str(raised.value)


def test_fields_are_where_they_stand(backend: ModuleType) -> None:
    data = ' { "a" :1.0e2,"\\u0062\\ud83d\\ude00é": [1, {"c":[]}] } '.encode()
    fields, _ = backend.scan_object(data, **BOUNDS)
    assert [
        (name, data[begin:end].decode(), data[value:end].decode(), n) for name, begin, value, end, n, _ in fields
    ] == [
        ("a", '"a" :1.0e2', "1.0e2", 1),
        ("b😀é", '"\\u0062\\ud83d\\ude00é": [1, {"c":[]}]', '[1, {"c":[]}]', 4),
    ]
    [(name, *_)], _ = backend.scan_object(b'{"a\\ud800":1}', **BOUNDS)
    assert name == "a?"
    assert backend.scan_object(b" \n{ } \r\n", **BOUNDS) == ([], (None, None, 0))


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("[1, 2,\n70000 ]", (packed(1, 2, 70000), None, 0)),
        ("[]", (b"", None, 0)),
        ("[[1],[2]]", (packed(1), (11, 14), 2)),
        ("[ [ 1 ] ]", (packed(1), (12, 17), 1)),
        ('["a"]', (None, (11, 14), 1)),
        ('["a" , [1]]', (None, (11, 14), 2)),
        ("[[1.5], 2]", (None, (11, 16), 2)),
        *((other, (None, None, 0)) for other in ("1", "[1.5]", "[-1]", "[4294967296]", "[null]", "{}", '"a"', "[{}]")),
    ],
)
def test_token_ids_are_packed_alone_or_as_the_first_of_several(
    backend: ModuleType, prompt: str, found: tuple[Any, ...]
) -> None:
    assert backend.scan_object(f'{{"prompt":{prompt}}}'.encode(), **BOUNDS)[1] == found


def test_text_is_counted_in_characters_where_models_read_it(backend: ModuleType) -> None:
    counted = {
        '"aé\\n\\u00e9\\ud83d\\ude00"': 5,
        "[1, 2]": 8,
        "[1.5, 2, true, null]": 8,
        '[{"content":"abc","role":"user","name":{"text":"no"}}]': 3,
        '[{"cont\\u0065nt":[{"text":"abc"},{"image_url":"data:"},12,true,1.5]}]': 11,
        "[[[[[[[[1]]]]]]]]": 4,
        "[[[[[[[[[1]]]]]]]]]": 0,
    }
    for text, characters in counted.items():
        for name in ("prompt", "messages", "input"):
            [field], _ = backend.scan_object(f'{{"{name}":{text}}}'.encode(), **BOUNDS)
            assert field[-1] == characters, (name, text)
        [field], _ = backend.scan_object(f'{{"other":{text}}}'.encode(), **BOUNDS)
        assert field[-1] == 0


def test_what_is_beyond_a_bound_is_refused_and_the_bound_is_named(backend: ModuleType) -> None:
    depth = json_scan_reference.MAX_DEPTH
    assert backend.scan_object(b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}", **BOUNDS)
    assert "128 lists and objects" in refusal(backend, b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert "128 lists and objects" in refusal(backend, b'{"a":' + b'{"a":' * 100_000)
    assert backend.scan_object(b'{"a":[' + b"[]," * 998 + b"0]}", **BOUNDS)
    assert "1000 values" in refusal(backend, b'{"a":[' + b"[]," * 999 + b"0]}")
    assert "10 fields" in refusal(backend, json.dumps(dict.fromkeys("abcdefghijk")).encode())
    assert "'a' twice" in refusal(backend, b'{"a":1,"\\u0061":2}')
    assert "range at byte 5" in refusal(backend, b'{"a":1e999}')
    assert "range at byte 5" in refusal(backend, b'{"a":' + b"9" * 4301 + b"}")
    assert "UTF-8" in refusal(backend, b'{"a":"\xff"}')


def test_what_engines_write_beyond_json_is_read_where_that_is_allowed(backend: ModuleType) -> None:
    for value in (b"NaN", b"-Infinity", b"Infinity", b"1e999"):
        data = b'{"a":[' + value + b"]}"
        assert refusal(backend, data)
        assert backend.scan_object(data, **(BOUNDS | {"strict": False}))


NO_OBJECTS = [
    *(b"", b" ", b"null", b"[]", b'"text"', b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a" 1}'),
    *(b"{a: 1}", b"{1: 1}", b'{"a": 1} x', b'{"a": 1}{', b'{"a": NaN}', b'{"a": [Infinity]}', b'\xef\xbb\xbf{"a": 1}'),
    *(b'{"a":01}', b'{"a":1.}', b'{"a":.5}', b'{"a":+1}', b'{"a":1e}', b'{"a":-}', b'{"a":nul}', b'{"a":"\x01"}'),
    *(
        b'{"a":"\\x"}',
        b'{"a":"\\u12g4"}',
        b'{"a":"\\',
        b'{"a":"\\u',
        b'{"a":"\\ud800\\u12"}',
        b'{"a":[1 2]}',
        b'{"a":[1,]}',
    ),
    *(
        b'{"a":{"b":1,}}',
        b'{"a":{"b"}}',
        b'{"a":{1:2}}',
        b'{"a":[}}',
        b"{'a':1}",
        b'{"a":--1}',
        b'{"prompt":[1,2}',
        b'{"a":',
    ),
    b'{"a": 1}' + b" " * 5000 + b"x",
]


@pytest.mark.parametrize("data", NO_OBJECTS, ids=lambda data: repr(data[:20]))
def test_what_is_no_object_is_refused(backend: ModuleType, data: bytes) -> None:
    assert "is not a JSON object" in refusal(backend, data)


def _value(draw: random.Random, depth: int) -> str:
    space = draw.choice(["", "", " ", "\n\t"])
    kind = draw.randrange(9 if depth else 6)
    if kind == 0:
        return draw.choice(
            ["0", "-0", "12", "-7", "1.5", "1e3", "2E-2", "4294967296", "123456789012345678901234567890"]
        )
    if kind in (1, 2):
        return json.dumps(
            "".join(draw.choices('ab"\\\n/é😀\x7f\u2028', k=draw.randrange(8))), ensure_ascii=draw.random() < 0.5
        )
    if kind == 3:
        return draw.choice(["null", "true", "false"])
    if kind in (4, 5):
        return "[" + ("," + space).join(str(draw.randrange(99_999)) for _ in range(draw.randrange(6))) + space + "]"
    if kind in (6, 7):
        return "[" + space + ("," + space).join(_value(draw, depth - 1) for _ in range(draw.randrange(5))) + "]"
    names = ["content", "text", "role", "é", "cont\\u0065nt"]
    members = (f'"{draw.choice(names)}"{space}:{space}{_value(draw, depth - 1)}' for _ in range(draw.randrange(4)))
    return "{" + space + ",".join(members) + "}"


def _object(draw: random.Random) -> bytes:
    names = draw.sample(["prompt", "messages", "input", "model", "é", "x\\n"], k=draw.randrange(7))
    space = draw.choice(["", " ", "\r\n"])
    fields = (f'{space}"{name}"{space}:{space}{_value(draw, 4)}{space}' for name in names)
    return ("{" + ",".join(fields) + space + "}").encode()


def test_random_objects_are_read_as_python_reads_them_and_alike() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    refused = 0
    for _ in range(4000):
        data = bytearray(_object(draw))
        for _ in range(draw.choice([0, 0, 1, 2])):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(2)] = bytes(
                draw.choices(b'{}[],:"\\u0dD8cCeE+-. 19\xc3\xff', k=draw.randrange(3))
            )
        bounds = BOUNDS | {"strict": draw.random() < 0.5, "max_values": draw.choice([1000, 20])}
        answers: list[Any] = []
        for backend in BACKENDS:
            try:
                answers.append(backend.scan_object(bytes(data), **bounds))
            except ValueError:
                answers.append(None)
        assert all(answer == answers[0] for answer in answers), bytes(data)
        if answers[0] is None:
            refused += 1
            continue
        read = json.loads(bytes(data))
        found = {name: json.loads(bytes(data[value:end])) for name, _, value, end, _, _ in answers[0][0]}
        assert repr(found) == repr(read), bytes(data)
        for backend in BACKENDS:
            made = {name: backend.load_value(bytes(data), value, end) for name, _, value, end, _, _ in answers[0][0]}
            assert repr(made) == repr(read), bytes(data)
    assert 100 < refused < 3900


FLOODS = {
    "lists": (b'{"a":[', b"[],", b"0]}"),
    "objects": (b'{"a":[', b'{"a":1},', b"0]}"),
    "depth": (b'{"a":', b"[", b""),
    "strings": (b'{"prompt":[', b'"",', b'""]}'),
    "numbers": (b'{"prompt":[', b"1,", b"-1]}"),
    "lists of numbers": (b'{"prompt":[[1],', b"[1],", b"0]}"),
    "digits": (b'{"a":', b"9", b"}"),
    "fraction": (b'{"a":0.', b"9", b"e1}"),
    "space": (b'{"a":', b" ", b""),
    "space in a list": (b'{"prompt":[', b" ", b"x]}"),
    "escapes": (b'{"a":"', b"\\n", b'"}'),
    "surrogates": (b'{"messages":"', b"\\ud83d\\ude00", b'"}'),
    "escaped quotation marks": (b'{"a":"', b'\\"', b""),
    "fields": (b"{", b'"a":1,', b'"a":1}'),
    "one name": (b'{"', b"a", b'":1}'),
    "text": (b'{"messages":[{"content":"', "é".encode(), b'"}]}'),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_four_times_the_text_costs_no_more_than_in_proportion(backend: ModuleType, flood: str) -> None:
    begin, unit, end = FLOODS[flood]
    size = 1 << (16 if backend is json_scan_reference else 20)

    def scan(data: bytes) -> None:
        try:
            backend.scan_object(data, **(BOUNDS | {"max_fields": 10_000, "max_values": 1 << 40}))
        except ValueError:
            pass  # what is refused costs no more, either

    small, large = (begin + unit * (times * size // len(unit)) + end for times in (1, TIMES))
    assert_in_proportion(scan, small, large)


def test_the_bounds_are_those_of_the_module() -> None:
    with pytest.raises(ValueError, match=f"{json_scan.MAX_VALUES} values"):
        json_scan.scan_object(b'{"a":[' + b"[]," * json_scan.MAX_VALUES + b"0]}")
    found = json_scan.scan_object(b'{"model": "m", "tokens": [1, 2]}', packed="tokens")
    assert found.packed.token_ids == packed(1, 2)
    assert found.places["tokens"] == json_scan.Place(15, 25, 31, 1, 0)


@pytest.mark.parametrize(
    "text", ["[NaN, -Infinity, Infinity, 1e999, -0.0]", "[" + "9" * 400 + "]", '"\\ud83d\\ude00\\udc00x"']
)
def test_values_beyond_those_of_other_languages_are_pythons(backend: ModuleType, text: str) -> None:
    assert repr(backend.load_value(text.encode(), 0, len(text))) == repr(json.loads(text))


def test_other_threads_run_while_a_long_value_is_made() -> None:
    if not native_available():
        pytest.skip("json of the standard library holds the lock")
    text = b"[" + b"[]," * 2_000_000 + b"[]]"
    made, turns = threading.Event(), 0

    def make() -> None:
        json_scan.load_value(text, 0, len(text))
        made.set()

    thread = threading.Thread(target=make)
    thread.start()
    while not made.wait(0.0001):
        turns += 1
    thread.join()
    assert turns > 100, "two thousand values at a time"
