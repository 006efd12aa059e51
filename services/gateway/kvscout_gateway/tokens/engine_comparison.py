"""Our tokens beside the engine's: the number of them in each request, and now and then all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvscout_common.errors import KvscoutError
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import Role
from kvscout_gateway.engines.observation import predicted_cached_tokens
from kvscout_gateway.tokens.as_chat import RESPONSES
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.remote_source import render_call, tokenize_call
from kvscout_gateway.tokens.remote_tokens import Call, RemoteTokens, Server
from kvscout_gateway.tokens.source import TokenRequest
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Judge, Prompt, TokenClass

log = logging.getLogger("kvscout.gateway")

SECONDS: Final = 10.0
"""Longest wait for an engine: nobody waits for the comparison."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of a running request, to be compared with its engine's afterwards."""

    of: TokenClass
    count: int
    all_of_them: tuple[bytes, Call] | None
    """Our tokens, and the call that returns the engine's; None = only their number is compared."""
    judge: Judge | None = None
    """Called with whether the number is the engine's."""


class EngineComparison:
    """Compares after the request, beside others: what the client sent goes to its engine as it came."""

    def __init__(
        self, parity: ParityCheck, remote: RemoteTokens, headers: Callable[[], tuple[tuple[str, str], ...]]
    ) -> None:
        """Compare.

        Args:
            parity: Counts.
            remote: Asks engines.
            headers: What engines want to see, such as their key.
        """
        self._parity = parity
        self._remote = remote
        self._headers = headers
        self._running: asyncio.Task[None] | None = None

    def begin(self, prompt: Prompt) -> Compared | None:
        """Return what to compare once a request was answered; None = nothing, its tokens are its own or unknown."""
        of = prompt.token_class
        if of is None:
            return None
        all_of_them = None
        if isinstance(prompt.wanted, TokenRequest) and self._running is None:
            try:
                # What an engine makes of responses is no chat completion in all its details.
                call_of = render_call if of.dialect == RESPONSES else tokenize_call
                all_of_them = prompt.token_ids, call_of(prompt.wanted)
            except (NotText, KvscoutError) as error:
                log.debug("tokens of %s not compared: %s", of.model, error)
        return Compared(of, len(prompt.token_ids) // 4, all_of_them, prompt.judge)

    def end(self, compared: Compared, decision: Decision, usage: Usage | None) -> None:
        """Compare. Returns at once.

        Args:
            compared: What.
            decision: Where it ran.
            usage: The engine's count of its tokens; None = it reported none.
        """
        if usage is not None:
            self._parity.lengths(compared.of, compared.count, usage.prompt_tokens)
            if compared.judge is not None:
                compared.judge(compared.count == usage.prompt_tokens)
            self._by_events(compared, decision, usage)
        if compared.all_of_them is not None and self._running is None:
            server = Server(decision.endpoint, self._headers())
            self._running = asyncio.create_task(self._all(compared.of, *compared.all_of_them, server))
            self._running.add_done_callback(self._ended)

    def _by_events(self, compared: Compared, decision: Decision, usage: Usage) -> None:
        """Compare what the engine had cached with what its events said, where it computed all of the prompt itself."""
        alone = decision.spec is not None and decision.spec.role is Role.AGGREGATED
        if not alone or decision.confirmed_blocks is None or usage.cached_tokens is None:
            return
        said = predicted_cached_tokens(decision.confirmed_blocks, compared.count, decision.block_size)
        # One block may be stored while the request is on its way.
        self._parity.confirmed(compared.of, usage.cached_tokens <= said + decision.block_size)

    async def close(self) -> None:
        """End a comparison that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _all(self, of: TokenClass, ours: bytes, call: Call, server: Server) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                theirs = await self._remote.fetch(server, call)
        except (KvscoutError, TimeoutError) as error:
            log.debug("tokens of %s not compared: %s", of.model, error)
            return
        self._parity.tokens(of, ours, theirs.token_ids)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the tokens could not be compared", exc_info=error)
