"""What a request in an engine's HTTP form tells of its output. Pure.

`max_tokens` is a bound: nearly every client sets one, few outputs reach it. How long outputs are schedulers learn, by
class. A class is made of what a request asks for, from lists that stand here, and of nothing that its client wrote:
there are a few thousand at most, of which a fleet sees a handful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.json_fields import Fields, Prompts
from kvscout_gateway.scheduler_client.output import Output

MAX_BOUND: Final = (1 << 32) - 1
_DIALECTS: Final[Mapping[str, str]] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
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
    "/v1/messages/count_tokens": "tokenize",
}
"""Whose answer is had with the prompt's last token."""
_BOUNDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_STRUCTURED: Final = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),  # vLLM
    *("json_schema", "regex", "ebnf", "structural_tag"),  # SGLang
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SMALL_BYTES: Final = 4096
_LONG: Final = object()
"""A value that is there, and too long to be looked into."""


def output_of(path: str, fields: Fields) -> Output:
    """What a request tells of its output.

    Args:
        path: Of its URL, without the query; "" = unknown.
        fields: Of its body; empty = nobody has seen that.
    """
    if path in _PROMPT_ONLY:
        return Output(1, 1, _PROMPT_ONLY[path], unseen=True)
    outputs = _outputs(fields)
    bound = min(_bound(fields) * outputs, MAX_BOUND)
    return Output(
        expected_tokens=bound if _reaches_it(fields, bound) else 0,
        max_tokens=bound,
        output_class="/".join((_dialect(path, fields), *_traits(fields), *(("many",) if outputs > 1 else ()))),
        unseen=bool(fields) and _value(fields, "stream") is not True,
    )


def _dialect(path: str, fields: Fields) -> str:
    named = _DIALECTS.get(path)
    if named is not None:
        # Where a completion says nothing of its length, engines end it after a few tokens, unlike any other request.
        return f"{named}/short" if named == "completions" and fields and "max_tokens" not in fields else named
    return "chat" if "messages" in fields else "completions" if "prompt" in fields else "other"


def _bound(fields: Fields) -> int:
    """Tokens at which each of a request's outputs ends; 0 = it does not say."""
    sampling = _value(fields, "sampling_params")
    given = [_value(fields, name) for name in _BOUNDS]
    given.append(sampling.get("max_new_tokens") if isinstance(sampling, dict) else None)
    return next((bound for bound in given if _is_number(bound) and 0 < bound <= MAX_BOUND), 0)


def _reaches_it(fields: Fields, bound: int) -> bool:
    """Whether a request's output is as long as it may be, as that of a benchmark is."""
    if not bound or _value(fields, "stop") or _value(fields, "stop_token_ids"):
        return False
    least = _value(fields, "min_tokens")
    return _value(fields, "ignore_eos") is True or (_is_number(least) and least >= bound)


def _outputs(fields: Fields) -> int:
    """How many answers are generated: `n`, or the `best_of` from which these are taken, to each of the prompts."""
    try:
        prompt = fields.get("prompt")
    except InvalidArgument:
        prompt = None  # one that is too long to be looked at
    prompts = prompt.number if isinstance(prompt, Prompts) else 1
    asked = [n for name in ("n", "best_of") if _is_number(n := _value(fields, name)) and n > 0]
    return max(asked, default=1) * prompts


def _traits(fields: Fields) -> Iterator[str]:
    """What tells lengths apart, beside the dialect."""
    choice = _value(fields, "tool_choice")
    if "tools" in fields.places and fields.places["tools"].values > 1 and choice != "none":
        yield "tools" if choice in (None, "auto") else "call"
    if _is_structured(fields):
        yield "structured"
    effort = _effort(fields)
    if effort:
        yield effort


def _is_structured(fields: Fields) -> bool:
    text = _value(fields, "text")
    formats = (_value(fields, "response_format"), text.get("format") if isinstance(text, dict) else text)
    if any(_is_format(each) for each in formats):
        return True
    return any(_value(fields, name) not in (None, "") for name in _STRUCTURED)


def _is_format(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("type") not in (None, "text")
    return value is _LONG


def _effort(fields: Fields) -> str:
    """How much a model is to think before it answers, as far as a request says."""
    template = _value(fields, "chat_template_kwargs")
    template = template if isinstance(template, dict) else {}
    of_response, of_message = _value(fields, "reasoning"), _value(fields, "output_config")
    given = [_value(fields, "reasoning_effort"), template.get("reasoning_effort")]
    given += [each.get("effort") for each in (of_response, of_message) if isinstance(each, dict)]
    for effort in given:
        if isinstance(effort, str) and effort in _EFFORTS:
            return f"effort-{effort}"
    asked = _value(fields, "thinking")
    thinks = (asked.get("type") != "disabled") if isinstance(asked, dict) and "type" in asked else None
    for name in ("enable_thinking", "thinking"):
        if isinstance(template.get(name), bool):
            thinks = template[name]
    return "" if thinks is None else "thinking" if thinks else "no-thinking"


def _value(fields: Fields, name: str) -> Any:
    """A field's value where it is small; None = there is none."""
    place = fields.places.get(name)
    if place is None:
        return None
    return fields[name] if place.end - place.value <= _SMALL_BYTES else _LONG


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
