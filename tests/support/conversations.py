"""Conversations of agents in each dialect, as clients send them: tools, thinking, images, parallel results of tools."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Where the file is"}, "limit": {"type": "integer"}},
    "required": ["path"],
}
_NO_TYPE = {"properties": {"city": {"type": "string"}}}
_HEADER = "x-anthropic-billing-header: cc_version=2.1.0; cch=a91f3;"


class Conversation(NamedTuple):
    """One request."""

    name: str
    dialect: str
    request: dict[str, Any]


def png(red: int, width: int = 56) -> bytes:
    """Return a square image of one colour."""
    rows = (b"\0" + bytes((red, 64, 128)) * width) * width
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, width, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def base64_png(red: int) -> str:
    """Return it as messages carry it."""
    return base64.b64encode(png(red)).decode()


def conversations(model: str) -> Iterator[Conversation]:
    """Yield conversations of text."""
    for name, request in _chat():
        yield Conversation(f"chat: {name}", "chat", {"model": model, "max_tokens": 4, **request})
    for name, request in _messages():
        yield Conversation(f"messages: {name}", "messages", {"model": model, "max_tokens": 4, **request})
    for name, request in _responses():
        yield Conversation(f"responses: {name}", "responses", {"model": model, "max_output_tokens": 4, **request})


def conversations_with_images(model: str) -> Iterator[Conversation]:
    """Yield conversations in which there are images."""
    ask = {"type": "text", "text": "what is this?"}

    def url(red: int) -> str:
        return f"data:image/png;base64,{base64_png(red)}"

    def block(red: int) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_png(red)}}

    seen = [ask, {"type": "image_url", "image_url": {"url": url(1)}}]
    more = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url(2)}}, {"type": "text", "text": "and this?"}],
    }
    chat = {
        "one": [{"role": "user", "content": seen}],
        "two turns": [{"role": "user", "content": seen}, {"role": "assistant", "content": "a square"}, more],
        "the same twice": [{"role": "user", "content": [*seen, *seen]}],
    }
    for name, messages in chat.items():
        yield Conversation(f"chat: {name}", "chat", {"model": model, "max_tokens": 4, "messages": messages})
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [ask, block(3)]}
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    anthropic: dict[str, list[dict[str, Any]]] = {
        "one": [{"role": "user", "content": [ask, block(1)]}],
        "of a tool": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }
    for name, messages in anthropic.items():
        yield Conversation(f"messages: {name}", "messages", {"model": model, "max_tokens": 4, "messages": messages})
    parts = [{"type": "input_text", "text": "what is this?"}, {"type": "input_image", "image_url": url(1)}]
    items = [{"type": "message", "role": "user", "content": parts}]
    yield Conversation("responses: one", "responses", {"model": model, "max_output_tokens": 4, "input": items})


def _chat() -> Iterator[tuple[str, dict[str, Any]]]:
    tools = [_chat_tool("read", "Reads a file", _SCHEMA), _chat_tool("weather", None, _NO_TYPE)]
    hello = {"role": "user", "content": "hello there"}
    system = {"role": "system", "content": "You are a careful assistant."}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py", "limit": 3}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call, other]}
    results = [
        {"role": "tool", "tool_call_id": "c1", "content": "import os"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]
    yield "one message", {"messages": [hello]}
    yield "a system message", {"messages": [system, hello]}
    yield (
        "parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    )
    yield "three turns", {"messages": [system, hello, {"role": "assistant", "content": "hi"}, hello]}
    yield "tools", {"messages": [system, hello], "tools": tools}
    yield "a strict tool", {"messages": [hello], "tools": [_chat_tool("read", "Reads", _SCHEMA, strict=True)]}
    yield "a deferred tool", {"messages": [hello], "tools": [{**tools[0], "defer_loading": True}, tools[1]]}
    yield "tool_choice none", {"messages": [hello], "tools": tools, "tool_choice": "none"}
    yield "parallel results", {"messages": [system, hello, called, *results], "tools": tools}
    yield (
        "a result with cache_control",
        {
            "messages": [
                hello,
                called,
                {
                    "role": "tool",
                    "tool_call_id": "c1",
                    "content": [
                        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "two"},
                    ],
                },
            ],
            "tools": tools,
        },
    )
    yield "broken arguments", {"messages": [hello, _assistant_call("{"), results[0], hello], "tools": tools}
    yield "reasoning", {"messages": [hello, {"role": "assistant", "content": "hi", "reasoning": "greet back"}, hello]}
    yield (
        "reasoning_content",
        {"messages": [hello, {"role": "assistant", "content": "hi", "reasoning_content": "greet back"}, hello]},
    )
    yield "effort", {"messages": [hello], "reasoning_effort": "low"}
    yield "no thinking", {"messages": [hello], "chat_template_kwargs": {"enable_thinking": False}}
    yield "a developer", {"messages": [{"role": "developer", "content": "be short"}, hello]}
    yield (
        "continued",
        {
            "messages": [hello, {"role": "assistant", "content": "Once upon"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    yield "a billing header", {"messages": [{"role": "system", "content": f"{_HEADER}\nYou help."}, hello]}


def _messages() -> Iterator[tuple[str, dict[str, Any]]]:
    tools = [
        {
            "name": "read",
            "description": "Reads a file",
            "input_schema": _SCHEMA,
            "cache_control": {"type": "ephemeral"},
        },
        {"name": "weather", "input_schema": _NO_TYPE},
    ]
    hello = {"role": "user", "content": "hello there"}
    system = [
        {"type": "text", "text": _HEADER},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Work in small steps."},
    ]
    thought = {"type": "thinking", "thinking": "I should read it.", "signature": "abc"}
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "ä.py", "limit": 3}}
    other = {"type": "tool_use", "id": "t2", "name": "weather", "input": {}}
    says = {"type": "text", "text": "Let me look."}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "import os"}
    result_parts = {
        "type": "tool_result",
        "tool_use_id": "t2",
        "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}],
        "is_error": False,
    }
    reminder = {"type": "text", "text": "<system-reminder>be brief</system-reminder>"}
    base = {"system": system, "tools": tools}
    yield "one message", {"messages": [hello]}
    yield "a system text", {"system": "You are an agent.", "messages": [hello]}
    yield "system blocks", {"system": system, "messages": [hello]}
    yield "blocks", {"messages": [{"role": "user", "content": [says, reminder]}]}
    yield "tools", {**base, "messages": [hello]}
    yield "a tool use", {**base, "messages": [hello, {"role": "assistant", "content": [says, use]}, _user(result)]}
    yield (
        "parallel results",
        {**base, "messages": [hello, {"role": "assistant", "content": [use, other]}, _user(result, result_parts)]},
    )
    yield (
        "results and text",
        {**base, "messages": [hello, {"role": "assistant", "content": [use]}, _user(reminder, result, says)]},
    )
    yield (
        "thinking",
        {
            **base,
            "messages": [hello, {"role": "assistant", "content": [thought, says, use]}, _user(result)],
            "thinking": {"type": "adaptive"},
        },
    )
    yield "only thinking", {"messages": [hello, {"role": "assistant", "content": [thought]}, hello]}
    yield (
        "redacted thinking",
        {
            "messages": [
                hello,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, says]},
                hello,
            ]
        },
    )
    yield "no thinking", {"messages": [hello], "thinking": {"type": "disabled"}}
    yield "effort", {"messages": [hello], "output_config": {"effort": "high"}}
    yield (
        "an empty result",
        {
            **base,
            "messages": [
                hello,
                {"role": "assistant", "content": [use]},
                _user({"type": "tool_result", "tool_use_id": "t1"}),
            ],
        },
    )
    yield "tool_choice any", {**base, "messages": [hello], "tool_choice": {"type": "any"}}
    yield (
        "an inline system message",
        {
            "system": "You are an agent.",
            "messages": [
                hello,
                {"role": "assistant", "content": "hi"},
                {
                    "role": "system",
                    "content": [{"type": "text", "text": _HEADER}, {"type": "text", "text": "be brief"}],
                },
                hello,
            ],
        },
    )
    yield (
        "several turns",
        {
            **base,
            "messages": [
                hello,
                {"role": "assistant", "content": [says, use]},
                _user(result),
                {"role": "assistant", "content": [{"type": "text", "text": "It imports os."}]},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "thanks", "cache_control": {"type": "ephemeral"}}],
                },
            ],
        },
    )


def _responses() -> Iterator[tuple[str, dict[str, Any]]]:
    tools = [
        {"type": "function", "name": "read", "description": "Reads a file", "parameters": _SCHEMA, "strict": False},
        {"type": "function", "name": "weather", "parameters": _NO_TYPE},
    ]
    hello = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello there"}]}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I should read."}],
    }
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It reads."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.py"}'}
    other = {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "import os"}
    output_parts = {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "It imports os.", "annotations": []}],
    }
    base = {"instructions": "You are an agent.", "tools": tools, "store": False}
    yield "a text", {"input": "hello there"}
    yield "instructions", {"instructions": "You are an agent.", "input": "hello there"}
    yield "items", {"input": [hello, said, hello]}
    yield (
        "easy items",
        {
            "input": [
                {"role": "developer", "content": "be short"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        },
    )
    yield "tools", {**base, "input": [hello]}
    yield "a call", {**base, "input": [hello, thought, call, output]}
    yield "parallel calls", {**base, "input": [hello, thought, said, call, other, output, output_parts]}
    yield "a summary", {**base, "input": [hello, summary, call, output, said, hello]}
    yield "thinking twice", {"input": [hello, thought, summary, said, said, hello]}
    yield "effort", {"input": "hello there", "reasoning": {"effort": "low"}}
    yield "no reasoning", {"input": "hello there", "reasoning": {"effort": "none"}}
    yield "tool_choice none", {**base, "input": [hello], "tool_choice": "none"}
    yield (
        "a custom tool",
        {
            "tools": [{"type": "custom", "name": "patch", "description": "Applies a patch"}],
            "input": [
                hello,
                {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** ä"},
                {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
            ],
        },
    )
    yield "a tool of the server's", {"tools": [{"type": "web_search"}, tools[0]], "input": [hello]}
    yield "unfinished", {"input": [hello, {**said, "status": "in_progress"}]}


def _chat_tool(name: str, description: str | None, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **more}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def _assistant_call(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}
