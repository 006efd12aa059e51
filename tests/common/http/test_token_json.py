from __future__ import annotations

import json
import random
from array import array
from types import ModuleType

import pytest
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_common.http import json_scan, token_json_reference

BACKENDS: list[ModuleType] = [token_json_reference]
if native_available():
    import kvscout_native

    BACKENDS.append(kvscout_native)


@pytest.fixture(params=BACKENDS, ids=lambda module: module.__name__.split(".")[-1])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def packed(*token_ids: int) -> bytes:
    return array("I", token_ids).tobytes()


@pytest.mark.parametrize("token_ids", [(), (0,), (7, 10, 4_294_967_295, 0, 99_999)])
def test_what_is_written_is_the_list_as_json(backend: ModuleType, token_ids: tuple[int, ...]) -> None:
    written = backend.write_tokens(packed(*token_ids))
    assert json.loads(b"[" + written + b"]") == list(token_ids)
    assert b" " not in written


def test_a_list_is_read_where_it_stands(backend: ModuleType) -> None:
    text = '{"prompt": [1, 20 ,\t300\n], "n": 1}'
    assert backend.read_tokens(text, 11) == (packed(1, 20, 300), text.index("]") + 1)
    assert backend.read_tokens("[]", 0) == (b"", 2)
    assert backend.read_tokens("[ \r\n]x", 0) == (b"", 5)
    assert backend.read_tokens("[4294967295]", 0) == (packed(4_294_967_295), 12)


NO_LISTS = [
    *("", "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "[1}", "1", " [1]", "{}", '"1"', "null"),
    *("[01]", "[00]", "[-1]", "[-0]", "[+1]", "[1.0]", "[1e3]", "[0x1]", "[true]", "[null]", '["1"]', "[[1]]", "[NaN]"),
    *("[4294967296]", "[99999999999]", "[" + "9" * 5000 + "]", "[1\v,2]"),
]


@pytest.mark.parametrize("text", NO_LISTS, ids=lambda text: text[:20])
def test_whatever_else_is_none(backend: ModuleType, text: str) -> None:
    assert backend.read_tokens(text, 0) is None


def test_a_place_behind_the_text_has_no_list(backend: ModuleType) -> None:
    assert backend.read_tokens("[1]", 3) is None
    assert backend.read_tokens("[1]", 1000) is None


@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_both_read_and_write_the_same() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    reference, native = BACKENDS
    for _ in range(300):
        token_ids = packed(*(draw.getrandbits(draw.choice((1, 8, 17, 32))) for _ in range(draw.randrange(40))))
        written = native.write_tokens(token_ids)
        assert written == reference.write_tokens(token_ids)
        numbers = written.decode().replace(",", draw.choice((",", ", ", " ,\n")))
        text = list(f"[{numbers}]{draw.choice(('', '}'))}")
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(text))
            text[place] = draw.choice(("", text[place] * 2, *'0159,[]{} -.e"\t'))
        found = native.read_tokens("".join(text), 0)
        assert found == reference.read_tokens("".join(text), 0), "".join(text)
        if found is not None:
            assert json.loads("".join(text)[: found[1]]) == array("I", found[0]).tolist()


def test_the_interface_is_one_of_them() -> None:
    assert json_scan.write_tokens(packed(1, 2)) == b"1,2"
