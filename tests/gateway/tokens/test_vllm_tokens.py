"""Tokens of conversations here are those that a real vLLM had.

`data/vllm_tokens/recorded.json` was made by `tests/real_vllm_tokens.py` with vLLM 0.32.0: the render endpoints of
`vllm launch render`, a row for each conversation and template.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from support.vllm_renderer import DATA, RECORDED, make_model

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
