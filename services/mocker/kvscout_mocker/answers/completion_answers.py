"""Answers of `/v1/completions` and `/v1/chat/completions`, pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from kvscout_common.errors import KvscoutError
from kvscout_mocker.answers.answers import Answer, CacheUse, logprob, reported, usage
from kvscout_mocker.answers.event_stream import DONE, sse
from kvscout_mocker.config import PromptTokensDetails
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.server import Document, error_document
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import call_id


class ChunkedAnswer(Answer):
    """An answer whose stream is `data:` chunks and a `[DONE]`.

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
        super().__init__(generation, tokenizer)
        self._envelope: Document = {"id": answer_id, "created": created, "model": generation.model}
        self._details = details

    @abstractmethod
    def _chunk_choice(self, delta: ChoiceDelta, text: str) -> Document:
        """One choice of a chunk."""

    @abstractmethod
    def _choice(self, delta: ChoiceDelta, text: str) -> Document:
        """One choice of a whole answer."""

    def opening(self) -> list[bytes]:
        """None."""
        return []

    def delta(self, delta: ChoiceDelta) -> list[bytes]:
        """Return the chunk that carries a delta."""
        text = self.counted(delta)
        return [sse(self._chunk([self._chunk_choice(delta, text)], self.output_tokens[delta.choice]))]

    def closing(self, cache: CacheUse) -> list[bytes]:
        """Return the usage, if it was asked for, and the end."""
        if not self.generation.include_usage:
            return [DONE]
        fields = {key: value for key, value in self._usage(cache).items() if value is not None}
        return [sse(self._envelope | {"object": self.chunk_object, "choices": [], "usage": fields}), DONE]

    def failure(self, error: KvscoutError) -> list[bytes]:
        """Return the error, within a stream of status 200, and the end."""
        return [sse(error_document(error)), DONE]

    def whole(self, deltas: Sequence[ChoiceDelta], cache: CacheUse) -> Document:
        """Return the answer to a request that did not ask for a stream."""
        return self._envelope | {
            "object": self.whole_object,
            "choices": [self._choice(delta, self.counted(delta)) for delta in deltas],
            "usage": self._usage(cache),
        }

    def _usage(self, cache: CacheUse) -> Document:
        told = reported(self._details, cache)
        details = None if told is None else {"cached_tokens": told.read, "created_cache_tokens": told.written}
        return usage(len(self.generation.prompt), sum(self.output_tokens)) | {"prompt_tokens_details": details}

    def _chunk(self, choices: list[Document], output_tokens: int) -> Document:
        document = self._envelope | {"object": self.chunk_object, "choices": choices}
        if self.generation.continuous_usage:
            document["usage"] = usage(len(self.generation.prompt), output_tokens)
        return document


class CompletionAnswer(ChunkedAnswer):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"

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
        words = [self.tokenizer.decode([token]) for token in delta.tokens]
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


class ChatAnswer(ChunkedAnswer):
    """`/v1/chat/completions`: the role goes first, then content or the arguments of a call."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[bytes]:
        """Return the role of every choice, with empty content."""
        prompt = self.generation.prompt.tolist() if self.generation.return_token_ids else None
        chunks = []
        for index in range(self.generation.choices):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], 0)
            chunks.append(sse(chunk | {"prompt_token_ids": prompt, "prompt_text": None}))
        return chunks

    def whole(self, deltas: Sequence[ChoiceDelta], cache: CacheUse) -> Document:
        """With the prompt's tokens beside the choices, where completions have them within."""
        prompt = self.generation.prompt.tolist() if self.generation.return_token_ids else None
        return super().whole(deltas, cache) | {"prompt_token_ids": prompt}

    def _chunk_choice(self, delta: ChoiceDelta, text: str) -> Document:
        document: Document = {
            "index": delta.choice,
            "delta": self._content(delta, text),
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(delta),
            "token_ids": delta.tokens if self.generation.return_token_ids else None,
        }
        if delta.finish_reason is not None:
            document["stop_reason"] = None
        return document

    def _content(self, delta: ChoiceDelta, text: str) -> Document:
        call = self.generation.tool_call
        if call is None:
            return {"content": text}
        first = delta.first == 0
        function = {"arguments": self.arguments(text, first=first, finish_reason=delta.finish_reason)}
        if not first:
            return {"tool_calls": [{"index": 0, "function": function}]}
        return {
            "tool_calls": [
                {"id": call_id(), "type": "function", "index": 0, "function": {"name": call.name} | function}
            ]
        }

    def _choice(self, delta: ChoiceDelta, text: str) -> Document:
        call, calls = self.generation.tool_call, {}
        if call is not None:
            arguments = self.arguments(text, first=True, finish_reason=delta.finish_reason)
            function = {"name": call.name, "arguments": arguments}
            calls = {"tool_calls": [{"id": call_id(), "type": "function", "function": function}]}
        return {
            "index": delta.choice,
            "message": {
                "role": "assistant",
                "content": text if call is None else "",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
                **calls,  # left out where there are none
            },
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(delta),
            "stop_reason": None,
            "token_ids": delta.tokens if self.generation.return_token_ids else None,
        }

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        call = self.generation.tool_call
        called = call is not None and not call.named and delta.finish_reason == "stop"
        return "tool_calls" if called else delta.finish_reason

    def _logprobs(self, delta: ChoiceDelta) -> Document | None:
        alternatives = self.generation.logprobs
        if alternatives is None:
            return None
        content = []
        for index, token in enumerate(delta.tokens):
            value = logprob(token, delta.first + index)
            own = _chat_logprob(self.tokenizer.decode([token]), value)
            others = [_chat_logprob(f" <{rank}>", value - rank) for rank in range(1, alternatives)]
            content.append(own | {"top_logprobs": [own, *others] if alternatives else []})
        return {"content": content}


def _other(token: int, rank: int, as_ids: bool) -> str:
    return f"token_id:{token + rank}" if as_ids else f" <{rank}>"


def _chat_logprob(token: str, value: float) -> Document:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}
