"""The session of a request, as far as its client says: the conversation of which it is a turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest


class Session(NamedTuple):
    """Names of a session, hashed: nothing that its client wrote is in them."""

    session_id: int = 0
    """0 = its client does not say."""
    by_lineage: bool = True
    """Schedulers look for it by the prompt where its client does not say."""
    affinity: int = 0
    """Hash of the value that keeps requests on one worker; 0 = the request may go to any."""
    parent_id: int = 0
    """Session of the agent whose subagent this one is; 0 = its client names none."""


UNKNOWN_SESSION: Final = Session()


def worker_of(affinity: int, worker_ids: Iterable[str]) -> str:
    """Return the worker that something is kept on; "" = there is none.

    It needs no memory: each worker draws a number, the highest has it (rendezvous hashing), on every gateway alike. A
    worker that comes or goes moves its own share and no others.
    """
    return max(worker_ids, key=lambda worker_id: (_draw(affinity, worker_id), worker_id), default="")


def _draw(affinity: int, worker_id: str) -> int:
    drawn: int = xxh3_64_intdigest(worker_id.encode("utf-8", "replace"), affinity)
    return drawn
