"""LiteLLM in front of a gateway, over each API: a tool is called, streamed, and the next turn finds its prompt cached.

pip install litellm
python agent_litellm.py http://localhost:8000 MODEL
"""

from __future__ import annotations

import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
litellm.suppress_debug_info = True


def routes(url: str, model: str) -> dict[str, dict[str, str]]:
    """Return what tells LiteLLM where each API is: the prefix of the model chooses it."""
    return {
        "chat completions": {"model": f"openai/{model}", "api_base": f"{url}/v1"},
        "responses": {"model": f"openai/responses/{model}", "api_base": f"{url}/v1"},
        "messages": {"model": f"anthropic/{model}", "api_base": url},
    }


def turns(name: str, route: dict[str, str]) -> None:
    """Hold a conversation of two turns."""
    print(name)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You read files by way of {name}. " * 40},
        {"role": "user", "content": "What does setup.py say?"},
    ]
    for _ in range(2):
        stream = litellm.completion(
            **route,
            api_key="unused",
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            max_tokens=1024,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = litellm.stream_chunk_builder(list(stream), messages=messages)
        message, usage = answer.choices[0].message, answer.usage
        details = usage.prompt_tokens_details
        print(
            f"  {message.tool_calls[0].function.name}({message.tool_calls[0].function.arguments[:24]}…), "
            f"{usage.prompt_tokens} prompt tokens, {details.cached_tokens if details else 0} cached"
        )
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "from setuptools import setup"}
        messages += [message.model_dump(), result]


if __name__ == "__main__":
    for name, route in routes(*sys.argv[1:3]).items():
        turns(name, route)
