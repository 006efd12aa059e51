"""The tokens of a request's prompt, from where they are cheapest: the request itself, a tokenizer here, the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.http.json_fields import Prompts
from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import NotText, conversation, template_variables
from kvscout_gateway.tokens.text_tokenizer import INLINE_RENDERED, Conversation, TextTokenizer
from kvscout_gateway.values.prompt import Judge, Prompt

if TYPE_CHECKING:
    from kvscout_gateway.tokens.found_tokenizers import FoundTokenizers

LOCAL_SECONDS: Final = 1.0
"""Longest wait for a tokenizer here: a prompt that takes longer takes its engine seconds."""
CHARACTERS_A_TOKEN: Final = 4
"""Characters of text that a token has, about: the length of a prompt whose tokens nobody has counted."""
ANY_MODEL: Final = ""
"""Key of the tokenizer for models that have none of their own."""

AskEngine: TypeAlias = Callable[[Mapping[str, Any], str], Awaitable[bytes]]
"""Asks an engine to tokenize: a /tokenize body and the tenant → tokens, u32 each; KvscoutError if none does in time."""


class PromptTokenizer:
    """Finds the tokens of requests."""

    def __init__(
        self,
        tokenizers: Mapping[str, TextTokenizer],
        ask_engine: AskEngine | None,
        *,
        found: FoundTokenizers | None = None,
    ) -> None:
        """Find tokens.

        Args:
            tokenizers: By model; that of `ANY_MODEL` is for all others.
            ask_engine: For models that have none here; None = no engine is used.
            found: Tokenizers of further models, where they are looked for.
        """
        self._tokenizers = tokenizers
        self._found = found
        self._ask_engine = ask_engine

    async def of_completion(self, request: Mapping[str, Any], *, model: str, tenant: str) -> Prompt:
        """Return the tokens of a completion request; unknown where they cannot be had in time.

        Args:
            request: Its body; `bytes` are token ids, packed.
            model: The base model that it means.
            tenant: Whose it is.
        """
        try:
            prompt, further = _first(request.get("prompt"))
        except InvalidArgument as error:
            return unknown_prompt(str(error))
        if isinstance(prompt, bytes):
            return Prompt.of_tokens(prompt, further_tokens=further)
        if isinstance(prompt, list):
            return _given(prompt)
        if not isinstance(prompt, str):
            return unknown_prompt("the prompt is neither text nor tokens")
        special = request.get("add_special_tokens", True) is not False

        async def body() -> Mapping[str, Any]:
            return completion_body(request)

        async def here(tokenizer: TextTokenizer) -> Conversation:
            return Conversation(await tokenizer.of_text(prompt, add_special_tokens=special, tenant=tenant))

        return await self._find(request, model, tenant, here, body, further=further)

    async def of_chat(
        self,
        request: Mapping[str, Any],
        *,
        size: int,
        model: str,
        tenant: str,
        engine: EngineKind = EngineKind.VLLM,
    ) -> Prompt:
        """Return the tokens of a chat request; unknown where they cannot be had in time.

        Args:
            request: Its body.
            size: Bytes of it.
            model: The base model that it means.
            tenant: Whose it is.
            engine: What will render it.
        """

        async def here(tokenizer: TextTokenizer) -> Conversation:
            return await tokenizer.of_conversation(request, size=size, tenant=tenant, engine=engine)

        async def body() -> Mapping[str, Any]:
            return await asyncio.to_thread(chat_body, request) if size > INLINE_RENDERED else chat_body(request)

        return await self._find(request, model, tenant, here, body)

    async def _find(
        self,
        request: Mapping[str, Any],
        model: str,
        tenant: str,
        here: Callable[[TextTokenizer], Awaitable[Conversation]],
        body: Callable[[], Awaitable[Mapping[str, Any]]],
        *,
        further: int = 0,
    ) -> Prompt:
        if _has(request, "truncate_prompt_tokens") or _has(request, "prompt_embeds"):
            return unknown_prompt("the engine shortens the prompt, or adds to it")
        tokenizer = self._tokenizers.get(model) or self._tokenizers.get(ANY_MODEL)
        guessed = None
        if tokenizer is None and self._found is not None:
            tokenizer = guessed = self._found.get(tenant, model)
        try:
            if tokenizer is not None:
                async with asyncio.timeout(LOCAL_SECONDS):
                    token_ids, judge = await here(tokenizer)
                if guessed is not None:
                    judge = self._judging(model, judge)
                prompt = Prompt.of_tokens(token_ids, further_tokens=further)
                prompt.tokenized_here, prompt.judge = not further, judge
                return prompt
            if self._ask_engine is not None:
                return Prompt.of_tokens(await self._ask_engine(await body(), tenant), further_tokens=further)
        except TimeoutError:
            problem = f"not tokenized within {LOCAL_SECONDS:g} s"
        except (NotText, KvscoutError) as error:
            problem = str(error)
        else:
            problem = f"there is no tokenizer of model {model!r}"
        return unknown_prompt(problem)

    def _judging(self, model: str, also: Judge | None) -> Judge:
        """Return who learns whether a tokenizer that was found is the model's."""

        def judge(matched: bool) -> None:
            if also is not None:
                also(matched)
            if self._found is not None:
                self._found.judge(model, matched)

        return judge


def unknown_prompt(problem: str) -> Prompt:
    """Return a prompt whose tokens and length are unknown, and why."""
    return Prompt(0, unknown=f"tokenizer: {problem}")


def _has(request: Mapping[str, Any], name: str) -> bool:
    try:
        return request.get(name) is not None
    except InvalidArgument:
        return True  # too long to be looked at: there it is


def _first(prompt: Any) -> tuple[Any, int]:
    """Return the first of several prompts, and about how many tokens the others have."""
    if isinstance(prompt, Prompts):
        return prompt.first, max(prompt.number - 1, prompt.further_characters // CHARACTERS_A_TOKEN)
    return prompt, 0


def _given(token_ids: list[Any]) -> Prompt:
    try:
        return Prompt.of_tokens(array("I", token_ids).tobytes())
    except (TypeError, OverflowError):
        return unknown_prompt("the prompt is no list of token ids")


def completion_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of /tokenize for a completion request: the tokens of its first prompt."""
    prompt, _ = _first(request.get("prompt"))
    special = request.get("add_special_tokens", True) is not False
    return {"model": request.get("model"), "prompt": prompt, "add_special_tokens": special}


def chat_body(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of /tokenize for a chat request.

    Raises:
        NotText: The request is not only text.
    """
    conversation(request.get("messages"), as_parts=True)
    variables = template_variables(request)
    body = {
        "model": request.get("model"),
        "messages": request.get("messages"),
        "tools": request.get("tools"),
        "tool_choice": request.get("tool_choice"),
        "add_generation_prompt": variables.pop("add_generation_prompt"),
        "continue_final_message": request.get("continue_final_message"),
        "add_special_tokens": request.get("add_special_tokens"),
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in body.items() if value is not None}
