"""Where the tokens of a prompt come from: the request, or the first source that has them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.trained_tokenizers import byte_level, byte_level_prefixed, save

from kvscout_common.errors import InvalidArgument, KvscoutError, Unavailable
from kvscout_common.hashing import MmItem
from kvscout_common.http.json_fields import Prompts
from kvscout_gateway.tokens.conversation import NotOnlyText, NotText
from kvscout_gateway.tokens.local_source import LocalSource
from kvscout_gateway.tokens.parity import AGAIN_SECONDS, MAX_MISMATCHES, ParityCheck
from kvscout_gateway.tokens.prompt_tokens import PromptTokenizer
from kvscout_gateway.tokens.source import Found, SourceName, TokenRequest, TokenSource
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def ids(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


class Scripted:
    """A source that answers as it is told, and counts."""

    def __init__(self, name: SourceName, answer: Found | Exception | None, beginning: Found | None = None) -> None:
        self.name, self.answer, self.beginning = name, answer, beginning
        self.asked: list[TokenRequest] = []

    async def find(self, wanted: TokenRequest) -> Found | None:
        self.asked.append(wanted)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def find_beginning(self, wanted: TokenRequest) -> Found | None:
        return self.beginning


def of(*sources: TokenSource, clock: Callable[[], float] = lambda: 0.0, every: int = 1 << 30) -> PromptTokenizer:
    return PromptTokenizer(sources, ParityCheck(CollectorRegistry(), every=every, clock=clock), remote_seconds=1.0)


@pytest.fixture
def here(tmp_path: Path) -> PromptTokenizer:
    def load(name: str, build: Any) -> TextTokenizer:
        return TextTokenizer.load(save(tmp_path / name, build()), Threads(), cache_bytes=1 << 16, flag="tokenizer")

    own, others = load("own", byte_level_prefixed), load("any", byte_level)
    return of(LocalSource(SourceName.TOKENIZER, lambda _, model: own if model == "own" else others))


async def test_tokens_of_the_request_are_taken_as_they_are(here: PromptTokenizer) -> None:
    for prompt in ([1, 2, 3], Prompts(packed(1, 2, 3), 1, 0), packed(1, 2, 3)):
        found = await here.of_completion({"prompt": prompt}, model="m", tenant="a")
        assert (ids(found.token_ids), found.token_class, found.further_tokens) == ([1, 2, 3], None, 0)
        assert found.own_tokens == 3


async def test_of_several_prompts_the_first_is_taken_and_the_others_are_counted(here: PromptTokenizer) -> None:
    found = await here.of_completion({"prompt": Prompts(packed(1), 3, 12)}, model="m", tenant="a")
    assert (ids(found.token_ids), found.further_tokens) == ([1], 3)
    found = await here.of_completion({"prompt": Prompts("hello", 3, 101)}, model="m", tenant="a")
    assert (ids(found.token_ids), found.further_tokens) == (byte_level().encode("hello").ids, 25)
    assert found.token_class is None  # not all that the engine counts
    assert (await here.of_completion({"prompt": Prompts("a", 9, 8)}, model="m", tenant="a")).further_tokens == 8


async def test_a_model_has_its_own_tokenizer_or_that_of_all(here: PromptTokenizer) -> None:
    for model, build in (("m", byte_level), ("own", byte_level_prefixed)):
        found = await here.of_completion({"prompt": "hello dog"}, model=model, tenant="a")
        assert ids(found.token_ids) == build().encode("hello dog").ids
        assert found.token_class == ("a", model, "completions", False, "tokenizer")
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


async def test_a_source_that_cannot_tell_gives_way_to_the_next() -> None:
    item = MmItem("x", 0, 1)
    for first in (None, NotText("no"), Unavailable("gone"), TimeoutError()):
        next_ = Scripted(SourceName.RENDERER, Found(packed(5), (item,)))
        found = await of(Scripted(SourceName.TOKENIZER, first), next_).of_chat(
            CHAT | {"tools": []}, size=1, model="m", tenant="a", dialect="messages"
        )
        assert (ids(found.token_ids), found.mm_items) == ([5], (item,))
        assert found.token_class == ("a", "m", "messages", True, "renderer")
        assert next_.asked[0].dialect == "messages"


async def test_engines_that_cannot_be_asked_now_are_not_asked_twice_for_one_request() -> None:
    failures = {Unavailable("gone"): 0, TimeoutError(): 0, NotText("no"): 1, InvalidArgument("bad"): 1}
    for error, asked in failures.items():
        second = Scripted(SourceName.ENGINE_RENDER, Found(packed(5)))
        await of(Scripted(SourceName.ENGINE_TOKENIZE, error), second).of_chat(CHAT, size=1, model="m", tenant="a")
        assert len(second.asked) == asked


async def test_without_any_source_there_are_no_tokens_and_the_first_reason() -> None:
    found = await of().of_completion({"prompt": "text"}, model="m", tenant="a")
    assert (found.token_ids, found.unknown) == (b"", "tokenizer: there is no tokenizer of model 'm'")
    failing = (Scripted(SourceName.TOKENIZER, NotText("one")), Scripted(SourceName.RENDERER, Unavailable("two")))
    found = await of(*failing).of_chat(CHAT, size=1, model="m", tenant="a")
    assert (found.unknown, found.partial) == ("tokenizer: one", "")


async def test_a_conversation_with_an_image_is_placed_by_the_text_before_it() -> None:
    first = Scripted(SourceName.TOKENIZER, NotOnlyText("an image"), Found(packed(1, 2), further_tokens=600))
    found = await of(first).of_chat(CHAT, size=1, model="m", tenant="a")
    assert (ids(found.token_ids), found.partial, found.unknown) == ([1, 2], "tokenizer: an image", "")
    assert (found.own_tokens, found.isl_tokens, found.token_class) == (2, 602, None)
    exact = Scripted(SourceName.RENDERER, Found(packed(1, 2, 3)))
    found = await of(first, exact).of_chat(CHAT, size=1, model="m", tenant="a")
    assert (ids(found.token_ids), found.partial) == ([1, 2, 3], "")
    first.beginning = None
    assert (await of(first).of_chat(CHAT, size=1, model="m", tenant="a")).unknown == "tokenizer: an image"


async def test_a_class_whose_tokens_differ_gets_them_elsewhere_until_it_is_tried_again() -> None:
    now = [0.0]
    wrong, right = Scripted(SourceName.TOKENIZER, Found(packed(1))), Scripted(SourceName.RENDERER, Found(packed(7)))
    parity = ParityCheck(CollectorRegistry(), clock=lambda: now[0])
    tokens = PromptTokenizer((wrong, right), parity, remote_seconds=1.0)

    async def source(**more: Any) -> str:
        found = await tokens.of_chat(CHAT | more, size=1, model="m", tenant="a")
        assert found.token_class is not None
        parity.lengths(found.token_class, len(found.token_ids) // 4 + (found.token_class.source == "tokenizer"), 1)
        return found.token_class.source

    assert [await source() for _ in range(MAX_MISMATCHES + 2)] == ["tokenizer"] * MAX_MISMATCHES + ["renderer"] * 2
    assert await source(tools=[1]) == "tokenizer"  # another class
    now[0] += AGAIN_SECONDS + 1
    assert [await source(), await source()] == ["tokenizer", "renderer"]
    right.answer = KvscoutError("gone")
    assert await source() == "tokenizer"  # better than none


async def test_one_request_in_many_is_compared_token_by_token() -> None:
    tokens = of(Scripted(SourceName.TOKENIZER, Found(packed(1))), every=2)
    compared = [(await tokens.of_chat(CHAT, size=1, model="m", tenant="a")).wanted is not None for _ in range(4)]
    assert compared == [True, False, True, False]
    engines = of(Scripted(SourceName.ENGINE_TOKENIZE, Found(packed(1))), every=1)
    assert (await engines.of_chat(CHAT, size=1, model="m", tenant="a")).wanted is None  # with itself


def test_without_the_extra_nothing_of_it_is_imported() -> None:
    assert "jinja2" not in sys.modules["kvscout_gateway.tokens.prompt_tokens"].__dict__
    assert "tokenizers" not in sys.modules["kvscout_gateway.tokens.tokenizer"].__dict__


@pytest.mark.parametrize(
    ("error", "is_late"),
    [
        (TimeoutError(), True),
        (Unavailable("it did not tokenize within 50 ms"), True),
        (NotText("not known here"), False),
        (InvalidArgument("no prompt"), False),
    ],
)
async def test_a_source_that_is_late_is_counted_where_no_other_has_the_tokens(error: Exception, is_late: bool) -> None:
    late, none = Scripted(SourceName.RENDERER, error), Scripted(SourceName.ENGINE_TOKENIZE, None)
    registry = CollectorRegistry()
    alone = of(late, none)
    registry.register(alone)
    for _ in range(2):
        assert (await alone.of_chat(CHAT, size=9, model="m", tenant="a")).unknown
    labels = {"source": "renderer", "tenant": "a", "model": "m"}
    assert registry.get_sample_value("kvscout_late_tokens_total", labels) == (2 if is_late else None)
    relieved = of(late, Scripted(SourceName.ENGINE_TOKENIZE, Found(packed(1, 2))))
    assert not (await relieved.of_chat(CHAT, size=9, model="m", tenant="a")).unknown
    assert not relieved.late.total
