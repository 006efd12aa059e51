"""Prompts of `kvscout bench gateway`: token ids, the same as text, and conversations of 100,000 tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

from kvscout_bench.strangers import VERSIONS, wheel_venv

TOKENS, LONG_TOKENS = 4_096, 100_000
PROMPTS, CONVERSATIONS = 64, 8
MESSAGES = 20
"""Messages of a conversation."""
MARK = "<META_START>"
"""The token before each message."""

Prompts = Callable[[int], bytes]
"""Number of a request → its prompt in JSON."""


def random_tokens(count: int, seed: int) -> Sequence[int]:
    """Return token ids below 2^15."""
    return Random(seed).choices(range(1 << 15), k=count)


@cache
def token_ids() -> list[Sequence[int]]:
    """Return the token ids of the prompts that are sent in rotation."""
    return [random_tokens(TOKENS, 1 + number) for number in range(PROMPTS)]


@cache
def short_prompts(*, as_text: bool = False) -> Prompts:
    """Return those prompts; as text for servers that take no token ids, of about as many bytes."""
    encoded = [json.dumps(" ".join(map(str, ids)) if as_text else ids).encode() for ids in token_ids()]
    return lambda number: encoded[number % PROMPTS]


@cache
def long_prompts() -> Prompts:
    """Return conversations that all prompts of a rotation continue: each with another message at its end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n")]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(paragraphs)]
    encoded = []
    for seed in range(CONVERSATIONS):
        random, text, tokens, messages = Random(seed), "", 0, 0
        while tokens < LONG_TOKENS:
            if tokens >= messages * LONG_TOKENS / MESSAGES:
                text, messages = text + MARK, messages + 1
            chosen = random.randrange(len(paragraphs))
            text, tokens = f"{text}{paragraphs[chosen]}\n", tokens + lengths[chosen]
        encoded.append(json.dumps(text).encode()[:-1])
    return lambda number: (
        b'%s%sQuestion %d: and why is that?"' % (encoded[number % CONVERSATIONS], MARK.encode(), number)
    )


@cache
def tokenizer_folder() -> Path:
    """Return a model's folder with a tokenizer. Errors as of `wheel_venv`."""
    environment = wheel_venv(VERSIONS["TOKENIZER"], "--no-deps").parent.parent
    [tokenizer] = environment.glob("lib/python*/site-packages/anthropic/tokenizer.json")
    folder = environment / "model"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
