"""An agent of LangChain behind a gateway, over each API: it calls a tool and goes on with the result.

pip install langchain langchain-openai langchain-anthropic
python agent_langchain.py http://localhost:8000 MODEL
"""

from __future__ import annotations

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def read_file(path: str) -> str:
    """Reads a file."""
    return "from setuptools import setup"


def models(url: str, model: str) -> dict[str, BaseChatModel]:
    """Return a chat model for each API."""
    return {
        "chat completions": ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, stream_usage=True),
        "responses": ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, use_responses_api=True),
        "messages": ChatAnthropic(base_url=url, api_key="unused", model_name=model, max_tokens=1024),
    }


def turns(name: str, model: BaseChatModel) -> None:
    """Hold a conversation of two turns."""
    print(name)
    agent = model.bind_tools([read_file], tool_choice="any")
    messages = [SystemMessage(f"You are LangChain, by way of {name}. " * 40), HumanMessage("What does setup.py say?")]
    for _ in range(2):
        answer = None
        for chunk in agent.stream(messages):
            answer = chunk if answer is None else answer + chunk
        call, usage = answer.tool_calls[0], answer.usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        print(f"  {call['name']}({str(call['args'])[:24]}…), {usage['input_tokens']} prompt tokens, {cached} cached")
        messages += [answer, ToolMessage(read_file.invoke(call["args"]), tool_call_id=call["id"])]


if __name__ == "__main__":
    for name, model in models(*sys.argv[1:3]).items():
        turns(name, model)
