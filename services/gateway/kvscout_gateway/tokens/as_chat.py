"""The chat completion that an engine makes of a request in another dialect. Pure.

Engines render no messages or responses themselves: they turn such a request into a chat completion, which the model's
template renders. A prompt that is to be the engine's begins with the same conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.messages_as_chat import vllm_chat_of_messages
from kvscout_gateway.tokens.responses_as_chat import sglang_chat_of_responses, vllm_chat_of_responses
from kvscout_gateway.tokens.sglang_messages import sglang_chat_of_messages

CHAT: Final = "chat"
MESSAGES: Final = "messages"
RESPONSES: Final = "responses"


def as_chat(
    dialect: str,
    request: Mapping[str, Any],
    *,
    engine: EngineKind = EngineKind.VLLM,
    merge_system: bool = False,
) -> dict[str, Any]:
    """Return the chat completion that the engine makes of a request, as far as its prompt depends on it.

    Args:
        dialect: "messages" (Anthropic's) or "responses" (OpenAI's).
        request: The client's body.
        engine: What will run it: SGLang, or any other, which does as vLLM.
        merge_system: The model's template refuses a system message that is not the first: vLLM puts the text of all of
            them into the first.

    Raises:
        NotText: The engine refuses the request, or its prompt depends on what is not known here.
        InvalidArgument: A field is too long to be read.
    """
    sglang = engine is EngineKind.SGLANG
    if dialect == MESSAGES:
        chat = sglang_chat_of_messages(request) if sglang else vllm_chat_of_messages(request, merge_system=merge_system)
    elif dialect == RESPONSES:
        chat = sglang_chat_of_responses(request) if sglang else vllm_chat_of_responses(request)
    else:
        raise NotText(f"no chat completion is made of {dialect!r}")
    for name in ("model", "chat_template_kwargs"):
        if (value := request.get(name)) is not None:
            chat[name] = value
    return chat
