"""Conversations cost their new part only; what is long leaves the event loop; each tenant's chunks are its own."""

from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest
from support.processes import eventually
from support.trained_tokenizers import BUILDS, byte_level, byte_level_prefixed, save

from kvscout_common.errors import ConfigError, ResourceExhausted
from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens import threads as threads_module
from kvscout_gateway.tokens.chunk_cache import ChunkCache
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.sglang_conversation import SglangRelease
from kvscout_gateway.tokens.text_tokenizer import INLINE_RENDERED, TextTokenizer
from kvscout_gateway.tokens.threads import Threads

LINE = "The quick brown fox jumps over the lazy dog. "


def loaded(folder: Path, build: Any = byte_level, *, cache_bytes: int = 1 << 20) -> TextTokenizer:
    return TextTokenizer.load(save(folder, build()), Threads(), cache_bytes=cache_bytes, flag="tokenizer")


def turns(count: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} {LINE * 5}"} for n in range(count)]


async def test_a_conversation_has_the_tokens_of_its_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns(5)) + "<|im_start|>assistant\n"
    expected = byte_level().encode(text, add_special_tokens=False).ids
    for _ in range(2):
        tokens, *_ = await tokenizer.of_conversation({"messages": turns(5)}, size=1, tenant="a")
        assert array("I", tokens).tolist() == expected


