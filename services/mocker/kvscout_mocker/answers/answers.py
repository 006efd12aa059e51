"""An answer in the making, whole or as the events of a stream, pure: each endpoint gives it its own shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvscout_common.errors import KvscoutError
from kvscout_mocker.config import PromptTokensDetails
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.server import Document
from kvscout_mocker.tokens.tokenizer import WordTokenizer


class CacheUse(NamedTuple):
    """Tokens of a prompt in the engine's cache."""

    read: int
    """Found there."""
    written: int
    """Added to it."""


class Answer(ABC):
    """One answer.

    Args:
        generation: Validated request.
        tokenizer: Tokens to text.
    """

    def __init__(self, generation: Generation, tokenizer: WordTokenizer) -> None:
        self.generation = generation
        self.tokenizer = tokenizer
        self.output_tokens = [0] * generation.choices
        """Of each choice, so far."""

    @abstractmethod
    def whole(self, deltas: Sequence[ChoiceDelta], cache: CacheUse) -> Document:
        """Return the answer to a request that did not ask for a stream."""

    def greeting(self) -> list[bytes]:
        """Return the events before the engine has begun."""
        return []

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Return the events that go out with the first token."""

    @abstractmethod
    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the events that carry tokens."""

    @abstractmethod
    def closing(self, cache: CacheUse) -> list[bytes]:
        """Return the events after the last token."""

    @abstractmethod
    def failure(self, error: KvscoutError) -> list[bytes] | None:
        """Return the events that end a stream whose request failed in the engine; None = it breaks off."""

    def counted(self, delta: ChoiceDelta) -> str:
        """Count the tokens of a delta, and return their text."""
        self.output_tokens[delta.choice] += len(delta.tokens)
        return self.tokenizer.decode(delta.tokens)

    def arguments(self, text: str, *, first: bool, finish_reason: str | None) -> str:
        """Return a text as arguments of the tool that the answer calls; a limit cuts them off, as it does vLLM's."""
        call = self.generation.tool_call
        if call is None:
            raise AssertionError("the answer calls no tool")
        return (call.head() if first else "") + text + (call.tail() if finish_reason == "stop" else "")


def reported(details: PromptTokensDetails, cache: CacheUse) -> CacheUse | None:
    """Return what a usage reports of the cache; None = nothing."""
    always = details is PromptTokensDetails.ALWAYS
    return cache if always or (details is PromptTokensDetails.NONZERO and cache.read > 0) else None


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """Return a usage of OpenAI's older APIs that says nothing of cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


def logprob(token: int, position: int) -> float:
    """Return an invented log-probability, a function of token and position, from −4 to just below 0."""
    return -(1 + xxhash.xxh3_64_intdigest(array("I", [token, position]).tobytes()) % 4000) / 1000
