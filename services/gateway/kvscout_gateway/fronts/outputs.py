"""Expected output of a request in an engine's HTTP form, by its fields. Pure.

`max_tokens` is a bound: nearly every client sets one, few outputs reach it. How long outputs are schedulers learn, by
class. A class is made of what a request asks for, from lists that stand here, and of nothing that its client wrote:
there are a few thousand at most, of which a fleet sees a handful.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.json_fields import Fields, Prompts
from kvscout_gateway.values.dialects import API_DIALECTS, CHAT, COUNT_PATHS
from kvscout_gateway.values.output import Output

MAX_BOUND: Final = (1 << 32) - 1
_NAMES: Final[Mapping[str, str]] = {
    **{path: api.name for path, api in API_DIALECTS.items()},
    "/v1/chat/completions/batch": "chat",
    "/generate": "generate",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/audio/speech": "audio",
}
_PROMPT_ONLY: Final[Mapping[str, str]] = {
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    **dict.fromkeys(("/pooling", "/v1/pooling", "/classify", "/v1/classify", "/v1/moderations"), "pooling"),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), "score"),
    **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), "tokenize"),
    **dict.fromkeys(("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"), "tokenize"),
    **dict.fromkeys(COUNT_PATHS, "tokenize"),
}
"""Whose answer is had with the prompt's last token."""
_BOUNDS: Final = tuple(dict.fromkeys(name for api in (CHAT, *API_DIALECTS.values()) for name in api.limits))
"""Those of every dialect: bodies come on other paths as well."""
_STRUCTURED: Final = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),  # vLLM
    *("json_schema", "regex", "ebnf", "structural_tag"),  # SGLang
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SHAPING: Final = frozenset(
    {
        *_STRUCTURED,
        *("response_format", "text"),
        *("reasoning_effort", "reasoning", "output_config", "thinking", "chat_template_kwargs"),
    }
)
"""Fields by which an output has a form, or is thought about first."""
_READ: Final = _SHAPING.union(
    _BOUNDS,
    ("sampling_params", "stream", "stop", "stop_sequences", "stop_token_ids", "min_tokens", "ignore_eos"),
    ("n", "best_of", "tool_choice"),
)
_SMALL_BYTES: Final = 4096
_LONG: Final = object()
"""A value that is there, and too long to be looked into."""

Values: TypeAlias = Mapping[str, Any]
"""Fields of a body; an absent field is not in it."""


def output_of(path: str, fields: Fields) -> Output:
    """Return the expected output of a request.

    Args:
        path: Of its URL, without the query; "" = unknown.
        fields: Of its body; empty = nobody has seen that.
    """
    if path in _PROMPT_ONLY:
        return Output(1, 1, _PROMPT_ONLY[path], unseen=True)
    values = {
        name: fields[name] if place.end - place.value <= _SMALL_BYTES else _LONG
        for name, place in fields.places.items()
        if name in _READ
    }
    outputs = _outputs(fields, values)
    bound = min(_bound(values) * outputs, MAX_BOUND)
    return Output(
        expected_tokens=bound if bound and _reaches_it(values, bound) else 0,
        max_tokens=bound,
        output_class=_class(path, fields, values, outputs),
        unseen=bool(fields) and values.get("stream") is not True,
    )


def _class(path: str, fields: Fields, values: Values, outputs: int) -> str:
    name = _NAMES.get(path)
    if name is None:
        name = "chat" if "messages" in fields else "completions" if "prompt" in fields else "other"
    elif name == "completions" and "max_tokens" not in values and len(fields):
        # Where a completion says nothing of its length, engines end it after a few tokens, unlike any other request.
        name = "completions/short"
    choice = tool_choice(values)
    if "tools" in fields.places and fields.places["tools"].values > 1 and choice != "none":
        name += "/tools" if choice == "auto" else "/call"
    if not _SHAPING.isdisjoint(values):
        if _is_structured(values):
            name += "/structured"
        name += _effort(values)
    return f"{name}/many" if outputs > 1 else name


def tool_choice(values: Values) -> str:
    """Return whether a request lets its model call tools: "auto", "none", or "call", which demands it.

    Args:
        values: Fields of its body, in any dialect.
    """
    choice = values.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    return "auto" if choice in (None, "auto") else "none" if choice == "none" else "call"


def _bound(values: Values) -> int:
    """Tokens at which each of a request's outputs ends; 0 = it does not say."""
    for name in _BOUNDS:
        if name in values and 0 < (bound := _number(values[name])) <= MAX_BOUND:
            return bound
    sampling = values.get("sampling_params")
    bound = _number(sampling.get("max_new_tokens")) if isinstance(sampling, dict) else 0
    return bound if 0 < bound <= MAX_BOUND else 0


def _reaches_it(values: Values, bound: int) -> bool:
    """Return whether a request's output is as long as it may be, as that of a benchmark is."""
    if values.get("stop") or values.get("stop_sequences") or values.get("stop_token_ids"):
        return False
    return values.get("ignore_eos") is True or _number(values.get("min_tokens")) >= bound


def _outputs(fields: Fields, values: Values) -> int:
    """Return the number of answers to generate: `n`, or the `best_of` from which these are taken, for each prompt."""
    prompts = 1
    if "prompt" in fields.places:
        try:
            prompt = fields["prompt"]
            prompts = prompt.number if isinstance(prompt, Prompts) else 1
        except InvalidArgument:
            pass  # it is too long to be looked at
    return max(1, _number(values.get("n")), _number(values.get("best_of"))) * prompts


def _is_structured(values: Values) -> bool:
    if _is_format(values.get("response_format")):
        return True
    for value in (values.get("text"), values.get("output_config")):  # of responses and of messages
        if _is_format(value.get("format") if isinstance(value, dict) else value):
            return True
    return any(name in values and values[name] not in (None, "") for name in _STRUCTURED)


def _is_format(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("type") not in (None, "text")
    return value is _LONG


def _effort(values: Values) -> str:
    """Return how much a model is to think before it answers, as far as a request says."""
    template = values.get("chat_template_kwargs")
    template = template if isinstance(template, dict) else {}
    given = [values.get("reasoning_effort"), template.get("reasoning_effort")]
    given += [
        each.get("effort") for name in ("reasoning", "output_config") if isinstance(each := values.get(name), dict)
    ]
    for effort in given:
        if isinstance(effort, str) and effort in _EFFORTS:
            return f"/effort-{effort}"
    thinking = values.get("thinking")
    thinks = (thinking.get("type") != "disabled") if isinstance(thinking, dict) and "type" in thinking else None
    for name in ("enable_thinking", "thinking"):
        if isinstance(template.get(name), bool):
            thinks = template[name]
    return "" if thinks is None else "/thinking" if thinks else "/no-thinking"


def _number(value: Any) -> int:
    """Return a value that is a number; 0 = it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
