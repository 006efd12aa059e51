"""Text from outside: what may be a name, and how any text is shown to people."""

from __future__ import annotations

from typing import Final

MAX_NAME_BYTES: Final = 256
SHOWN_CHARACTERS: Final = 200


def name_problem(text: str) -> str:
    """Return why a text can be nobody's name, as an end of a sentence; "" = it can."""
    if not text:
        return "must not be empty"
    return text_problem(text)


def text_problem(text: str) -> str:
    """Return why a text is none that is shown, sent and compared as it is; "" = it is."""
    # First: what cannot be encoded, such as half of a surrogate pair, is not printable.
    if not text.isprintable():
        return f"must be printable, not {printable(text)}"
    if len(text.encode()) > MAX_NAME_BYTES:
        return f"must have at most {MAX_NAME_BYTES} bytes"
    return ""


def printable(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return a text of about that many characters at most, none of which is a control character, a surrogate or
    invisible."""
    if len(text) > limit:
        text = f"{text[: limit * 3 // 4]} …({len(text):,} characters)… {text[-limit // 4 :]}"
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
