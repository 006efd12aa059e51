"""The JSON of an answer: whole, or chunk by chunk, pure. Each endpoint gives its own shape to the same outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

import xxhash

from kvscout_mocker.config import PromptTokensDetails
from kvscout_mocker.engine import ChoiceDelta
from kvscout_mocker.generation import Generation
from kvscout_mocker.server import Document
from kvscout_mocker.tokenizer import WordTokenizer


class Answer(ABC):
    """One answer in the making.

    Args:
        generation: Validated request.
        answer_id: Its `id`.
        created: Unix time in seconds.
        tokenizer: Tokens to text.
        details: Condition on which its usage reports cached tokens.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        generation: Generation,
        answer_id: str,
        created: int,
        tokenizer: WordTokenizer,
        details: PromptTokensDetails,
    ) -> None:
        self.generation = generation
        self._envelope: Document = {"id": answer_id, "created": created, "model": generation.model}
        self._tokenizer = tokenizer
        self._details = details
        self._output_tokens = [0] * generation.choices

    @abstractmethod
    def opening(self) -> list[Document]:
        """Return the chunks before the first token."""

    @abstractmethod
    def _chunk_choice(self, delta: ChoiceDelta, text: str) -> Document:
        """One choice of a chunk."""

    @abstractmethod
    def _choice(self, delta: ChoiceDelta, text: str) -> Document:
        """One choice of a whole answer."""

    def chunk(self, delta: ChoiceDelta) -> Document:
        """Return the chunk that carries a delta."""
        return self._chunk([self._chunk_choice(delta, self._tokenizer.decode(delta.tokens))], delta)

    def usage_chunk(self, cached_tokens: int) -> Document:
        """Return the chunk after the last token, if the usage was generation for."""
        fields = {key: value for key, value in self.usage(cached_tokens).items() if value is not None}
        return self._envelope | {"object": self.chunk_object, "choices": [], "usage": fields}

    def whole(self, deltas: Sequence[ChoiceDelta], cached_tokens: int) -> Document:
        """Return the answer to a request that did not ask for a stream."""
        for delta in deltas:
            self._output_tokens[delta.choice] = len(delta.tokens)
        return self._envelope | {
            "object": self.whole_object,
            "choices": [self._choice(delta, self._tokenizer.decode(delta.tokens)) for delta in deltas],
            "usage": self.usage(cached_tokens),
        }

    def usage(self, cached_tokens: int) -> Document:
        """Return the usage object, of all choices."""
        always = self._details is PromptTokensDetails.ALWAYS
        reported = always or (self._details is PromptTokensDetails.NONZERO and cached_tokens > 0)
        details = {"cached_tokens": cached_tokens} if reported else None
        return usage(len(self.generation.prompt), sum(self._output_tokens)) | {"prompt_tokens_details": details}

    def _chunk(self, choices: list[Document], delta: ChoiceDelta | None = None) -> Document:
        document = self._envelope | {"object": self.chunk_object, "choices": choices}
        if delta is not None:
            self._output_tokens[delta.choice] += len(delta.tokens)
        if self.generation.continuous_usage:
            document["usage"] = usage(len(self.generation.prompt), self._output_tokens[delta.choice] if delta else 0)
        return document


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"

    def opening(self) -> list[Document]:
        """None."""
        return []

    def _chunk_choice(self, delta: ChoiceDelta, text: str) -> Document:
        document: Document = {
            "index": delta.choice,
            "text": text,
            "logprobs": None if self.generation.logprobs is None else self._logprobs(delta, self.generation.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": None,
        }
        if self.generation.return_token_ids:
            document["token_ids"] = delta.tokens
            if delta.first == 0:
                document["prompt_token_ids"] = self.generation.prompt.tolist()
        return document

    _choice = _chunk_choice

    def _logprobs(self, delta: ChoiceDelta, alternatives: int) -> Document:
        # A word is as long as its number has digits, so that offsets need all words before.
        words = [self._tokenizer.decode([token]) for token in delta.tokens]
        offsets, end = [], 0
        for word in words:
            offsets.append(end)
            end += len(word)
        values = [logprob(token, delta.first + index) for index, token in enumerate(delta.tokens)]
        as_ids = self.generation.tokens_as_ids
        names = [f"token_id:{token}" for token in delta.tokens] if as_ids else words
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": [
                {name: value} | {_other(token, rank, as_ids): value - rank for rank in range(1, alternatives)}
                if alternatives
                else None
                for token, name, value in zip(delta.tokens, names, values, strict=True)
            ],
        }


class ChatAnswer(Answer):
    """`/v1/chat/completions`: the role goes first, then content; no tool is ever called."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Document]:
        """Return the role of every choice, with empty content."""
        chunks = []
        for index in range(self.generation.choices):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            prompt = self.generation.prompt.tolist() if self.generation.return_token_ids else None
            chunks.append(chunk | {"prompt_token_ids": prompt, "prompt_text": None})
        return chunks

    def whole(self, deltas: Sequence[ChoiceDelta], cached_tokens: int) -> Document:
        """With the prompt's tokens beside the choices, where completions have them within."""
        prompt = self.generation.prompt.tolist() if self.generation.return_token_ids else None
        return super().whole(deltas, cached_tokens) | {"prompt_token_ids": prompt}

    def _chunk_choice(self, delta: ChoiceDelta, text: str) -> Document:
        document: Document = {
            "index": delta.choice,
            "delta": {"content": text},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "token_ids": delta.tokens if self.generation.return_token_ids else None,
        }
        if delta.finish_reason is not None:
            document["stop_reason"] = None
        return document

    def _choice(self, delta: ChoiceDelta, text: str) -> Document:
        return {
            "index": delta.choice,
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
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": None,
            "token_ids": delta.tokens if self.generation.return_token_ids else None,
        }

    def _logprobs(self, delta: ChoiceDelta) -> Document | None:
        alternatives = self.generation.logprobs
        if alternatives is None:
            return None
        content = []
        for index, token in enumerate(delta.tokens):
            value = logprob(token, delta.first + index)
            own = _chat_logprob(self._tokenizer.decode([token]), value)
            others = [_chat_logprob(f" <{rank}>", value - rank) for rank in range(1, alternatives)]
            content.append(own | {"top_logprobs": [own, *others] if alternatives else []})
        return {"content": content}


def usage(prompt_tokens: int, output_tokens: int) -> Document:
    """Return a usage that says nothing of cached tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


def _other(token: int, rank: int, as_ids: bool) -> str:
    return f"token_id:{token + rank}" if as_ids else f" <{rank}>"


def logprob(token: int, position: int) -> float:
    """Return an invented log-probability, a function of token and position, from −4 to just below 0."""
    return -(1 + xxhash.xxh3_64_intdigest(array("I", [token, position]).tobytes()) % 4000) / 1000


def _chat_logprob(token: str, value: float) -> Document:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}
