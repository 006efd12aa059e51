"""Blocks on their way from one engine to another, as the engine that waits for them sees it."""

from __future__ import annotations

from typing import Protocol

from kvscout_mocker.engine import Request


class TransferFailed(Exception):
    """The blocks of another engine did not come; the text says why."""


class KvSource(Protocol):
    """Where the blocks of a prompt come from."""

    recomputes: bool
    """Whether the engine computes the prompt itself if they do not come; else the request fails."""

    async def fetch(self, request: Request, tokens: int) -> None:
        """Returns when they are here.

        Raises:
            TransferFailed: They will not come.
        """
