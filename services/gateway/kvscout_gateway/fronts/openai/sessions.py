"""The worker of a session: the same one for each of its requests, on every gateway, as long as it is well.

Which one that is needs no memory: each worker draws a number for the session, the highest has it (rendezvous hashing).
A worker that comes or goes moves its own share of the sessions and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import xxhash

from kvscout_common.errors import ConfigError
from kvscout_common.http.http import Headers
from kvscout_gateway.fronts.access import header

MAX_SESSION_CHARACTERS: Final = 1024
_HEADER: Final = "header:"
USER: Final = "user"


class Affinity:
    """Location of the session's name in a request."""

    def __init__(self, source: str) -> None:
        """Take a flag.

        Args:
            source: "user", the field of the body; "header:NAME"; "" = sessions are nothing here.

        Raises:
            ConfigError: It is none of these.
        """
        self._header = source.removeprefix(_HEADER).lower() if source.startswith(_HEADER) else ""
        self._user = source == USER
        if source and not self._user and not self._header:
            raise ConfigError("must be user or header:NAME", field="session_affinity")

    def session(self, headers: Headers, fields: Mapping[str, Any]) -> str:
        """Return the session that a request belongs to; "" = none."""
        named = fields.get("user") if self._user else header(headers, self._header) if self._header else ""
        return named[:MAX_SESSION_CHARACTERS] if isinstance(named, str) else ""


def worker_of(session: str, worker_ids: Iterable[str]) -> str:
    """Return the worker of a session; "" = there is none."""
    return max(worker_ids, key=lambda worker_id: (_draw(session, worker_id), worker_id), default="")


def _draw(session: str, worker_id: str) -> int:
    drawn: int = xxhash.xxh3_64_intdigest(f"{len(worker_id)}:{worker_id}{session}".encode("utf-8", "replace"))
    return drawn
