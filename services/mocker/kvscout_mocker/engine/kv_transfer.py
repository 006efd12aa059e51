"""Disaggregated serving: a request that this engine serves together with another one.

One engine computes the prompt (prefill) and another generates the output (decode); the blocks cross between them. Each
engine API has its own handshake (`nixl` for vLLM's, `bootstrap` for SGLang's), and each side of a handshake is a
`KvTransfer`. The base class is a request that one engine serves alone.
"""

from __future__ import annotations

from typing import Protocol

from kvscout_mocker.engine.request import Request
from kvscout_mocker.server import Document


class TransferFailed(Exception):
    """The blocks of another engine did not come; the text says why."""


class KvSource(Protocol):
    """The engine that sends the blocks of a prompt."""

    recomputes: bool
    """The receiving engine computes the prompt itself if the blocks do not come; else the request fails."""

    async def fetch(self, request: Request, tokens: int) -> None:
        """Return when the blocks are here.

        Raises:
            TransferFailed: They will not come.
        """


class BlockHolder(Protocol):
    """The rank whose engine holds the blocks of finished requests for other engines."""

    @property
    def dp_rank(self) -> int:
        """Return the rank's number."""

    def release(self, request: Request, *, expired: bool = False) -> None:
        """Free the blocks of a request."""


class KvTransfer:
    """A request's transfer of blocks: none, in the base class."""

    dp_rank: int | None = None
    """The rank that the handshake picks; None: any."""
    source: KvSource | None = None
    """Sender of the prompt's blocks; None: the prompt is computed here."""
    holds: bool = False
    """The blocks stay when the request is done, for another engine."""
    max_tokens: int | None = None
    """Limit that the handshake sets; None: that of the request."""

    async def ready(self) -> None:
        """Return when the engine may begin.

        Raises:
            InternalError: The other engine does not come.
        """

    def done(self, request: Request, rank: BlockHolder) -> Document:
        """Take note of the last token, before the answer goes out, and return the fields this adds to the answer."""
        return {}

    def cached_tokens(self, request: Request) -> int:
        """Return the cached tokens that the answer reports."""
        return request.cached_tokens or 0

    def close(self) -> None:
        """End the transfer with its request, whatever became of it."""
