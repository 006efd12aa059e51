"""Our tokens beside the engine's: the number of them in each request, and now and then all of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvscout_common.errors import KvscoutError
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.engine_tokenize import EngineTokenize, Tokenizing
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.values.prompt import Judge, Prompt

log = logging.getLogger("kvscout.gateway")

SECONDS: Final = 10.0
"""Longest wait for an engine: nobody waits for the comparison."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of a running request, to be compared with its engine's afterwards."""

    model: tuple[str, str]
    count: int
    all_of_them: tuple[bytes, Mapping[str, Any]] | None
    """Our tokens, and the body of /tokenize for the engine's; None = only their number is compared."""
    judge: Judge | None = None
    """Called with whether the number is the engine's."""


class EngineComparison:
    """Compares after the request, beside others: what the client sent goes to its engine as it came."""

    def __init__(
        self, parity: ParityCheck, engine: EngineTokenize, headers: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:
        """Compare.

        Args:
            parity: Counts.
            engine: Asks engines.
            headers: What engines want to see, such as their key.
        """
        self._parity = parity
        self._engine = engine
        self._headers = headers
        self._running: asyncio.Task[None] | None = None

    def begin(
        self, model: tuple[str, str], prompt: Prompt, body: Callable[[], Mapping[str, Any]] | None = None
    ) -> Compared | None:
        """Return what to compare once a request was answered; None = nothing, no tokenizer here made its tokens.

        Args:
            model: Tenant and model.
            prompt: With our tokens.
            body: Body of /tokenize for the same; None = only their number is compared.
        """
        if not prompt.tokenized_here:
            return None
        all_of_them = None
        if body is not None and self._parity.due() and self._running is None:
            try:
                all_of_them = prompt.token_ids, body()
            except (NotText, KvscoutError) as error:
                log.debug("tokens of %s not compared: %s", model, error)
        return Compared(model, len(prompt.token_ids) // 4, all_of_them, prompt.judge)

    def end(self, compared: Compared, endpoint: str, prompt_tokens: object) -> None:
        """Compare. Returns at once.

        Args:
            compared: What.
            endpoint: The engine that ran it.
            prompt_tokens: The engine's number of tokens; no number = it reported none.
        """
        if isinstance(prompt_tokens, int):
            self._parity.lengths(*compared.model, compared.count, prompt_tokens)
            if compared.judge is not None:
                compared.judge(compared.count == prompt_tokens)
        if compared.all_of_them is not None and self._running is None:
            engine = Tokenizing(endpoint, self._headers())
            self._running = asyncio.create_task(self._all(compared.model, *compared.all_of_them, engine))
            self._running.add_done_callback(self._ended)

    async def close(self) -> None:
        """End a comparison that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _all(self, model: tuple[str, str], ours: bytes, body: Mapping[str, Any], engine: Tokenizing) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                theirs = await self._engine.ask(engine, json.dumps(body))
        except (KvscoutError, TimeoutError) as error:
            log.debug("tokens of %s not compared: %s", model, error)
            return
        self._parity.tokens(*model, ours, theirs)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the tokens could not be compared", exc_info=error)
