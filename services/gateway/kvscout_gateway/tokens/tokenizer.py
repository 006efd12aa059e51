"""A model's tokenizer on this machine (`tokenizer.json`), by the library `tokenizers`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_gateway.tokens.token_boundaries import AddedToken, TokenBoundaries

# Read by the library with every call. A gateway has its cores for requests beside one another, and a pool of threads
# that each long prompt wakes would take them all.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PROBES = ("a", "The quick brown fox, 1984.")


class Frame(NamedTuple):
    """The special tokens that a tokenizer puts around a text, u32 each."""

    head: bytes
    tail: bytes


class LocalTokenizer:
    """Text to token ids. Can be used from any thread; keeps nothing of what it is given."""

    def __init__(self, tokenizer: Any) -> None:
        """Take over a tokenizer.

        Args:
            tokenizer: Of the library `tokenizers`; its truncation and padding are turned off.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.added = tuple(
            AddedToken(token.content, token.normalized, token.lstrip, token.rstrip, token.single_word)
            for token in tokenizer.get_added_tokens_decoder().values()
        )
        self.token_boundaries = TokenBoundaries(self.added)
        self.frame = self._find_frame()
        """None = what is added around a text depends on it: it can be tokenized as a whole only."""

    @classmethod
    def load(cls, folder: Path, *, flag: str) -> LocalTokenizer:
        """Read `tokenizer.json` of a folder.

        Raises:
            ConfigError: It is not there or not a tokenizer, or the library is not installed; names the flag.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError("needs the extra 'text': pip install 'kvscout[text]'", field=flag) from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist", field=flag)
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}", field=flag) from error

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[bytes]:
        """Return the token ids of each text, u32 each; other threads run meanwhile.

        Raises:
            ValueError: A text is none: half of a surrogate pair is in it.
        """
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"no text: {error}") from error
        return [array("I", one.ids).tobytes() for one in encoded]

    def _find_frame(self) -> Frame | None:
        frames = set()
        for bare, framed in zip(self.encode(_PROBES), self.encode(_PROBES, add_special_tokens=True), strict=True):
            at = framed.find(bare)
            while at % 4 > 0:
                at = framed.find(bare, at + 1)
            if at < 0:
                return None
            frames.add(Frame(framed[:at], framed[at + len(bare) :]))
        return frames.pop() if len(frames) == 1 else None
