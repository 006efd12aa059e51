"""Values of the API's enums as words: `HELPER_KIND_INDEXER` ↔ "indexer", `…_NOT_ALLOWED` ↔ "not allowed"."""

from __future__ import annotations

import re
from typing import Any


def word_of(kind: Any, number: int) -> str:
    """Return the word of a value; "" = it is unspecified, or of a later release.

    Args:
        kind: The enum, such as `gateway_pb2.HelperKind`.
        number: Of the value.
    """
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return value.name.removeprefix(_prefix(kind)).replace("_", " ").lower() if value is not None and number else ""


def value_of(kind: Any, word: str) -> Any:
    """Return the value of a word; "" = unspecified.

    Raises:
        ValueError: The enum has none of that word.
    """
    return kind.Value(_prefix(kind) + (word.replace(" ", "_").upper() or "UNSPECIFIED"))


def _prefix(kind: Any) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.DESCRIPTOR.name).upper() + "_"
