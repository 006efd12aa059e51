"""What makes a request one leg of two: prefill on this engine and decode on another, or the other way round.

An engine API has its own handshake (`nixl` for vLLM's, `bootstrap` for SGLang's); each is a `Leg`. The base class is a
request that one engine serves alone.
"""

from __future__ import annotations

from kvscout_mocker.answers import Document
from kvscout_mocker.engine import Request
from kvscout_mocker.rank import Rank
from kvscout_mocker.transfers import KvSource


class Leg:
    """A request that one engine serves alone."""

    dp_rank: int | None = None
    """The rank that the handshake picks; None: any."""
    source: KvSource | None = None
    """Where its prompt's blocks come from; None: it computes them."""
    holds: bool = False
    """Its blocks stay when it is done, for another engine."""
    max_tokens: int | None = None
    """Limit that the handshake sets; None: that of the request."""

    async def admitted(self) -> None:
        """Returns when the engine may begin.

        Raises:
            InternalError: The other leg does not come.
        """

    def done(self, request: Request, rank: Rank) -> Document:
        """Called with the last token, before the answer goes out; gives what the answer says besides."""
        return {}

    def cached_tokens(self, request: Request) -> int:
        """What the answer tells as cached."""
        return request.cached_tokens or 0

    def close(self) -> None:
        """The request is over, whatever became of it."""
