"""Detection of two publishers at one endpoint, by the numbers of live batches."""

from __future__ import annotations

from typing import Final

MIXED_AFTER: Final = 8
"""Live batches whose ids do not rise, without a reconnect: an engine that begins anew has another connection."""
ONE_AGAIN_AFTER: Final = 100
"""Live batches in a row whose ids rise, after which there is one publisher again."""
MIXED: Final = (
    "two publishers number their batches independently at one endpoint: give each engine, and each data-parallel rank, "
    "an endpoint of its own"
)


class PublisherCheck:
    """Rises and falls of the ids of live batches since a connection was made."""

    def __init__(self) -> None:
        self._live_id = -1
        """Number of the last live batch."""
        self._falls = 0
        """Live batches whose ids did not rise, since the reconnect or since many in a row rose."""
        self._rises = 0
        """Live batches in a row whose ids rose."""

    def restart(self) -> None:
        """Begin anew after a reconnect."""
        self._live_id, self._falls, self._rises = -1, 0, 0

    def rewind(self, event_id: int) -> None:
        """Note that a publisher went back to a batch on request, to continue from there."""
        self._live_id = event_id

    def note(self, first_id: int, last_id: int) -> None:
        """Note that live batches came with these ids, one after another."""
        if first_id <= self._live_id:
            self._falls, self._rises = self._falls + 1, last_id - first_id
        else:
            self._rises += 1 + last_id - first_id
        self._live_id = last_id
        if self._rises >= ONE_AGAIN_AFTER:
            self._falls = 0

    @property
    def mixed(self) -> bool:
        """Return whether two publishers send: ids fall again and again."""
        return self._falls >= MIXED_AFTER

    @property
    def doubtful(self) -> bool:
        """Return whether one more fall would show two publishers."""
        return self._falls >= MIXED_AFTER - 1
