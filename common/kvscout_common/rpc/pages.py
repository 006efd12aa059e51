"""Page tokens: where a list goes on, as text that callers pass back unread."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from kvscout_common.errors import InvalidArgument

MAX_TOKEN = 4_096
"""Characters; the names in one are a few hundred bytes each."""


def page_token(*place: str | float) -> str:
    """Return the token of a place in a list, made of what the list is ordered by."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def read_page_token(token: str, *kinds: type) -> tuple[Any, ...] | None:
    """Return the place that a token encodes; None = the list's beginning.

    Args:
        token: As it came from a caller; "" = none.
        kinds: Of each part of the place.

    Raises:
        InvalidArgument: It is no token of such a list.
    """
    if not token:
        return None
    try:
        place = json.loads(base64.b64decode(token, altchars=b"-_", validate=True)) if len(token) <= MAX_TOKEN else None
    except (binascii.Error, ValueError, RecursionError):
        place = None
    if not isinstance(place, list) or tuple(map(type, place)) != kinds:
        raise InvalidArgument("is not a next_page_token of such a list", field="page_token")
    return tuple(place)
