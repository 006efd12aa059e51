"""A worker as an indexer or scheduler lists it, and what that says of who else has to be told."""

from __future__ import annotations

from typing import NamedTuple

from kvscout_common.registry.registry import DECLARED, Source
from kvscout_common.worker import WorkerSpec

LEARNED = (Source.PEER, Source.NATS)
"""Sources whose workers members are not told of: they have them, or follow the registry in NATS themselves."""
KEPT = (*DECLARED, Source.NATS)
"""Sources of a member that bring its workers to others, or to nobody else, without this gateway."""
_SOURCES = {source.value: source for source in Source}


class Peer(NamedTuple):
    """A registration as a member lists it."""

    spec: WorkerSpec
    lease_seconds: int
    source: Source
    listed_at: float
    """When the member was asked, on the gateway's clock."""

    @property
    def registered_there(self) -> bool:
        """Whether it is by a call to the member that it knows the worker, and nobody else need know it."""
        return self.source not in KEPT and self.source is not Source.PEER

    @property
    def declared(self) -> bool:
        """Whether it is of the member's own file, pods or DNS names: nobody else can change it there."""
        return self.source in DECLARED


def source_of(listed: str) -> Source:
    """A source as a member lists it; one that only its release knows counts as any other peer's."""
    return _SOURCES.get(listed, Source.RPC)