async def test_the_next_turn_of_a_conversation_costs_its_new_part_only(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    await tokenizer.of_conversation({"messages": turns(9)}, size=1, tenant="a")
    before = tokenizer.cache.misses
    await tokenizer.of_conversation({"messages": turns(11)}, size=1, tenant="a")
    new = sum(len(m["content"]) + 40 for m in turns(11)[9:])
    assert 0 < tokenizer.cache.misses - before <= new


@pytest.mark.parametrize("build", ["byte level, prefixed", "metaspace, first", "word piece", "byte level"])
async def test_a_text_has_what_the_tokenizer_puts_around_it(tmp_path: Path, build: str) -> None:
    tokenizer = loaded(tmp_path, BUILDS[build])
    for text in ("", "a", LINE * 3, LINE * 30 + "<|im_end|>" + LINE * 30):
        tokens = await tokenizer.of_text(text, add_special_tokens=True, tenant="a")
        assert array("I", tokens).tolist() == BUILDS[build]().encode(text).ids


async def test_a_tokenizer_whose_frame_is_not_known_encodes_texts_as_a_whole(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, byte_level_prefixed)
    tokenizer._tokenizer.frame = None
    text = LINE * 60
    tokens = await tokenizer.of_text(text, add_special_tokens=True, tenant="a")
    assert array("I", tokens).tolist() == byte_level_prefixed().encode(text).ids


async def test_what_is_long_is_done_in_a_thread_and_what_is_short_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = loaded(tmp_path), []
    encode = tokenizer._tokenizer.encode

    def watched(*args: Any, **kwargs: Any) -> list[bytes]:
        seen.append(threading.current_thread() is threading.main_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer._tokenizer, "encode", watched)
    await tokenizer.of_text("short", add_special_tokens=False, tenant="a")
    await tokenizer.of_text(LINE * (INLINE_RENDERED // len(LINE) + 1), add_special_tokens=False, tenant="a")
    assert seen == [True, False]


async def test_chunks_are_cached_although_the_request_did_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, begun, go, calls = loaded(tmp_path), threading.Event(), threading.Event(), []
    encode = tokenizer._tokenizer.encode

    def slow(*args: Any, **kwargs: Any) -> list[bytes]:
        calls.append(args)
        begun.set()
        go.wait(10)
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer._tokenizer, "encode", slow)
    text = LINE * 100
    request = asyncio.create_task(tokenizer.of_text(text, add_special_tokens=False, tenant="a"))
    await asyncio.to_thread(begun.wait, 10)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    go.set()
    await eventually(lambda: tokenizer.cache.size > 0, what="a cached text")
    tokens = await tokenizer.of_text(text, add_special_tokens=False, tenant="a")
    assert array("I", tokens).tolist() == byte_level().encode(text, add_special_tokens=False).ids
    assert len(calls) == 1


async def test_texts_that_are_none_have_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded(tmp_path)
    with pytest.raises(NotText):
        await tokenizer.of_text("a\ud800", add_special_tokens=False, tenant="a")
    monkeypatch.setattr("kvscout_gateway.tokens.text_tokenizer.MAX_CHARACTERS", 10)
    with pytest.raises(NotText, match="more than 10"):
        await tokenizer.of_text("a" * 11, add_special_tokens=False, tenant="a")


async def test_a_model_without_a_template_has_no_conversations(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = TextTokenizer.load(tmp_path, Threads(), cache_bytes=1000, flag="tokenizer")
    with pytest.raises(NotText, match="no chat template"):
        await tokenizer.of_conversation({"messages": turns(1)}, size=1, tenant="a")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer: "):
        TextTokenizer.load(tmp_path, Threads(), cache_bytes=1, flag="tokenizer")


async def test_threads_refuse_what_would_wait_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "MAX_WAITING", 3)
    threads, go = Threads(), threading.Event()
    waiting = [asyncio.create_task(threads.run(go.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="limit"):
        await threads.run(go.wait)
    waiting[2].cancel()
    go.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await threads.run(lambda: 1) == 1
    threads.close()


def test_a_cache_keeps_each_tenant_within_its_bytes_and_apart() -> None:
    cache = ChunkCache(2_000)
    cache.put("a", "kept", b"1234")
    for number in range(100):
        cache.put("b", f"{number} " + "x" * 100, b"1" * 40)
        assert cache.get("a", "kept") == b"1234"
        assert cache.get("b", "kept") is None
    assert cache.size <= 4_000
    assert cache.get("b", "0 " + "x" * 100) is None
    assert cache.get("b", "99 " + "x" * 100) == b"1" * 40
    cache.put("b", "large", b"1" * 3_000)
    assert cache.get("b", "large") is None


def test_a_piece_that_was_used_stays_longer_and_one_that_is_put_again_counts_once() -> None:
    cache = ChunkCache(1_000)
    for _ in range(50):
        cache.put("a", "used", b"1234")
    size = cache.size
    assert 0 < size < 500
    for number in range(20):
        cache.get("a", "used")
        cache.put("a", f"{number} and more", b"1234")
    assert cache.get("a", "used") == b"1234"


def test_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_gateway.tokens.chunk_cache.MAX_TENANTS", 3)
    cache = ChunkCache(1_000)
    for tenant in "abcd":
        cache.put(tenant, "text", b"1234")
    assert [cache.get(tenant, "text") for tenant in "abcd"] == [None, b"1234", b"1234", b"1234"]


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": {"a": 1}}}]


async def test_the_release_of_sglang_is_learned_from_how_many_tokens_its_engine_counts(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}")
    tokenizer = TextTokenizer.load(tmp_path, Threads(), cache_bytes=1 << 20, flag="tokenizer")
    request = {"messages": turns(1), "tools": TOOLS}
    rendered, lengths = [], []
    for _ in SglangRelease:
        found = await tokenizer.of_conversation(request, size=1, tenant="a", engine=EngineKind.SGLANG)
        rendered.append(byte_level().decode(array("I", found.token_ids).tolist()))
        lengths.append(len(found.token_ids))
        assert found.judge is not None
        found.judge(len(rendered) == len(SglangRelease))
        found.judge(False)  # of the same request, or of one that was rendered before: nothing changes
    assert len(set(lengths)) == len(SglangRelease)
    again = await tokenizer.of_conversation(request, size=1, tenant="a", engine=EngineKind.SGLANG)
    assert len(again.token_ids) == lengths[-1]


async def test_a_conversation_without_tools_teaches_nothing_of_the_release(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    found = await tokenizer.of_conversation({"messages": turns(1)}, size=1, tenant="a", engine=EngineKind.SGLANG)
    assert found.judge is None


@pytest.mark.parametrize("build", ["byte level", "byte level, prefixed"])
async def test_a_message_that_sglang_continues_has_its_tokens_behind_the_prompts(tmp_path: Path, build: str) -> None:
    tokenizer = loaded(tmp_path, BUILDS[build])
    request = {"messages": [*turns(1), {"role": "assistant", "content": "one two"}], "continue_final_message": True}
    found = await tokenizer.of_conversation(request, size=1, tenant="a", engine=EngineKind.SGLANG)
    prompt = f"<|im_start|>user\n{turns(1)[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    continued = [token for token in BUILDS[build]().encode("one two").ids if token != 0]
    expected = BUILDS[build]().encode(prompt, add_special_tokens=False).ids + continued
    assert array("I", found.token_ids).tolist() == expected


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize("engine", [EngineKind.VLLM, EngineKind.SGLANG])
async def test_of_a_conversation_with_images_the_tokens_before_the_first_are_known(
    tmp_path: Path, engine: EngineKind
) -> None:
    tokenizer = loaded(tmp_path)
    said = {"type": "text", "text": LINE * 3}
    messages = [*turns(3), {"role": "user", "content": [IMAGE, said, IMAGE]}, *turns(2)]
    found = await tokenizer.before_media({"messages": messages}, size=1, tenant="a", engine=engine, dialect="chat")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns(3)) + "<|im_start|>user\n"
    expected = byte_level().encode(text, add_special_tokens=False).ids
    assert array("I", found.token_ids).tolist() == expected[:-1]  # the last may become another
    assert found.further_tokens > 2 * 500


async def test_what_is_before_an_image_is_not_known_where_the_template_does_not_show_it(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path)
    for messages in (turns(2), [{"role": "user", "content": [IMAGE, {"type": "odd"}]}], None):
        with pytest.raises(NotText):
            await tokenizer.before_media(
                {"messages": messages}, size=1, tenant="a", engine=EngineKind.VLLM, dialect="chat"
            )
