"""`/v1/embeddings`: vectors that are a function of the tokens, pure."""

from __future__ import annotations

import base64
import math
from array import array
from dataclasses import dataclass
from typing import Any

import xxhash

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.answers.answers import usage
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import integer, json_object, token_ids
from kvscout_mocker.requests.generation import served_model
from kvscout_mocker.tokens.tokenizer import WordTokenizer

DEFAULT_DIMENSIONS = 16
MAX_DIMENSIONS = 4096
MAX_INPUTS = 2048
"""OpenAI's limit of inputs a request."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A validated request."""

    model: str
    inputs: list[array[int]]
    dimensions: int
    as_base64: bool

    @property
    def prompt_tokens(self) -> int:
        """Return tokens of all inputs."""
        return sum(map(len, self.inputs))


def parse_embedding(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> EmbeddingRequest:
    """Read a request body.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    encoding = fields.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidArgument("must be float or base64", field="encoding_format")
    given = fields.get("input")
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    inputs = [_tokens(value, tokenizer) for value in several]
    if len(inputs) > MAX_INPUTS:
        raise InvalidArgument(f"must have at most {MAX_INPUTS} entries", field="input")
    if any(len(tokens) > config.engine.max_model_len for tokens in inputs):
        raise InvalidArgument(f"must have at most {config.engine.max_model_len} tokens", field="input")
    model, _ = served_model(fields, config)
    dimensions = integer(fields, "dimensions", DEFAULT_DIMENSIONS, minimum=1, maximum=MAX_DIMENSIONS)
    return EmbeddingRequest(model, inputs, dimensions, encoding == "base64")


def embedding_answer(request: EmbeddingRequest, answer_id: str, created: int) -> dict[str, Any]:
    """Return the JSON of the answer."""
    return {
        "id": answer_id,
        "object": "list",
        "created": created,
        "model": request.model,
        "data": [
            {"index": index, "object": "embedding", "embedding": _encoded(_vector(tokens, request.dimensions), request)}
            for index, tokens in enumerate(request.inputs)
        ],
        "usage": usage(request.prompt_tokens, 0) | {"prompt_tokens_details": None},
    }


def _tokens(value: object, tokenizer: WordTokenizer) -> array[int]:
    if isinstance(value, str):
        tokens = tokenizer.encode(value)
    elif isinstance(value, list):
        tokens = token_ids(value, "input")
    else:
        raise InvalidArgument("must be a string, a list of token ids, or a list of these", field="input")
    if not tokens:
        raise InvalidArgument("must not be empty", field="input")
    return tokens


def _vector(tokens: array[int], dimensions: int) -> array[float]:
    raw = tokens.tobytes()
    values = [xxhash.xxh3_64_intdigest(raw, seed) / 2**63 - 1.0 for seed in range(dimensions)]
    norm = math.hypot(*values) or 1.0
    return array("f", [value / norm for value in values])


def _encoded(vector: array[float], request: EmbeddingRequest) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if request.as_base64 else vector.tolist()
