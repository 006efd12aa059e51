"""Tokens of conversations here are those that a real vLLM had.

`recorded.json` and `images.json` of `data/vllm_tokens` were made by `tests/real_vllm_tokens.py` with vLLM 0.32.0: the
render endpoints of `vllm launch render`, a row for each conversation and template.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from support.vllm_renderer import DATA, IMAGES, RECORDED, VISION_TEMPLATE, make_model

from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.rendered import read_rendered
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

TEMPLATES = sorted(path.stem for path in DATA.glob("*.jinja"))


@pytest.mark.parametrize("template", TEMPLATES)
async def test_conversations_have_the_tokens_that_vllm_renders(template: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", template)
    tokenizer = TextTokenizer.load(tmp_path / "model", Threads(), cache_bytes=1 << 20, flag="tokenizer")
    rows = [row for row in json.loads(RECORDED.read_text()) if row["template"] == template]
    assert len(rows) >= 40
    differing = []
    for row in rows:
        found = await tokenizer.of_conversation(row["request"], size=1, tenant="a", dialect=row["dialect"])
        if array("I", found.token_ids).tolist() != row["token_ids"]:
            differing.append(row["name"])
    assert not differing
    assert {row["dialect"] for row in rows} == {"chat", "messages", "responses"}


async def test_an_images_text_before_it_has_the_first_tokens_that_vllm_renders(tmp_path: Path) -> None:
    make_model(tmp_path / "model", VISION_TEMPLATE)
    tokenizer = TextTokenizer.load(tmp_path / "model", Threads(), cache_bytes=1 << 20, flag="tokenizer")
    rows = json.loads(IMAGES.read_text())
    assert {row["dialect"] for row in rows} == {"chat", "messages", "responses"}
    for row in rows:
        found = await tokenizer.before_media(
            row["request"], size=1, tenant="a", engine=EngineKind.VLLM, dialect=row["dialect"]
        )
        begin = array("I", found.token_ids).tolist()
        assert begin == row["token_ids"][: len(begin)]
        first = min(place["offset"] for place in row["features"]["mm_placeholders"]["image"])
        assert first - 3 <= len(begin) <= first  # a token that begins an image, and one that may become another


def test_images_are_where_vllm_renders_them_and_the_same_image_is_the_same_item() -> None:
    rows = {row["name"]: row for row in json.loads(IMAGES.read_text())}
    items = {name: read_rendered(json.dumps(row).encode()).mm_items for name, row in rows.items()}
    [image] = items["chat: one"]
    assert image.length > 1
    assert items["messages: one"] == items["responses: one"] == (image,)
    assert [item.id for item in items["chat: the same twice"]] == [image.id, image.id]
    other = items["chat: two turns"][1]
    assert other.id != image.id
    pad = rows["chat: one"]["token_ids"][image.offset]
    for name, row in rows.items():
        for item in items[name]:
            assert set(row["token_ids"][item.offset : item.offset + item.length]) == {pad}
