"""The JSON of an answer: whole, or chunk by chunk, pure. Each endpoint gives its own shape to the same outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from kvscout_mocker.config import PromptTokensDetails
from kvscout_mocker.generation import Generation
from kvscout_mocker.tokenizer import WordTokenizer

Document = dict[str, Any]


class Piece(NamedTuple):
    """Tokens that one choice got since it was last looked at, all of them in a whole answer."""

    choice: int
    tokens: list[int]
    first: int
    """Position of the first of them in the choice."""
    finish_reason: str | None
    """Given with the last ones."""


class Answer(ABC):
    """One answer in the making.

    Args:
        asked: What was asked for.
        answer_id: Its `id`.
        created: Unix time in seconds.
        tokenizer: Tokens to text.
        details: Whether its usage tells of cached tokens.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self, asked: Generation, answer_id: str, created: int, tokenizer: WordTokenizer, details: PromptTokensDetails
    ) -> None:
        self.asked = asked
        self._envelope: Document = {"id": answer_id, "created": created, "model": asked.model}
        self._tokenizer = tokenizer
        self._details = details
        self._output_tokens = [0] * asked.choices

    @abstractmethod
    def opening(self) -> list[Document]:
        """The chunks before the first token."""

    @abstractmethod
    def _delta(self, piece: Piece, text: str) -> Document:
        """One choice of a chunk."""

    @abstractmethod
    def _choice(self, piece: Piece, text: str) -> Document:
        """One choice of a whole answer."""

    def chunk(self, piece: Piece) -> Document:
        """The chunk that carries a piece."""
        return self._chunk([self._delta(piece, self._tokenizer.decode(piece.tokens))], piece)

    def usage_chunk(self, cached_tokens: int) -> Document:
        """The chunk after the last token, if the usage was asked for."""
        told = self.usage(cached_tokens)
        told = {key: value for key, value in told.items() if value is not None}
        return self._envelope | {"object": self.chunk_object, "choices": [], "usage": told}

    def whole(self, pieces: Sequence[Piece], cached_tokens: int) -> Document:
        """The answer to a request that did not ask for a stream."""
        for piece in pieces:
            self._output_tokens[piece.choice] = len(piece.tokens)
        return self._envelope | {
            "object": self.whole_object,
            "choices": [self._choice(piece, self._tokenizer.decode(piece.tokens)) for piece in pieces],
            "usage": self.usage(cached_tokens),
        }

    def usage(self, cached_tokens: int) -> Document:
        """The usage object, of all choices."""
        told = self._details is PromptTokensDetails.ALWAYS
        told = told or (self._details is PromptTokensDetails.NONZERO and cached_tokens > 0)
        details = {"cached_tokens": cached_tokens} if told else None
        return usage(len(self.asked.prompt), sum(self._output_tokens)) | {"prompt_tokens_details": details}

    def _chunk(self, choices: list[Document], piece: Piece | None = None) -> Document:
        document = self._envelope | {"object": self.chunk_object, "choices": choices}
        if piece is not None:
            self._output_tokens[piece.choice] += len(piece.tokens)
        if self.asked.continuous_usage:
            document["usage"] = usage(len(self.asked.prompt), self._output_tokens[piece.choice] if piece else 0)
        return document


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"

    def opening(self) -> list[Document]:
        """None."""
        return []

    def _delta(self, piece: Piece, text: str) -> Document:
        document: Document = {
            "index": piece.choice,
            "text": text,
            "logprobs": None if self.asked.logprobs is None else self._logprobs(piece, self.asked.logprobs),
            "finish_reason": piece.finish_reason,
            "stop_reason": None,
        }
        if self.asked.return_token_ids:
            document["token_ids"] = piece.tokens
            if piece.first == 0:
                document["prompt_token_ids"] = self.asked.prompt.tolist()
        return document

    _choice = _delta

    def _logprobs(self, piece: Piece, alternatives: int) -> Document:
        # A word is as long as its number has digits, so that offsets need all words before.
        words = [self._tokenizer.decode([token]) for token in piece.tokens]
        offsets, end = [], 0
        for word in words:
            offsets.append(end)
            end += len(word)
        values = [logprob(token, piece.first + index) for index, token in enumerate(piece.tokens)]
        as_ids = self.asked.tokens_as_ids
        names = [f"token_id:{token}" for token in piece.tokens] if as_ids else words
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": [
                {name: value} | {_other(token, rank, as_ids): value - rank for rank in range(1, alternatives)}
                if alternatives
                else None
                for token, name, value in zip(piece.tokens, names, values, strict=True)
            ],
        }


class ChatAnswer(Answer):
    """`/v1/chat/completions`: the role goes first, then content; no tool is ever called."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Document]:
        """The role of every choice, with empty content."""
        chunks = []
        for index in range(self.asked.choices):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            prompt = self.asked.prompt.tolist() if self.asked.return_token_ids else None
            chunks.append(chunk | {"prompt_token_ids": prompt, "prompt_text": None})
        return chunks

    def whole(self, pieces: Sequence[Piece], cached_tokens: int) -> Document:
        """With the prompt's tokens beside the choices, where completions have them within."""
        prompt = self.asked.prompt.tolist() if self.asked.return_token_ids else None
        return super().whole(pieces, cached_tokens) | {"prompt_token_ids": prompt}

    def _delta(self, piece: Piece, text: str) -> Document:
        document: Document = {
            "index": piece.choice,
            "delta": {"content": text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "token_ids": piece.tokens if self.asked.return_token_ids else None,
        }
        if piece.finish_reason is not None:
            document["stop_reason"] = None
        return document

    def _choice(self, piece: Piece, text: str) -> Document:
        return {
            "index": piece.choice,
            "message": {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning": None,
            },
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": None,
            "token_ids": piece.tokens if self.asked.return_token_ids else None,
        }

    def _logprobs(self, piece: Piece) -> Document | None:
        alternatives = self.asked.logprobs
        if alternatives is None:
            return None
        content = []
        for index, token in enumerate(piece.tokens):
            value = logprob(token, piece.first + index)
            own = _chat_logprob(self._tokenizer.decode([token]), value)
            others = [_chat_logprob(f" <{rank}>", value - rank) for rank in range(1, alternatives)]
            content.append(own | {"top_logprobs": [own, *others] if alternatives else []})
        return {"content": content}


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """A usage that says nothing of cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


def _other(token: int, rank: int, as_ids: bool) -> str:
    return f"token_id:{token + rank}" if as_ids else f" <{rank}>"


def logprob(token: int, position: int) -> float:
    """An invented log-probability, a function of token and position, from −4 to just below 0."""
    return -(1 + xxhash.xxh3_64_intdigest(array("I", [token, position]).tobytes()) % 4000) / 1000


def _chat_logprob(token: str, value: float) -> Document:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}
