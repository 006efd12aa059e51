"""Where the tokens of a prompt come from: the request, a tokenizer here, the engine; whether they are the engine's."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.trained_tokenizers import byte_level, byte_level_prefixed, save

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.http.factory import connect, serve_http
from kvscout_common.http.http import HttpCall
from kvscout_common.http.json_fields import Prompts
from kvscout_common.rpc.service_info import text_of
from kvscout_gateway.tokens import engine_tokenize
from kvscout_gateway.tokens.engine_tokenize import EngineTokenize, Tokenizing
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.prompt_tokens import ANY_MODEL, PromptTokenizer
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


async def never(body: Mapping[str, Any], tenant: str) -> bytes:
    raise AssertionError("the engine is not to be asked")


@pytest.fixture
def here(tmp_path: Path) -> PromptTokenizer:
    def load(name: str, build: Any) -> TextTokenizer:
        return TextTokenizer.load(save(tmp_path / name, build()), Threads(), cache_bytes=1 << 16, flag="tokenizer")

    return PromptTokenizer({ANY_MODEL: load("any", byte_level), "own": load("own", byte_level_prefixed)}, never)


async def test_tokens_of_the_request_are_taken_as_they_are(here: PromptTokenizer) -> None:
    for prompt in ([1, 2, 3], Prompts(array("I", [1, 2, 3]).tobytes(), 1, 0), array("I", [1, 2, 3]).tobytes()):
        found = await here.of_completion({"prompt": prompt}, model="m", tenant="a")
        assert (ids(found.token_ids), found.tokenized_here, found.further_tokens) == ([1, 2, 3], False, 0)
        assert found.own_tokens == 3


async def test_of_several_prompts_the_first_is_taken_and_the_others_are_counted(here: PromptTokenizer) -> None:
    found = await here.of_completion({"prompt": Prompts(array("I", [1]).tobytes(), 3, 12)}, model="m", tenant="a")
    assert (ids(found.token_ids), found.further_tokens) == ([1], 3)
    found = await here.of_completion({"prompt": Prompts("hello", 3, 101)}, model="m", tenant="a")
    assert (ids(found.token_ids), found.further_tokens) == (byte_level().encode("hello").ids, 25)
    assert not found.tokenized_here  # not all that the engine counts
    assert (await here.of_completion({"prompt": Prompts("a", 9, 8)}, model="m", tenant="a")).further_tokens == 8


async def test_a_model_has_its_own_tokenizer_or_that_of_all(here: PromptTokenizer) -> None:
    for model, build in (("m", byte_level), ("own", byte_level_prefixed)):
        found = await here.of_completion({"prompt": "hello dog"}, model=model, tenant="a")
        assert (ids(found.token_ids), found.tokenized_here) == (build().encode("hello dog").ids, True)
    found = await here.of_completion({"prompt": "dog", "add_special_tokens": False}, model="own", tenant="a")
    assert ids(found.token_ids) == byte_level_prefixed().encode("dog", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "prompt", [None, 1, {"a": 1}, [], [1, "a"], [-1], [2**32], [1.5], [None], Prompts(None, 2, 0), "a\ud800"]
)
async def test_a_prompt_that_is_none_has_no_tokens_and_a_reason(here: PromptTokenizer, prompt: Any) -> None:
    found = await here.of_completion({"prompt": prompt}, model="m", tenant="a")
    assert found.token_ids == b""
    assert prompt == [] or (found.unknown and not found.isl_tokens)


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "prompt_embeds"])
async def test_a_prompt_that_the_engine_changes_has_no_tokens_here(here: PromptTokenizer, field: str) -> None:
    assert (await here.of_completion({"prompt": "hello", field: "5"}, model="m", tenant="a")).unknown
    assert (await here.of_chat(CHAT | {field: 5}, size=1, model="m", tenant="a")).unknown


async def test_a_conversation_with_an_image_has_no_tokens(here: PromptTokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    request = {"messages": [{"role": "user", "content": [image]}]}
    found = await here.of_chat(request, size=1, model="m", tenant="a")
    assert (found.token_ids, "image_url" in found.unknown) == (b"", True)
    asking = PromptTokenizer({}, never)
    assert (await asking.of_chat(request, size=1, model="m", tenant="a")).unknown


async def test_without_a_tokenizer_the_engine_is_asked_what_the_client_asked() -> None:
    asked = []

    async def ask(body: Mapping[str, Any], tenant: str) -> bytes:
        asked.append((dict(body), tenant))
        return array("I", [1, 2]).tobytes()

    tokens = PromptTokenizer({}, ask)
    request = CHAT | {"stream": True, "max_tokens": 4, "reasoning_effort": "low"}
    found = await tokens.of_chat(request, size=1, model="m", tenant="a")
    assert (ids(found.token_ids), found.tokenized_here) == ([1, 2], False)
    assert (await tokens.of_completion({"prompt": 5}, model="m", tenant="a")).unknown
    await tokens.of_completion({"model": "m", "prompt": "text"}, model="m", tenant="a")
    variables = {"reasoning_effort": "low", "enable_thinking": True}
    assert asked == [
        ({**CHAT, "add_generation_prompt": True, "chat_template_kwargs": variables}, "a"),
        ({"model": "m", "prompt": "text", "add_special_tokens": True}, "a"),
    ]


async def test_without_either_there_are_no_tokens_and_a_reason() -> None:
    found = await PromptTokenizer({}, None).of_completion({"prompt": "text"}, model="m", tenant="a")
    assert (found.token_ids, found.unknown) == (b"", "tokenizer: there is no tokenizer of model 'm'")


class Engine:
    """Answers /tokenize as it is told, and counts."""

    def __init__(self) -> None:
        self.status, self.page, self.asked = 200, b'{"tokens": [5, 6]}', 0
        self.hang = False

    async def handle(self, call: HttpCall) -> None:
        self.asked += 1
        assert call.path == "/tokenize"
        assert ("X-Key", "k") in call.headers
        assert json.loads(await call.body())["prompt"]
        if self.hang:
            await call.start(200, ())
            await call.write(b"{")
            return
        await call.respond(self.status, (), self.page)


async def asking(engine: Engine, **options: Any) -> tuple[EngineTokenize, Any, Any]:
    server, http = serve_http(engine.handle), connect()
    url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    settings = {"timeout_seconds": 5.0, "connect_seconds": 5.0, "cache_bytes": 1 << 16, **options}
    return EngineTokenize(http, lambda *_: Tokenizing(url, (("X-Key", "k"),)), **settings), server, http


async def test_an_engine_tells_tokens_and_is_asked_once_for_one_prompt() -> None:
    engine = Engine()
    ask, server, http = await asking(engine)
    for _ in range(3):
        assert ids(await ask({"prompt": "x"}, "a")) == [5, 6]
    assert engine.asked == 1
    assert ids(await ask({"prompt": "x"}, "b")) == [5, 6]
    assert engine.asked == 2
    await http.close()
    await server.stop(0)


@pytest.mark.parametrize(
    "page", [b"", b"[]", b"{}", b'{"tokens": 5}', b'{"tokens": [-1]}', b'{"tokens": ["a"]}', b"[" * 9999]
)
async def test_an_engine_that_answers_nonsense_is_left_alone_for_a_while(page: bytes) -> None:
    engine, now = Engine(), [0.0]
    engine.page = page
    ask, server, http = await asking(engine, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(Unavailable):
            await ask({"prompt": "x"}, "a")
    assert engine.asked == 1
    now[0] += engine_tokenize.REST_SECONDS + 1
    engine.page = b'{"tokens": [7]}'
    assert ids(await ask({"prompt": "x"}, "a")) == [7]
    await http.close()
    await server.stop(0)


async def test_a_prompt_that_an_engine_refuses_costs_no_other_prompt_its_tokens() -> None:
    engine = Engine()
    engine.status = 400
    ask, server, http = await asking(engine)
    with pytest.raises(InvalidArgument):
        await ask({"prompt": "x"}, "a")
    engine.status = 200
    assert ids(await ask({"prompt": "y"}, "a")) == [5, 6]
    await http.close()
    await server.stop(0)


async def test_an_engine_that_is_slow_or_gone_is_not_waited_for() -> None:
    engine = Engine()
    ask, server, http = await asking(engine, timeout_seconds=0.05)
    engine.hang = True
    with pytest.raises(Unavailable, match=r"50 ms|does not tokenize"):
        await ask({"prompt": "x"}, "a")
    await server.stop(0)
    nobody = EngineTokenize(http, lambda *_: None, timeout_seconds=1, connect_seconds=1, cache_bytes=1)
    with pytest.raises(Unavailable, match="no engine"):
        await nobody({"prompt": "x"}, "a")
    await http.close()


async def test_half_of_a_surrogate_pair_reaches_no_engine() -> None:
    ask, server, http = await asking(Engine())
    with pytest.raises((Unavailable, InvalidArgument)):
        await ask({"prompt": "a\ud800"}, "a")
    await http.close()
    await server.stop(0)


def test_parity_counts_what_it_compares_and_names_the_models_that_differ() -> None:
    registry = CollectorRegistry()
    check = ParityCheck(registry, every=4)
    assert [check.due() for _ in range(9)] == [True, False, False, False, True, False, False, False, True]

    def counted(outcome: str) -> float | None:
        return registry.get_sample_value("kvscout_token_parity_total", {"outcome": outcome})

    ours, theirs = array("I", range(100)), array("I", [*range(60), 7, *range(61, 90)])
    check.lengths("a", "m", 100, 100)
    check.lengths("a", "n", 100, 99)
    check.tokens("a", "m", ours.tobytes(), theirs.tobytes())
    assert [counted(o) for o in ("match", "mismatch", "length_match", "length_mismatch")] == [None, 1, 1, 1]
    assert len(check.warnings()) == 2
    assert any("from token 60 of 100 here, 90 in the engine" in text_of(line) for line in check.warnings())
    check.tokens("a", "m", ours.tobytes(), ours.tobytes())
    assert len(check.warnings()) == 1


def test_without_the_extra_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "jinja2" not in sys.modules["kvscout_gateway.tokens.prompt_tokens"].__dict__
    assert "tokenizers" not in sys.modules["kvscout_gateway.tokens.tokenizer"].__dict__
