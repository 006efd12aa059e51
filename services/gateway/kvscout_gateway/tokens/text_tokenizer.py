"""The tokens of texts and conversations by a tokenizer here: what was seen before is not tokenized again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.piece_cache import PieceCache
from kvscout_gateway.tokens.threads import Threads
from kvscout_gateway.tokens.tokenizer import LocalTokenizer

if TYPE_CHECKING:
    from kvscout_gateway.tokens.chat_template import ChatTemplate

MAX_CHARACTERS: Final = 8 * 1024 * 1024
"""Of a prompt."""
INLINE_RENDERED: Final = 32 * 1024
"""Bytes of a request whose text is put together on the event loop, and characters that are cut there: below half a
millisecond."""
INLINE_ENCODED: Final = 1024
"""Characters that are encoded there."""

P = ParamSpec("P")
T = TypeVar("T")


class TextTokenizer:
    """One model's tokenizer and chat template."""

    def __init__(
        self, tokenizer: LocalTokenizer, template: ChatTemplate | None, threads: Threads, *, cache_bytes: int
    ) -> None:
        """Puts them together.

        Args:
            tokenizer: Text → tokens.
            template: Conversation → text; None = the model has none.
            threads: For what is long.
            cache_bytes: Of pieces kept for each tenant.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._threads = threads
        self.cache = PieceCache(cache_bytes)

    @classmethod
    def load(cls, folder: Path, threads: Threads, *, cache_bytes: int, flag: str) -> TextTokenizer:
        """Reads a model's folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

        Raises:
            ConfigError: Something of it is wrong, or the libraries are not installed; names the flag.
        """
        tokenizer = LocalTokenizer.load(folder, flag=flag)
        from kvscout_gateway.tokens.chat_template import ChatTemplate

        return cls(tokenizer, ChatTemplate.load(folder, flag=flag), threads, cache_bytes=cache_bytes)

    async def of_conversation(self, request: Mapping[str, Any], *, size: int, tenant: str) -> bytes:
        """The tokens of a chat request, u32 each.

        Args:
            request: Its body.
            size: Bytes of it.
            tenant: Whose it is.

        Raises:
            NotText: It has something in it that is not text, or that is not known here.
            ResourceExhausted: Too many wait.
        """
        if self._template is None:
            raise NotText("the tokenizer has no chat template")
        text = await self._run(size > INLINE_RENDERED, self._template.render, request)
        return await self.of_text(text, add_special_tokens=bool(request.get("add_special_tokens")), tenant=tenant)

    async def of_text(self, text: str, *, add_special_tokens: bool, tenant: str) -> bytes:
        """The tokens of a text, u32 each.

        Args:
            text: The text.
            add_special_tokens: With those that the tokenizer puts around it.
            tenant: Whose it is.

        Raises:
            NotText: It is too long, or cannot be encoded.
            ResourceExhausted: Too many wait.
        """
        if len(text) > MAX_CHARACTERS:
            raise NotText(f"the prompt has more than {MAX_CHARACTERS:,} characters")
        frame = self._tokenizer.frame
        try:
            if not add_special_tokens:
                return await self._pieces(text, tenant)
            if frame is not None:
                return frame.head + await self._pieces(text, tenant) + frame.tail
            [tokens] = await self._run(
                len(text) > INLINE_ENCODED, self._tokenizer.encode, [text], add_special_tokens=True
            )
            return tokens
        except ValueError as error:
            raise NotText(str(error)) from error

    async def _pieces(self, text: str, tenant: str) -> bytes:
        pieces = await self._run(len(text) > INLINE_RENDERED, self._tokenizer.seams.cut, text)
        known = [self.cache.get(tenant, piece) for piece in pieces]
        new = list(dict.fromkeys(piece for piece, tokens in zip(pieces, known, strict=True) if tokens is None))
        if not new:
            return b"".join(tokens for tokens in known if tokens is not None)
        encoded = await self._run(sum(map(len, new)) > INLINE_ENCODED, self._tokenizer.encode, new)
        fresh = dict(zip(new, encoded, strict=True))
        for piece, tokens in fresh.items():
            self.cache.put(tenant, piece, tokens)
        return b"".join(fresh[piece] if tokens is None else tokens for piece, tokens in zip(pieces, known, strict=True))

    async def _run(self, long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(work, *args, **kwargs) if long else work(*args, **kwargs)
