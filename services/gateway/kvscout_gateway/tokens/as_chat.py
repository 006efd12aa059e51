"""The chat completion that an engine makes of a request in another dialect. Pure.

Engines render no messages or responses themselves: they turn such a request into a chat completion, which the model's
template renders. A prompt that is to be the engine's begins with the same conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import NotText, TemplateTraits, calls_of
from kvscout_gateway.tokens.messages_as_chat import sglang_chat_of_messages, vllm_chat_of_messages
from kvscout_gateway.tokens.responses_as_chat import sglang_chat_of_responses, vllm_chat_of_responses

CHAT: Final = "chat"
MESSAGES: Final = "messages"
RESPONSES: Final = "responses"
_CHAT_FIELDS: Final = frozenset(
    ("messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "add_special_tokens",
     "documents", "reasoning_effort", "chat_template", "reasoning", "model", "chat_template_kwargs")
)  # fmt: skip
"""Fields of a chat completion on which its prompt depends."""
_ANY_FIELDS: Final = ("model", "chat_template_kwargs")
"""Those of all dialects."""
_CHANGED: Final = frozenset(("tool_calls", "reasoning_content"))
"""Fields of messages that vLLM changes."""


def as_chat(
    dialect: str,
    request: Mapping[str, Any],
    *,
    engine: EngineKind = EngineKind.VLLM,
    traits: TemplateTraits | None = None,
) -> dict[str, Any]:
    """Return the chat completion that the engine makes of a request, as far as its prompt depends on it.

    Args:
        dialect: "chat", "messages" (Anthropic's) or "responses" (OpenAI's).
        request: The client's body.
        engine: What will run it: SGLang, or any other, which does as vLLM.
        traits: Of the model's template; None = those of most.

    Raises:
        NotText: The engine refuses the request, or its prompt depends on what is not known here.
        InvalidArgument: A field is too long to be read.
    """
    sglang = engine is EngineKind.SGLANG
    traits = traits or TemplateTraits()
    if dialect == CHAT:
        chat = {name: value for name in request if name in _CHAT_FIELDS and (value := request[name]) is not None}
        return chat if sglang else _checked(chat)
    if dialect == MESSAGES:
        chat = sglang_chat_of_messages(request) if sglang else vllm_chat_of_messages(request, *traits)
    elif dialect == RESPONSES:
        chat = sglang_chat_of_responses(request) if sglang else vllm_chat_of_responses(request)
    else:
        raise NotText(f"no chat completion is made of {dialect!r}")
    chat |= {name: value for name in _ANY_FIELDS if (value := request.get(name)) is not None}
    return _checked(chat) if dialect == MESSAGES and not sglang else chat


def _checked(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion as vLLM has it once it has checked it.

    Fields of tool calls are in its own order, which templates show that write a call as JSON.
    """
    messages = chat.get("messages")
    if isinstance(messages, list):
        chat["messages"] = [
            _message(message) if isinstance(message, dict) and not _CHANGED.isdisjoint(message) else message
            for message in messages
        ]
    return chat


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("reasoning") is None and message.get("reasoning_content") is not None:
        message = message | {"reasoning": message["reasoning_content"]}
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_call(*both) for both in calls_of(message["tool_calls"])]}


def _call(call: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    shown = {name: function.get(name) for name in ("arguments", "name")}
    return {"id": call.get("id"), "function": shown, "type": "function"}
