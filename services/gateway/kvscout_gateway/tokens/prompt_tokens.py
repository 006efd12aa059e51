"""The tokens of a request's prompt: from the request itself, or from the first source that has them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.http.json_fields import Prompts
from kvscout_common.observability.recent_counts import RecentCounts
from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import NotOnlyText, NotText
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.source import COMPLETIONS, ENGINES, Found, SourceName, TokenRequest, TokenSource
from kvscout_gateway.values.prompt import Prompt, TokenClass

CHARACTERS_A_TOKEN: Final = 4
"""Characters of text that a token has, about: the length of a prompt whose tokens nobody has counted."""
CHAT: Final = "chat"


class LateTokens(NamedTuple):
    """Key of a count of prompts whose tokens a source did not have in time."""

    source: str
    tenant: str
    model: str


class PromptTokenizer(Collector):
    """Finds the tokens of requests."""

    def __init__(self, sources: Sequence[TokenSource], parity: ParityCheck, *, remote_seconds: float = 0.0) -> None:
        """Find tokens.

        Args:
            sources: In the order in which they are asked.
            parity: Tells which of them had other tokens than the engine.
            remote_seconds: Longest wait for calls, of one request.
        """
        self._sources = sources
        self._parity = parity
        self._remote_seconds = remote_seconds
        self.late: RecentCounts[LateTokens] = RecentCounts()
        """Prompts whose tokens are unknown because a source was too slow, or did not answer."""

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        labels = ["source", "tenant", "model"]
        late = CounterMetricFamily("kvscout_late_tokens", "Prompts whose tokens a source had too late", labels=labels)
        for of, number in self.late.total.items():
            late.add_metric(of, number)
        yield late

    async def of_completion(self, request: Mapping[str, Any], *, model: str, tenant: str, size: int = 0) -> Prompt:
        """Return the tokens of a completion request; unknown where they cannot be had in time.

        Args:
            request: Its body; `bytes` are token ids, packed.
            model: The base model that it means.
            tenant: Whose it is.
            size: Bytes of it.
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
        wanted = TokenRequest(request, COMPLETIONS, model, tenant, size, text=prompt)
        return await self._find(wanted, further=further)

    async def of_chat(
        self,
        request: Mapping[str, Any],
        *,
        size: int,
        model: str,
        tenant: str,
        engine: EngineKind = EngineKind.VLLM,
        dialect: str = CHAT,
    ) -> Prompt:
        """Return the tokens of a conversation; unknown where they cannot be had in time.

        Args:
            request: Its body.
            size: Bytes of it.
            model: The base model that it means.
            tenant: Whose it is.
            engine: What will render it.
            dialect: Of the body: see `as_chat`.
        """
        return await self._find(TokenRequest(request, dialect, model, tenant, size, engine))

    async def _find(self, wanted: TokenRequest, *, further: int = 0) -> Prompt:
        if _has(wanted.request, "truncate_prompt_tokens") or _has(wanted.request, "prompt_embeds"):
            return unknown_prompt("the engine shortens the prompt, or adds to it")
        wanted.remote_seconds = self._remote_seconds
        problem, late, media, engines_fail = "", "", False, False
        for of, source in self._ordered(wanted):
            if engines_fail and source.name in ENGINES:
                continue
            try:
                found = await source.find(wanted)
            except (NotText, KvscoutError, TimeoutError) as error:
                problem = problem or _why(error)
                if not isinstance(error, NotText | InvalidArgument):
                    late = late or source.name
                media = media or isinstance(error, NotOnlyText)
                engines_fail |= source.name in ENGINES and not isinstance(error, NotText | InvalidArgument)
                continue
            if found is not None:
                prompt = _prompt(found, further)
                if not further:
                    prompt.token_class = of
                    if not found.mm_items and source.name is not SourceName.ENGINE_TOKENIZE and self._parity.due(of):
                        prompt.wanted = wanted
                return prompt
        beginning = await self._beginning(wanted) if media else None
        if beginning is None:
            if late:
                self.late.add(LateTokens(late, wanted.tenant, wanted.model))
            return unknown_prompt(problem or f"there is no tokenizer of model {wanted.model!r}")
        prompt = _prompt(beginning, beginning.further_tokens)
        prompt.partial = f"tokenizer: {problem}"
        return prompt

    def _ordered(self, wanted: TokenRequest) -> Iterator[tuple[TokenClass, TokenSource]]:
        """Yield the sources, each with the class that it makes of a request: last those that had other tokens."""
        tools, differing = "tools" in wanted.request, []
        for source in self._sources:
            of = TokenClass(wanted.tenant, wanted.model, wanted.dialect, tools, source.name)
            if self._parity.differs(of):
                differing.append((of, source))
            else:
                yield of, source
        yield from differing

    async def _beginning(self, wanted: TokenRequest) -> Found | None:
        for source in self._sources:
            try:
                if (found := await source.find_beginning(wanted)) is not None:
                    return found
            except (NotText, KvscoutError, TimeoutError):
                continue  # the request says already why its tokens were not found
        return None


def unknown_prompt(problem: str) -> Prompt:
    """Return a prompt whose tokens and length are unknown, and why."""
    return Prompt(0, unknown=f"tokenizer: {problem}")


def _why(error: Exception) -> str:
    return "it takes too long to tokenize" if isinstance(error, TimeoutError) else str(error)


def _prompt(found: Found, further: int) -> Prompt:
    prompt = Prompt.of_tokens(found.token_ids, further_tokens=further)
    prompt.mm_items, prompt.judge = found.mm_items, found.judge
    return prompt


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
        return unknown_prompt("the prompt is not a list of token ids")
