"""The tokens of conversations by a real vLLM, compared with those of this tree; `make real-vllm-tokens VENV=…` runs it.

Starts `vllm launch render` of VENV, on a CPU, once for each template of `tests/data/vllm_tokens`, and sends it the
conversations of `tests/support/conversations.py`. With `--record` it writes what vLLM said to `recorded.json`, which
the tests of every run compare with what this tree says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvscout_common.errors import KvscoutError
from kvscout_common.http.factory import connect
from kvscout_gateway.tokens.remote_source import render_call, tokenize_call
from kvscout_gateway.tokens.remote_tokens import RemoteTokens, Server
from kvscout_gateway.tokens.source import TokenRequest
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

sys.path.insert(0, str(Path(__file__).parent))
from support.conversations import conversations, conversations_with_images
from support.vllm_renderer import (
    DATA,
    IMAGES,
    MODEL,
    RECORDED,
    START_SECONDS,
    VISION_TEMPLATE,
    make_model,
    make_vision_model,
    rendered,
    renderer,
    sees_images,
)

CONTROL = ("im_start", "im_end", "header", "end_header", "turn", "vision_start", "vision_end", "image_pad", "video_pad")
SPECIAL = ["<pad>", "<s>", "</s>", *(f"<|{name}|>" for name in CONTROL)]


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer, trained on the conversations themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [json.dumps(one.request, ensure_ascii=False) for one in conversations(MODEL)]
    tokenizer.train_from_iterator([*texts, *(path.read_text() for path in sorted(DATA.glob("*.jinja")))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def record(venv: Path) -> list[dict[str, Any]]:
    """Return the conversations of text with what vLLM makes of them, by template."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for template in sorted(path.stem for path in DATA.glob("*.jinja")):
            folder = Path(scratch) / template
            make_model(folder, template)
            with renderer(venv, folder) as port:
                new = [{"template": template, **one._asdict(), **rendered(port, one)} for one in conversations(MODEL)]
                for call, result in asyncio.run(asked(port, new)).items():
                    print(f"{template}, asked at {call}: {dict(result)}")
            rows += new
    return rows


async def asked(port: int, rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many of them have the same tokens where a gateway asks for these, by what it asks."""
    http, server = connect(), Server(f"http://127.0.0.1:{port}")
    remote = RemoteTokens(http, connect_seconds=START_SECONDS, cache_bytes=1)
    results: dict[str, Counter[str]] = {}
    for name, call_of in (("the render endpoints", render_call), ("/tokenize", tokenize_call)):
        results[name] = Counter()
        for row in rows:
            wanted = TokenRequest(row["request"], row["dialect"], MODEL, "a", 1)
            try:
                tokens = array("I", (await remote.fetch(server, call_of(wanted))).token_ids).tolist()
                results[name]["same" if tokens == row.get("token_ids") else "different"] += 1
            except KvscoutError:
                results[name]["refused"] += 1
    await http.close()
    return results


def record_images(venv: Path) -> list[dict[str, Any]]:
    """Return the conversations with images, with what vLLM makes of them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "vision"
        make_vision_model(folder)
        with renderer(venv, folder) as port:
            return [
                {"template": VISION_TEMPLATE, **one._asdict(), **rendered(port, one)}
                for one in conversations_with_images(MODEL)
            ]


async def ours(rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens that this tree finds for each of them."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizers = {}
        for template in {row["template"] for row in rows}:
            make_model(Path(scratch) / template, template)
            folder = Path(scratch) / template
            tokenizers[template] = TextTokenizer.load(folder, Threads(), cache_bytes=1 << 20, flag="tokenizer")
        for row in rows:
            tokenizer = tokenizers[row["template"]]
            tokens = await tokenizer.of_conversation(row["request"], size=1, tenant="a", dialect=row["dialect"])
            found.append(array("I", tokens.token_ids).tolist())
    return found


def _places(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of a row with images is the same in each run: their hashes have the model's folder in them."""
    return row["name"], row["token_ids"], row["features"]["mm_placeholders"]


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what vLLM says, for the tests of every run")
    options = parser.parse_args()
    venv = Path(os.environ["VENV"])
    if not (DATA / "tokenizer.json").exists():
        make_tokenizer().save(str(DATA / "tokenizer.json"), pretty=False)
    rows, images = record(venv), record_images(venv) if sees_images(venv) else []
    refused = [row for row in (*rows, *images) if "refused" in row]
    for row in refused:
        print("refused:", row["template"], row["name"], row["says"])
    if refused:
        raise SystemExit(1)
    differing = [row for row, tokens in zip(rows, asyncio.run(ours(rows)), strict=True) if tokens != row["token_ids"]]
    print(f"{len(rows)} rendered by vLLM, {len(rows) - len(differing)} of them the same here")
    for row in differing:
        print("differs:", row["template"], row["name"])
    recorded = [_places(row) for row in json.loads(IMAGES.read_text())] if IMAGES.exists() else []
    print(f"{len(images)} with images, {sum(_places(row) in recorded for row in images)} of them as recorded")
    if options.record:
        for path, kept in ((RECORDED, rows), (IMAGES, images)):
            lines = ",\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in kept)
            path.write_text(f"[\n{lines}\n]\n")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
