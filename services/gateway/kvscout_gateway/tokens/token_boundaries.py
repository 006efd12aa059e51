"""Positions at which a text can be cut so that its chunks, tokenized alone, give the tokens of the whole. Pure.

A tokenizer takes its *added tokens* out of a text before it does anything else: leftmost first, the longest of those
that begin at one place. What lies between two of them is normalized, split and encoded by itself. So a text can be cut
in front of an added token, if

* it is matched in the text as it is (`normalized` is false): others are looked for inside of what lies between;
* it eats no white space to its left (`lstrip`), and begins with none that one before it might eat (`rstrip`);
* no added token asks for a boundary of words beside it (`single_word`): a cut would be one.

Every match in front of the cut ends there at the latest, and a search that begins at the cut finds what one finds that
comes from the left. Each chunk but the first begins with an added token: none of its words is the first of a text,
which some tokenizers encode in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MIN_CHUNK_CHARACTERS = 64
"""A chunk is at least so long, but for the last: those of a few characters would cost more to keep than to encode."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One of a tokenizer's added tokens."""

    content: str
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class TokenBoundaries:
    """The rule for one tokenizer."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        """Prepares the search.

        Args:
            added: All that the tokenizer has.
        """
        raw = [token for token in added if token.content and not token.normalized]
        cuttable = [] if any(token.single_word for token in raw) else raw
        self._token_boundaries = frozenset(t.content for t in cuttable if not t.lstrip and not t.content[0].isspace())
        # The first alternative that fits is taken, hence the longest first.
        longest_first = sorted({token.content for token in raw}, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, longest_first))) if self._token_boundaries else None

    def cut(self, text: str) -> list[str]:
        """Return the chunks of a text, in order; the text itself where it has no boundary. A longer text has the same
        ones up to the last one before they differ."""
        if self._search is None:
            return [text] if text else []
        chunks, begin = [], 0
        for match in self._search.finditer(text):
            at = match.start()
            if at - begin >= MIN_CHUNK_CHARACTERS and match[0] in self._token_boundaries:
                chunks.append(text[begin:at])
                begin = at
        if begin < len(text):
            chunks.append(text[begin:])
        return chunks
