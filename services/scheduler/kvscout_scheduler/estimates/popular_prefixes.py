"""Popular prefixes: how often prompts that begin alike come; pure.

A prompt begins with 256, 512, 1,024, … tokens with which others may begin, too. Of each such prefix it is counted how
many prompts had it lately: one that many had is going to be wanted again, on whatever worker has it. So who computes
a copy of it on another worker does so for many.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple
from zlib import crc32

from kvscout_scheduler.values.reservation import HASH_BYTES

FIRST_TOKENS: Final = 256
LAST_TOKENS: Final = 65_536
"""Tokens of the shortest and of the longest prefix that is counted."""
TOKENS_BITS: Final = LAST_TOKENS.bit_length()
HORIZON_SECONDS: Final = 20.0
"""For how long prompts are counted, about."""
LEAST_USES: Final = 1.0
"""Fewest uses of a prefix on each worker in that time for a copy to be worth anything."""
LEAST_PROMPTS: Final = 16.0
"""Fewest prompts with it in that time, however few workers there are: a conversation has fewer."""
MAX_PREFIXES: Final = 16_384
"""Those that were not seen for longest are forgotten."""


class PopularPrefix(NamedTuple):
    """The longest prefix of a prompt that is worth a copy."""

    tokens: float = 0.0
    """0 = none is."""
    discount: float = 0.0
    """Share of computing it that those pay who come later."""


NOTHING: Final = PopularPrefix()


class PopularPrefixes:
    """Popular prefixes of one pool."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Prompts that had a prefix, as of a time; by a checksum of its hashes, and its tokens."""

    def __len__(self) -> int:
        return len(self._seen)

    def of(self, block_hashes: bytes, block_size: int, now: float, workers: int, *, counts: bool) -> PopularPrefix:
        """Return the longest prefix of a prompt that is worth a copy.

        Args:
            block_hashes: Packed local hashes of its leading complete blocks.
            block_size: Tokens a block.
            now: On the scheduler's clock, in seconds.
            workers: Among whom its requests are shared out.
            counts: Whether this prompt is one more.
        """
        found, popular, known = NOTHING, True, self._seen
        least = max(LEAST_PROMPTS, LEAST_USES * workers)
        tokens, begin, checksum = FIRST_TOKENS, 0, 0
        while tokens <= LAST_TOKENS and (end := HASH_BYTES * (tokens // block_size)) <= len(block_hashes):
            checksum = crc32(block_hashes[begin:end], checksum)
            prefix = checksum << TOKENS_BITS | tokens
            before = known.get(prefix)
            if before is None:
                seen = 0.0
            else:
                seen, at = before
                seen *= HORIZON_SECONDS / (HORIZON_SECONDS + (now - at if now > at else 0.0))
            popular = popular and seen >= least
            if popular:
                found = PopularPrefix(tokens, 1.0 - workers / (workers + seen))
            elif not counts:
                break
            if counts:
                known[prefix] = (seen + 1.0, now)
                if before is not None:
                    known.move_to_end(prefix)
            begin, tokens = end, 2 * tokens
        while len(known) > MAX_PREFIXES:
            known.popitem(last=False)
        return found
