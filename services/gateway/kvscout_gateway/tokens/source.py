"""Sources of the tokens of prompts, in the order in which they are asked.

::

    the request itself ──▶ --tokenizer ──▶ --renderer ──▶ a tokenizer that was found ──▶ /tokenize ──▶ engines' render

A source that has nothing for a model, or cannot tell, gives way to the next; one whose tokens were not the engine's,
for one class of prompts, is asked after all others for a while (`parity.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from kvscout_common.hashing import MmItem
from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import TemplateTraits
from kvscout_gateway.values.prompt import Judge

COMPLETIONS: Final = "completions"
"""Dialect of a prompt that is no conversation."""


class SourceName(StrEnum):
    """Sources, in order: what an operator names before what is found, what costs no call before what does."""

    TOKENIZER = "tokenizer"
    """`--tokenizer`."""
    RENDERER = "renderer"
    """`--renderer`."""
    FOUND = "found tokenizer"
    """`--tokenizer auto`."""
    ENGINE_TOKENIZE = "engine's tokenize"
    """`/tokenize` of an engine that serves the model: every vLLM has it."""
    ENGINE_RENDER = "engine's render"
    """Its render endpoints, which only some have turned on, for what `/tokenize` cannot tell, such as images."""


ENGINES: Final = frozenset((SourceName.ENGINE_TOKENIZE, SourceName.ENGINE_RENDER))
"""If one of these cannot be asked now, the other is not asked for the same request."""


@dataclass(slots=True)
class TokenRequest:
    """A request whose tokens are wanted."""

    request: Mapping[str, Any]
    """Its body."""
    dialect: str
    """`COMPLETIONS`, or a dialect of `as_chat`."""
    model: str
    """The base model that it means."""
    tenant: str
    size: int
    """Bytes of the body."""
    engine: EngineKind = EngineKind.VLLM
    """Engine that renders it: SGLang, or any other, which renders as vLLM does."""
    text: str = ""
    """Prompt of a completion."""
    traits: TemplateTraits | None = None
    """Traits of the model's template, once a tokenizer has reported them."""
    remote_seconds: float = 0.0
    """Time that is left for calls."""


class Found(NamedTuple):
    """Tokens of a prompt."""

    token_ids: bytes
    """u32 each."""
    mm_items: tuple[MmItem, ...] = ()
    judge: Judge | None = None
    """Wants to know whether the engine has counted as many; None = there is nothing to learn from it."""
    further_tokens: int = 0
    """Estimate of those behind, where the tokens are only the first."""


class TokenSource(Protocol):
    """One source."""

    name: SourceName

    async def find(self, wanted: TokenRequest) -> Found | None:
        """Return the tokens of a request; None = the source has nothing for its model.

        Raises:
            NotText: It is not only text, or not known here; `NotOnlyText` if there is an image or the like in it.
            KvscoutError, TimeoutError: The tokens cannot be had now.
        """

    async def find_beginning(self, wanted: TokenRequest) -> Found | None:
        """Return the tokens before the first image or the like in a request; None = the source cannot tell.

        Raises:
            NotText, KvscoutError, TimeoutError: As `find`.
        """
