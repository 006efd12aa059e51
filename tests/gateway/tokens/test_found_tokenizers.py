"""Tokenizers are found where engines on this machine have them, and dropped if engines count other tokens."""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from pathlib import Path

import pytest
from aiohttp import web
from support.openai_stack import CHAT, engine, front, spec
from support.processes import eventually
from support.trained_tokenizers import byte_level, save

from kvscout_common.errors import ConfigError
from kvscout_gateway.tokens import found_tokenizers
from kvscout_gateway.tokens.found_tokenizers import (
    MAX_MISMATCHES,
    MAX_MODELS,
    FoundTokenizers,
    first_folder,
    model_folder,
)
from kvscout_gateway.tokens.rendered import read_tokenized
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

TENANT = "default"


def load(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder, Threads(), cache_bytes=1 << 20, flag="tokenizer")


async def nowhere(tenant: str, model: str) -> str:
    return ""


async def _over(found: FoundTokenizers) -> bool:
    return not found._searches


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of Hugging Face's libraries."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, model: str, revision: str = "abc", *, main: bool = True) -> Path:
    folder = cache / f"models--{model.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    save(folder, byte_level())
    if main:
        refs = folder.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text(revision)
    return folder


def test_a_model_is_found_by_its_name_in_the_cache_or_as_a_folder(cache: Path) -> None:
    folder = cached(cache, "org/model")
    cached(cache, "org/model", "zzz", main=False)
    assert first_folder("org/model") == folder
    assert first_folder(str(folder)) == folder
    assert first_folder("org/other") is None


@pytest.mark.parametrize("name", ["", "..", "../org/model", "org/../model", "a/b/c", "\0", "/\0", "org/model\n", "/"])
def test_a_name_that_is_no_models_reads_nothing_else(cache: Path, name: str) -> None:
    cached(cache, "org/model")
    assert first_folder(name) is None


@pytest.mark.parametrize(
    ("page", "folder"),
    [
        (b'{"data": [{"id": "x", "root": "/x"}, {"id": "m", "root": "/models/m"}]}', "/models/m"),
        (b'{"model_path": "/models/m", "is_generation": true}', "/models/m"),
        (b'{"model_path": "/models/m", "tokenizer_path": "/tokenizers/m"}', "/tokenizers/m"),
        (b'{"data": [{"id": "x", "root": "/x"}]}', ""),
        (b'{"data": [3]}', ""),
        (b'{"data": [{"id": "m", "root": 3}]}', ""),
        (b"[]", ""),
        (b"", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_an_engines_page_names_its_folder_or_none(page: bytes, folder: str) -> None:
    assert model_folder(page, "m") == folder


async def test_no_request_waits_for_a_search(cache: Path) -> None:
    cached(cache, "org/model")
    found = FoundTokenizers(load, nowhere)
    assert found.get(TENANT, "org/model") is None
    await eventually(lambda: found.get(TENANT, "org/model") is not None, what="the tokenizer found")
    await found.close()


async def test_what_keeps_counting_other_tokens_than_engines_is_dropped_for_good(cache: Path) -> None:
    cached(cache, "m")
    found = FoundTokenizers(load, nowhere)
    await eventually(lambda: found.get(TENANT, "m") is not None, what="the tokenizer found")
    for _ in range(MAX_MISMATCHES - 1):
        found.judge("m", False)
    found.judge("m", True)
    for _ in range(MAX_MISMATCHES - 1):
        found.judge("m", False)
    assert found.get(TENANT, "m") is not None
    found.judge("m", False)
    found.judge("m", False)  # of a request that was still running
    await eventually(lambda: _over(found), what="the first search over")
    assert found.get(TENANT, "m") is None
    assert not found._searches
    await found.close()


async def test_models_are_searched_for_so_many_and_so_often(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FoundTokenizers(load, nowhere)
    for number in range(MAX_MODELS + 10):
        found.get(TENANT, f"m{number}")
    assert len(found._searches) == MAX_MODELS

    await eventually(lambda: _over(found), what="the searches over")
    found.get(TENANT, "m0")
    assert not found._searches
    monkeypatch.setattr(found_tokenizers, "AGAIN_SECONDS", 0.0)
    found.get(TENANT, "m0")
    assert len(found._searches) == 1
    await found.close()
    assert not found._searches


async def test_a_folder_that_cannot_be_read_leaves_the_engine_to_be_asked(cache: Path) -> None:
    (cached(cache, "m") / "tokenizer.json").write_text("{")
    found = FoundTokenizers(load, nowhere)
    found.get(TENANT, "m")
    await eventually(lambda: _over(found), what="the search over")
    assert found.get(TENANT, "m") is None


def test_without_the_libraries_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="tokenizer"):
        found_tokenizers.require_libraries("tokenizer")


@pytest.mark.parametrize("path", ["/v1/models", "/get_model_info"])
async def test_a_gateway_finds_the_folder_that_its_engine_serves(cache: Path, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    save(folder, byte_level())
    pages = {
        "/v1/models": {"data": [{"id": "m", "root": str(folder)}]},
        "/get_model_info": {"model_path": str(folder)},
    }
    tokens = byte_level().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n").ids

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"tokens": tokens})
        if request.path in pages:
            return web.json_response(pages[path] if request.path == path else {})
        return web.json_response({"choices": [], "usage": {"prompt_tokens": len(tokens)}})

    async with engine(script) as one, front(spec("w", one.url), finds_tokenizers=True) as served:

        def asked() -> list[str]:
            return [received.target for received in one.received]

        numbers = itertools.count()

        async def found() -> bool:
            one.received.clear()
            # Otherwise equal to the one before, its tokens would be those that the engine told then.
            await served.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"n": next(numbers)}})
            return asked()[:1] == ["/v1/chat/completions"]

        await eventually(found, what="prompts tokenized here")

        async def counted() -> bool:
            return served.sample("kvscout_token_parity_total", outcome="length_match") is not None

        await eventually(counted, what="the engine's count compared")
        assert served.sample("kvscout_token_parity_total", outcome="length_mismatch") is None


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        (b'{"count":2,"tokens":[7,8],"token_strs":null}', [7, 8]),
        (b'{"count": 2, "tokens": [7, 8]}', [7, 8]),
        (b'{"tokens" : [7, 8]}', [7, 8]),
        (b'{"tokens": []}', []),
        (json.dumps({"tokens": list(range(1000))}).encode(), list(range(1000))),
    ],
)
def test_tokens_of_an_engine_are_read_however_it_writes_them(page: bytes, tokens: list[int]) -> None:
    assert array("I", read_tokenized(page).token_ids).tolist() == tokens
