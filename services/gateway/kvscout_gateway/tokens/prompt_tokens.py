"""The tokens of a request's prompt, from where they are cheapest: the request itself, a tokenizer here, the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from kvscout_common.errors import KvscoutError
from kvscout_gateway.tokens.conversation import NotText, conversation, template_variables
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer

LOCAL_SECONDS: Final = 1.0
"""Longest wait for a tokenizer here: a prompt that takes longer takes its engine seconds."""
ANY_MODEL: Final = ""
"""Key of the tokenizer for models that have none of their own."""

AskEngine: TypeAlias = Callable[[Mapping[str, Any], str], Awaitable[bytes]]
"""Asks an engine to tokenize: a /tokenize body and the tenant → tokens, u32 each; KvscoutError if none does in time."""


class Source(StrEnum):
    """Where tokens came from."""

    REQUEST = "request"
    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt."""

    token_ids: bytes
    """u32 each; empty = unknown."""
    source: Source
    problem: str = ""
    """Why they are unknown."""
    whole: bool = True
    """They are all that the request has: it has no further prompts."""

    def __len__(self) -> int:
        return len(self.token_ids) // 4


class PromptTokenizer:
    """Finds the tokens of requests."""

    def __init__(self, tokenizers: Mapping[str, TextTokenizer], ask_engine: AskEngine | None) -> None:
        """Finds tokens.

        Args:
            tokenizers: By model; that of `ANY_MODEL` is for all others.
            ask_engine: For models that have none here; None = no engine is asked.
        """
        self._tokenizers = tokenizers
        self._ask_engine = ask_engine

    async def of_completion(self, request: Mapping[str, Any], *, model: str, tenant: str) -> PromptTokens:
        """The tokens of a completion request; unknown where they cannot be had in time.

        Args:
            request: Its body; `bytes` are token ids, packed.
            model: The base model that it means.
            tenant: Whose it is.
        """
        prompt, whole = _first(request.get("prompt"))
        if isinstance(prompt, bytes):
            return PromptTokens(prompt, Source.REQUEST, "", whole)
        if isinstance(prompt, list):
            return _given(prompt, whole=whole)
        if not isinstance(prompt, str):
            return PromptTokens(b"", Source.NONE, "the prompt is neither text nor tokens")
        special = request.get("add_special_tokens", True) is not False

        async def here(tokenizer: TextTokenizer) -> bytes:
            return await tokenizer.of_text(prompt, add_special_tokens=special, tenant=tenant)

        return await self._find(request, model, tenant, here, lambda: completion_body(request), whole=whole)

    async def of_chat(self, request: Mapping[str, Any], *, size: int, model: str, tenant: str) -> PromptTokens:
        """The tokens of a chat request; unknown where they cannot be had in time.

        Args:
            request: Its body.
            size: Bytes of it.
            model: The base model that it means.
            tenant: Whose it is.
        """

        async def here(tokenizer: TextTokenizer) -> bytes:
            return await tokenizer.of_conversation(request, size=size, tenant=tenant)

        return await self._find(request, model, tenant, here, lambda: chat_body(request))

    async def _find(
        self,
        request: Mapping[str, Any],
        model: str,
        tenant: str,
        here: Callable[[TextTokenizer], Awaitable[bytes]],
        body: Callable[[], Mapping[str, Any]],
        *,
        whole: bool = True,
    ) -> PromptTokens:
        if request.get("truncate_prompt_tokens") is not None or request.get("prompt_embeds") is not None:
            return PromptTokens(b"", Source.NONE, "the engine shortens the prompt, or adds to it", whole)
        tokenizer = self._tokenizers.get(model) or self._tokenizers.get(ANY_MODEL)
        try:
            if tokenizer is not None:
                async with asyncio.timeout(LOCAL_SECONDS):
                    return PromptTokens(await here(tokenizer), Source.TOKENIZER, "", whole)
            if self._ask_engine is not None:
                return PromptTokens(await self._ask_engine(body(), tenant), Source.ENGINE, "", whole)
        except TimeoutError:
            problem = f"not tokenized within {LOCAL_SECONDS:g} s"
        except (NotText, KvscoutError) as error:
            problem = str(error)
        else:
            problem = f"there is no tokenizer of model {model!r}"
        return PromptTokens(b"", Source.NONE, problem, whole)


def _first(prompt: Any) -> tuple[Any, bool]:
    """The first of several prompts, and whether it is the only one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        return prompt[0], len(prompt) == 1
    return prompt, True


def _given(token_ids: list[Any], *, whole: bool) -> PromptTokens:
    try:
        return PromptTokens(array("I", token_ids).tobytes(), Source.REQUEST, "", whole)
    except (TypeError, OverflowError):
        return PromptTokens(b"", Source.NONE, "the prompt is no list of token ids", whole)


def completion_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """What /tokenize is asked for a completion request: the tokens of its first prompt."""
    prompt, _ = _first(request.get("prompt"))
    special = request.get("add_special_tokens", True) is not False
    return {"model": request.get("model"), "prompt": prompt, "add_special_tokens": special}


def chat_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """What /tokenize is asked for a chat request.

    Raises:
        NotText: The request is not only text.
    """
    conversation(request.get("messages"), as_parts=True)
    variables = template_variables(request)
    body = {
        "model": request.get("model"),
        "messages": request.get("messages"),
        "tools": request.get("tools"),
        "add_generation_prompt": variables.pop("add_generation_prompt"),
        "continue_final_message": request.get("continue_final_message"),
        "add_special_tokens": request.get("add_special_tokens"),
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in body.items() if value is not None}
