"""Our tokens beside the engine's: the number of them in each request, and now and then all of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvscout_common.errors import KvscoutError
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.engine_tokenize import EngineTokenize, Tokenizing
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.prompt_tokens import PromptTokens, Source

log = logging.getLogger("kvscout.gateway")

SECONDS: Final = 10.0
"""Longest wait for an engine: nobody waits for the comparison."""


class EngineComparison:
    """Compares after the request, beside others: what the client sent goes to its engine as it came."""

    def __init__(
        self, parity: ParityCheck, engine: EngineTokenize, headers: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:
        """Compares.

        Args:
            parity: Counts.
            engine: Asks engines.
            headers: What engines want to see, such as their key.
        """
        self._parity = parity
        self._engine = engine
        self._headers = headers
        self._running: asyncio.Task[None] | None = None

    def compare(
        self,
        model: tuple[str, str],
        tokens: PromptTokens,
        endpoint: str,
        body: Callable[[], Mapping[str, Any]],
        *,
        prompt_tokens: int | None,
    ) -> None:
        """Compares one request's, if they are of a tokenizer here. Returns at once.

        Args:
            model: Tenant and model.
            tokens: Ours.
            endpoint: The engine that ran it.
            body: What /tokenize is asked for the same.
            prompt_tokens: The engine's number of tokens, if it told.
        """
        self.compare_lengths(model, tokens, prompt_tokens)
        if not _ours(tokens):
            return
        if self._parity.due() and self._running is None:
            self._running = asyncio.create_task(
                self._all(model, tokens.token_ids, Tokenizing(endpoint, self._headers()), body)
            )
            self._running.add_done_callback(self._ended)

    def compare_lengths(self, model: tuple[str, str], tokens: PromptTokens, prompt_tokens: int | None) -> None:
        """Compares the number of one request's tokens with that of its engine, if it told and they are ours."""
        if prompt_tokens is not None and _ours(tokens):
            self._parity.lengths(*model, len(tokens), prompt_tokens)

    async def close(self) -> None:
        """Ends a comparison that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _all(
        self, model: tuple[str, str], ours: bytes, engine: Tokenizing, body: Callable[[], Mapping[str, Any]]
    ) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                theirs = await self._engine.ask(engine, json.dumps(body()))
        except (KvscoutError, NotText, TimeoutError) as error:
            log.debug("tokens of %s not compared: %s", model, error)
            return
        self._parity.tokens(*model, ours, theirs)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("tokens not compared", exc_info=error)


def _ours(tokens: PromptTokens) -> bool:
    """Whether they are a tokenizer's here, of all that the engine computes."""
    return tokens.source is Source.TOKENIZER and tokens.whole
