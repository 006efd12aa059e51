"""Tokenizers of this gateway as a source of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvscout_gateway.tokens.source import COMPLETIONS, Found, SourceName, TokenRequest
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.values.prompt import Judge

LOCAL_SECONDS: Final = 1.0
"""Longest wait for a tokenizer here: a prompt that takes longer takes its engine seconds."""


class LocalSource:
    """Tokenizers of models."""

    def __init__(
        self,
        name: SourceName,
        tokenizer_of: Callable[[str, str], TextTokenizer | None],
        judge: Callable[[str, bool], None] | None = None,
    ) -> None:
        """Find tokens here.

        Args:
            name: Of the source.
            tokenizer_of: The tokenizer for a tenant's model; None = there is none.
            judge: Told for which model the engine has counted as many tokens, or not; None = nobody is.
        """
        self.name = name
        self._tokenizer_of = tokenizer_of
        self._judge = judge

    async def find(self, wanted: TokenRequest) -> Found | None:
        """See `TokenSource`."""
        tokenizer = self._tokenizer_of(wanted.tenant, wanted.model)
        if tokenizer is None:
            return None
        wanted.traits = tokenizer.traits
        async with asyncio.timeout(LOCAL_SECONDS):
            if wanted.dialect == COMPLETIONS:
                special = wanted.request.get("add_special_tokens", True) is not False
                found = Found(await tokenizer.of_text(wanted.text, add_special_tokens=special, tenant=wanted.tenant))
            else:
                found = await tokenizer.of_conversation(
                    wanted.request,
                    size=wanted.size,
                    tenant=wanted.tenant,
                    engine=wanted.engine,
                    dialect=wanted.dialect,
                )
        return found if self._judge is None else found._replace(judge=self._both(wanted.model, found.judge))

    async def find_beginning(self, wanted: TokenRequest) -> Found | None:
        """See `TokenSource`."""
        tokenizer = self._tokenizer_of(wanted.tenant, wanted.model)
        if tokenizer is None:
            return None
        async with asyncio.timeout(LOCAL_SECONDS):
            return await tokenizer.before_media(
                wanted.request, size=wanted.size, tenant=wanted.tenant, engine=wanted.engine, dialect=wanted.dialect
            )

    def _both(self, model: str, also: Judge | None) -> Judge:
        """Return who learns whether a tokenizer is the model's."""

        def judge(matched: bool) -> None:
            if also is not None:
                also(matched)
            if self._judge is not None:
                self._judge(model, matched)

        return judge
