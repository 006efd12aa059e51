"""Which session a request belongs to, by what its client says of itself: one table for every front. Pure.

::

    headers, body ──SOURCES, the first that says something──▶ keyed hash of (source, name, part) ──▶ Session

A name is a client's claim, and correlates requests, no more: it is hashed with the tenant as the key, so that it means
nothing in another tenant, and is neither kept nor logged as it came. Where no source says anything, a request that
continues a stored response is of that one's session (`StoredResponses`); of the others schedulers find the session by
the prompt (`lineage`, see `kvscout_scheduler.estimates.sessions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.http.json_fields import Fields
from kvscout_gateway.values.session import Session

MAX_NAME_CHARACTERS: Final = 1024
"""Characters of a client's name that are used; further ones are ignored."""
MAX_FIELD_BYTES: Final = 8 * MAX_NAME_CHARACTERS
"""A longer field of a body names no session."""
PREVIOUS_RESPONSE: Final = "previous-response"
LINEAGE: Final = "lineage"
_HEADER: Final = "header:"
_HASH_BYTES: Final = 8


class SessionSource(NamedTuple):
    """One place where clients name their session."""

    name: str
    """As flags name it."""
    headers: tuple[str, ...] = ()
    """In lower case; the first that is there counts."""
    part: str = ""
    """Header that distinguishes agents within a session, each with a conversation of its own; the parent of each is the
    session without it."""
    parent: str = ""
    """Header that names the session of which this one is a subagent."""
    field: tuple[str, ...] = ()
    """Path of the field in the body."""


SOURCES: Final = (
    SessionSource("claude-code", headers=("x-claude-code-session-id",), part="x-claude-code-agent-id"),
    SessionSource("opencode", headers=("x-opencode-session", "x-session-affinity"), parent="x-parent-session-id"),
    SessionSource("session-id", headers=("x-session-id",)),
    SessionSource("codex", headers=("session_id", "session-id")),
    SessionSource("prompt-cache-key", field=("prompt_cache_key",)),
    SessionSource("metadata", field=("metadata", "user_id")),
    SessionSource("user", field=("user",)),
)
"""Those that name a conversation before those that may name a person or an application."""
SOURCE_NAMES: Final = (*(source.name for source in SOURCES), PREVIOUS_RESPONSE, LINEAGE)
_STATED: Final = "session-id"
"""The source of what a gRPC message says: the same name over HTTP is the same session."""


class Sessions:
    """The sources of one gateway."""

    def __init__(self, *, without: Collection[str] = (), affinity: str = "") -> None:
        """Take flags.

        Args:
            without: Names of sources that are switched off.
            affinity: What is kept on one worker: the name of a source, or "header:NAME"; "" = nothing is.

        Raises:
            ConfigError: There is no such source.
        """
        unknown = sorted(set(without).difference(SOURCE_NAMES))
        if unknown:
            raise ConfigError(f"there is no {unknown[0]!r}: {', '.join(SOURCE_NAMES)}", field="no_session_source")
        self._sources = tuple(source for source in SOURCES if source.name not in without)
        self._headers = {name for source in SOURCES for name in (*source.headers, source.part, source.parent) if name}
        self._by_previous = PREVIOUS_RESPONSE not in without
        self._by_lineage = LINEAGE not in without
        self._affinity = next((source for source in SOURCES if source.name == affinity), None)
        if affinity.startswith(_HEADER) and len(affinity) > len(_HEADER):
            name = affinity.removeprefix(_HEADER).lower()
            self._affinity = SessionSource(affinity, headers=(name,))
            self._headers.add(name)
        elif affinity and self._affinity is None:
            names = ", ".join(source.name for source in SOURCES)
            raise ConfigError(f"must be header:NAME or one of {names}", field="session_affinity")
        self._fields = {source.field[0] for source in SOURCES if source.field}

    def of(self, tenant: str, headers: Iterable[tuple[str, str]], fields: Fields) -> Session:
        """Return the session of a request.

        Args:
            tenant: Whose.
            headers: Of the request, by names in any case.
            fields: Of its body.
        """
        said: dict[str, str] = {}
        for name, value in headers:
            lower = name.lower()
            if lower in self._headers and value:
                said.setdefault(lower, value)
        if not said and self._fields.isdisjoint(fields.places):
            return Session(0, self._by_lineage, 0)  # as nearly all clients: nothing to look for
        session_id = parent_id = 0
        for source in self._sources:
            session_id = _found(source, tenant, said, fields)
            if session_id:
                parent_id = _parent(source, tenant, said)
                break
        affinity = _found(self._affinity, tenant, said, fields) if self._affinity is not None else 0
        return Session(session_id, self._by_lineage, affinity, parent_id)

    def continued(self, tenant: str, session: Session, response_id: str, session_id: int) -> Session:
        """Return the session of a request that continues a response: what its client says comes first.

        Args:
            tenant: Whose.
            session: As its client says.
            response_id: The response.
            session_id: That of the request that made the response; 0 = unknown, and the response's name stands for it.
        """
        if session.session_id or not self._by_previous:
            return session
        return session._replace(session_id=session_id or _hashed(tenant, PREVIOUS_RESPONSE, response_id))

    def named(self, tenant: str, name: str) -> Session:
        """Return the session that a message names; "" = it names none.

        Raises:
            InvalidArgument: The name is too long.
        """
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidArgument(f"must not be longer than {MAX_NAME_CHARACTERS} characters", field="session")
        return Session(_hashed(tenant, _STATED, name) if name else 0, self._by_lineage)


def _found(source: SessionSource, tenant: str, said: Mapping[str, str], fields: Fields) -> int:
    """Return the hash of what a source says; 0 = it says nothing."""
    if source.field:
        name = _text_at(fields, source.field)
        return _hashed(tenant, source.name, name) if name else 0
    for header in source.headers:
        if header in said:
            part = said.get(source.part, "")
            return _hashed(tenant, source.name, said[header], *([part] if part else []))
    return 0


def _parent(source: SessionSource, tenant: str, said: Mapping[str, str]) -> int:
    """Return the hash of the parent of what a source says; 0 = it names none."""
    if source.parent in said:
        return _hashed(tenant, source.name, said[source.parent])
    if source.part in said:
        return next(_hashed(tenant, source.name, said[header]) for header in source.headers if header in said)
    return 0


def _text_at(fields: Fields, path: tuple[str, ...]) -> str:
    place = fields.places.get(path[0])
    if place is None or place.end - place.value > MAX_FIELD_BYTES:
        return ""
    value: Any = fields[path[0]]
    for name in path[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _hashed(tenant: str, *names: str) -> int:
    text = "\0".join(name[:MAX_NAME_CHARACTERS] for name in names)
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=_HASH_BYTES, key=_key(tenant)).digest()
    return int.from_bytes(digest, "little") or 1


@lru_cache(maxsize=1024)
def _key(tenant: str) -> bytes:
    return blake2b(tenant.encode("utf-8", "replace"), digest_size=32).digest()
