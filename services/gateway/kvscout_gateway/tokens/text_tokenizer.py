"""The tokens of texts and conversations by a tokenizer here: what was seen before is not tokenized again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.as_chat import CHAT, as_chat
from kvscout_gateway.tokens.chunk_cache import ChunkCache
from kvscout_gateway.tokens.conversation import MEDIA_MARK, NotText, TemplateTraits, without_media
from kvscout_gateway.tokens.sglang_conversation import SglangRelease
from kvscout_gateway.tokens.source import Found
from kvscout_gateway.tokens.threads import Threads
from kvscout_gateway.tokens.tokenizer import LocalTokenizer

if TYPE_CHECKING:
    from kvscout_gateway.tokens.chat_template import ChatTemplate

MAX_CHARACTERS: Final = 8 * 1024 * 1024
"""Longest prompt that is tokenized here."""
INLINE_RENDERED: Final = 32 * 1024
"""Bytes of a request whose text is put together on the event loop, and characters that are cut there: below half a
millisecond."""
TOKEN_BYTES: Final = 4
INLINE_ENCODED: Final = 1024
"""Characters that are encoded there."""

CHARACTERS_A_TOKEN: Final = 4
"""Characters of text that a token has, about."""
TOKENS_AN_ITEM: Final = 512
"""Tokens that an image, a sound or a film has, about."""

P = ParamSpec("P")
T = TypeVar("T")


class ReleaseGuess:
    """Learns which release of SGLang serves a model from how many tokens its engines count in requests with tools.

    A release that has matched once is kept; until then one that does not match gives way to the next.
    """

    def __init__(self) -> None:
        self.release = next(iter(SglangRelease))
        self._settled = False

    def judge(self, release: SglangRelease, matched: bool) -> None:
        """Note whether the engine has counted as many tokens as there were by the rules of a release."""
        if release is self.release and not self._settled:
            releases = list(SglangRelease)
            self._settled = matched
            self.release = release if matched else releases[(releases.index(release) + 1) % len(releases)]


class TextTokenizer:
    """One model's tokenizer and chat template."""

    def __init__(
        self, tokenizer: LocalTokenizer, template: ChatTemplate | None, threads: Threads, *, cache_bytes: int
    ) -> None:
        """Put them together.

        Args:
            tokenizer: Text → tokens.
            template: Conversation → text; None = the model has none.
            threads: For what is long.
            cache_bytes: Of chunks kept for each tenant.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._threads = threads
        self._sglang_release = ReleaseGuess()
        self.cache = ChunkCache(cache_bytes)

    @classmethod
    def load(cls, folder: Path, threads: Threads, *, cache_bytes: int, flag: str) -> TextTokenizer:
        """Read a model's folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

        Raises:
            ConfigError: Something of it is wrong, or the libraries are not installed; names the flag.
        """
        tokenizer = LocalTokenizer.load(folder, flag=flag)
        from kvscout_gateway.tokens.chat_template import ChatTemplate

        return cls(tokenizer, ChatTemplate.load(folder, flag=flag), threads, cache_bytes=cache_bytes)

    @property
    def traits(self) -> TemplateTraits | None:
        """Return those of its chat template; None = it has none."""
        return None if self._template is None else self._template.traits

    async def of_conversation(
        self,
        request: Mapping[str, Any],
        *,
        size: int,
        tenant: str,
        engine: EngineKind = EngineKind.VLLM,
        dialect: str = CHAT,
    ) -> Found:
        """Return the tokens of a conversation.

        Args:
            request: Its body.
            size: Bytes of it.
            tenant: Whose it is.
            engine: What renders it in the end: SGLang, or any other, which does as vLLM.
            dialect: Of the request: see `as_chat`.

        Raises:
            NotText: It has something in it that is not text, or that is not known here.
            InvalidArgument: A field of it is too long to be read.
            ResourceExhausted: Too many wait.
        """
        if self._template is None:
            raise NotText("the tokenizer has no chat template")
        long = size > INLINE_RENDERED
        request = await self._run(long, as_chat, dialect, request, engine=engine, traits=self._template.traits)
        if engine is not EngineKind.SGLANG:
            text = await self._run(long, self._template.render, request)
            special = bool(request.get("add_special_tokens"))
            return Found(await self.of_text(text, add_special_tokens=special, tenant=tenant))
        release = self._sglang_release.release
        text, continued = await self._run(long, self._template.render_for_sglang, request, release)
        tokens = await self.of_text(text, add_special_tokens=False, tenant=tenant)
        if continued:
            tokens += await self._behind(continued, tenant)
        judge = partial(self._sglang_release.judge, release) if request.get("tools") else None
        return Found(tokens, judge=judge)

    async def before_media(
        self, request: Mapping[str, Any], *, size: int, tenant: str, engine: EngineKind, dialect: str
    ) -> Found:
        """Return the tokens before the first image, sound or film in a conversation, and about how many follow.

        Args:
            request: Its body.
            size: Bytes of it.
            tenant: Whose it is.
            engine: What renders it.
            dialect: Of the request.

        Raises:
            NotText, InvalidArgument, ResourceExhausted: As `of_conversation`.
        """
        if self._template is None:
            raise NotText("the tokenizer has no chat template")
        long, template = size > INLINE_RENDERED, self._template
        request = await self._run(long, as_chat, dialect, request, engine=engine, traits=template.traits)
        messages, items = await self._run(
            long, without_media, request.get("messages"), in_place=template.shows_media_in_place
        )
        request = dict(request, messages=messages)
        if engine is EngineKind.SGLANG:
            text, _ = await self._run(long, template.render_for_sglang, request, self._sglang_release.release)
        else:
            text = await self._run(long, template.render, request)
        before, mark, behind = text.partition(MEDIA_MARK)
        if not mark:
            raise NotText("the chat template does not show where the first image or the like is")
        tokens = await self.of_text(before, add_special_tokens=bool(request.get("add_special_tokens")), tenant=tenant)
        further = len(behind) // CHARACTERS_A_TOKEN + items * TOKENS_AN_ITEM
        # What follows may have become one token with the last characters.
        return Found(tokens[:-TOKEN_BYTES], further_tokens=further + 1)

    async def _behind(self, text: str, tenant: str) -> bytes:
        """Return the tokens of a text that continues a prompt: with what the tokenizer puts around it, but for a token
        that begins texts."""
        frame = self._tokenizer.frame
        if frame is None:
            raise NotText("how the tokenizer begins a text is not known")
        tokens = await self.of_text(text, add_special_tokens=True, tenant=tenant)
        return tokens[TOKEN_BYTES:] if frame.head else tokens

    async def of_text(self, text: str, *, add_special_tokens: bool, tenant: str) -> bytes:
        """Return the tokens of a text, u32 each.

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
                return await self._chunks(text, tenant)
            if frame is not None:
                return frame.head + await self._chunks(text, tenant) + frame.tail
            [tokens] = await self._run(
                len(text) > INLINE_ENCODED, self._tokenizer.encode, [text], add_special_tokens=True
            )
            return tokens
        except ValueError as error:
            raise NotText(str(error)) from error

    async def _chunks(self, text: str, tenant: str) -> bytes:
        chunks = await self._run(len(text) > INLINE_RENDERED, self._tokenizer.token_boundaries.cut, text)
        known = [self.cache.get(tenant, chunk) for chunk in chunks]
        new = list(dict.fromkeys(chunk for chunk, tokens in zip(chunks, known, strict=True) if tokens is None))
        if not new:
            return b"".join(tokens for tokens in known if tokens is not None)
        fresh = dict(zip(new, await self._encode(new, tenant), strict=True))
        return b"".join(fresh[chunk] if tokens is None else tokens for chunk, tokens in zip(chunks, known, strict=True))

    async def _encode(self, chunks: list[str], tenant: str) -> list[bytes]:
        """Encode chunks and cache their tokens, also when whoever waits for them has given up meanwhile."""
        if sum(map(len, chunks)) <= INLINE_ENCODED:
            encoded = self._tokenizer.encode(chunks)
            self._keep(tenant, chunks, encoded)
            return encoded
        loop = asyncio.get_running_loop()

        def work() -> list[bytes]:
            encoded = self._tokenizer.encode(chunks)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._keep, tenant, chunks, encoded)
            return encoded

        return await self._threads.run(work)

    def _keep(self, tenant: str, chunks: list[str], encoded: list[bytes]) -> None:
        for chunk, tokens in zip(chunks, encoded, strict=True):
            self.cache.put(tenant, chunk, tokens)

    async def _run(self, long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(work, *args, **kwargs) if long else work(*args, **kwargs)
