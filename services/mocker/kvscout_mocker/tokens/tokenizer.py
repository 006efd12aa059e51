"""A deterministic tokenizer without a vocabulary file: one word, one token.

The word `w17` is token 17, any other word the XXH3_64 of its letters, so that generated text (words of the
form `w17`) comes back as the very tokens that were generated.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import xxhash

RESERVED_TOKENS = 8
"""Ids below are special (padding, end of sequence, role marks): never generated, never a word's hash."""
_MARKS = {
    "<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3,
    "<|user|>": 4, "<|assistant|>": 5, "<|system|>": 6, "<|end|>": 7,
}  # fmt: skip
_NUMBERED = re.compile(r"w(0|[1-9][0-9]{0,9})")


class WordTokenizer:
    """Words to ids below `vocab_size` and back."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> array[int]:
        """Return the token ids of the words of a text, in order."""
        return array("I", [self._id(word) for word in text.split()])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the words of generated tokens, each with a space before it, so that deltas can be concatenated."""
        return "".join(f" w{token}" for token in tokens)

    def encode_chat(
        self, messages: Iterable[tuple[str, str]], *, add_generation_prompt: bool = True, continue_final: bool = False
    ) -> array[int]:
        """Return the token ids of a conversation.

        Args:
            messages: Role and content of each message.
            add_generation_prompt: End with the mark that opens the assistant's turn.
            continue_final: The last message goes on: no mark follows it.
        """
        text = "".join(f"<|{role}|> {content} <|end|> " for role, content in messages)
        if continue_final:
            return self.encode(text.removesuffix("<|end|> "))
        return self.encode(text + "<|assistant|>" if add_generation_prompt else text)

    def _id(self, word: str) -> int:
        mark = _MARKS.get(word)
        if mark is not None:
            return mark
        numbered = _NUMBERED.fullmatch(word)
        if numbered is not None and RESERVED_TOKENS <= (token := int(numbered[1])) < self._vocab_size:
            return token
        return RESERVED_TOKENS + xxhash.xxh3_64_intdigest(word.encode()) % (self._vocab_size - RESERVED_TOKENS)
