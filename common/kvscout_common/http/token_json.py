"""Token ids as JSON has them, a list of numbers, without an object for each: packed they are little-endian u32.

The work is done by the extension or, where that is not built, by `token_json_reference`, with equal results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscout_common.hashing import native_available

if TYPE_CHECKING or not native_available():
    from kvscout_common.http import token_json_reference as _backend
else:
    import kvscout_native as _backend


def write_tokens(token_ids: bytes) -> bytes:
    """Write token ids as JSON, without the brackets of the list.

    Args:
        token_ids: Packed.
    """
    return _backend.write_tokens(token_ids)


def read_tokens(text: str, at: int) -> tuple[bytes, int] | None:
    """Read a list of token ids from a text.

    Args:
        text: ASCII.
        at: The place of the list's bracket.

    Returns:
        The token ids, packed, and the place behind the list; None = there is none, or something else is in it than
        numbers of 32 bits that have neither sign nor fraction nor exponent.
    """
    return _backend.read_tokens(text, at)
