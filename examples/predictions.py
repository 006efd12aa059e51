"""Share of exact predictions of an engine's cached tokens, through each of the gateway's fronts.

    python predictions.py --front grpc   [--gateway localhost:7050] [--metrics http://127.0.0.1:9093/metrics]
    python predictions.py --front openai [--url http://127.0.0.1:8000] …
    python predictions.py --front picker [--url http://127.0.0.1:8080] …     (an Envoy that asks the gateway)
    python predictions.py --front messages|responses [--url http://127.0.0.1:8000] …     (agents with tools)

Conversations of a few turns, one request after the other, so that each prediction can be held against what the engine
says in the very next moment. Over HTTP every second one is a chat completion, every third one streams; agents have
tools, and every second turn of theirs is the result of one. Needs the packages `openai` and `anthropic`, engines that
report cached tokens (vLLM: `--enable-prompt-tokens-details`, SGLang: `--enable-cache-report`), and the words of
`tiny_model.py` as tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tiny_model import WORDS

SETTLE_SECONDS = 0.05
"""Between requests: what the last one stored is announced a moment after its answer."""
TOKENS = {word: token for token, word in enumerate(WORDS)}
OUTPUT_TOKENS = 8

Turn = dict[str, Any]
"""`role` and `content`, and `of_tool` if that is what a tool returned."""
Turns = list[Turn]


class Answer(NamedTuple):
    """Answer, as text and as the engine's usage."""

    text: str
    prompt_tokens: int
    cached_tokens: int


Ask = Callable[[Turns, int], Awaitable[Answer]]
"""Runs one request: the conversation so far, and which one it is."""


def text_of(turns: Turns) -> str:
    """A conversation without its roles."""
    return " ".join(turn["content"] for turn in turns)


def openai_front(url: str, model: str) -> Ask:
    """OpenAI's API, of the gateway or behind a proxy that asks it."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

    async def ask(turns: Turns, number: int) -> Answer:
        stream = {"stream": True, "stream_options": {"include_usage": True}} if number % 3 == 0 else {}
        how: Any = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}, **stream}
        if number % 2:
            made: Any = await client.chat.completions.create(model=model, messages=turns, **how)  # type: ignore[arg-type]
        else:
            made = await client.completions.create(model=model, prompt=text_of(turns), **how)
        text, usage = "", None
        for chunk in [chunk async for chunk in made] if stream else [made]:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                part = getattr(choice, "delta", None) or getattr(choice, "message", None)
                text += (part.content if part is not None else choice.text) or ""
        assert usage is not None
        details = usage.prompt_tokens_details
        return Answer(text, usage.prompt_tokens, (details and details.cached_tokens) or 0)

    return ask


def said_and_done(turns: Turns, call: Callable[[int, str], Any], result: Callable[[int, str], Any]) -> list[Any]:
    """A conversation in which the assistant's turns that end in a call are one, and what follows is its result."""
    items: list[Any] = []
    for place, turn in enumerate(turns):
        answered = place + 1 < len(turns) and turns[place + 1].get("of_tool")
        if turn["role"] == "assistant" and answered:
            items.append(call(place, turn["content"]))
        elif turn.get("of_tool"):
            items.append(result(place - 1, turn["content"]))
        else:
            items.append({"role": turn["role"], "content": turn["content"]})
    return items


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "w1000", "description": "w1001 w1002 w1003 w1004"}


def messages_front(url: str, model: str) -> Ask:
    """Anthropic's messages, by its client."""
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=url, api_key="unused", max_retries=0)

    def call(place: int, words: str) -> Any:
        block = {"type": "tool_use", "id": f"t{place}", "name": TOOL["name"], "input": {"path": words}}
        return {"role": "assistant", "content": [block]}

    def result(place: int, words: str) -> Any:
        block = {"type": "tool_result", "tool_use_id": f"t{place}", "content": words}
        return {"role": "user", "content": [block]}

    async def ask(turns: Turns, number: int) -> Answer:
        how: Any = {
            "model": model,
            "max_tokens": OUTPUT_TOKENS,
            "extra_body": {"temperature": 0},
            "system": [{"type": "text", "text": turns[0]["content"]}],
            "messages": said_and_done(turns[1:], call, result),
            "tools": [TOOL | {"input_schema": SCHEMA}],
        }
        if number % 3 == 0:
            async with client.messages.stream(**how) as stream:
                made = await stream.get_final_message()
        else:
            made = await client.messages.create(**how)
        usage, text = made.usage, "".join(block.text for block in made.content if block.type == "text")
        cached = usage.cache_read_input_tokens or 0
        return Answer(text, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached)

    return ask


def responses_front(url: str, model: str) -> Ask:
    """OpenAI's responses, by its client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)

    def call(place: int, words: str) -> Any:
        arguments = json.dumps({"path": words})
        return {"type": "function_call", "call_id": f"t{place}", "name": TOOL["name"], "arguments": arguments}

    def result(place: int, words: str) -> Any:
        return {"type": "function_call_output", "call_id": f"t{place}", "output": words}

    async def ask(turns: Turns, number: int) -> Answer:
        how: Any = {
            "model": model,
            "max_output_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "instructions": turns[0]["content"],
            "input": said_and_done(turns[1:], call, result),
            "tools": [TOOL | {"type": "function", "parameters": SCHEMA}],
        }
        if number % 3 == 0:
            async with client.responses.stream(**how) as stream:
                made: Any = await stream.get_final_response()
        else:
            made = await client.responses.create(**how)
        usage = made.usage
        return Answer(made.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens)

    return ask


def grpc_front(gateway: str, model: str) -> Ask:
    """`Generate`, with token ids in and out."""
    from kvscout_client import Router, SamplingOptions, StopConditions

    router = Router(gateway, model=model)
    stop = StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def ask(turns: Turns, number: int) -> Answer:
        prompt = [TOKENS[word] for word in text_of(turns).split()]
        made: list[int] = []
        usage = None
        async for chunk in router.generate(prompt, stop=stop, sampling=SamplingOptions(temperature=0)):
            made += chunk.token_ids
            usage = chunk.usage or usage
        assert usage is not None
        return Answer(" ".join(WORDS[token] for token in made), usage.prompt_tokens, usage.cached_tokens or 0)

    return ask


HTTP_FRONTS = {
    "openai": openai_front,
    "picker": openai_front,
    "messages": messages_front,
    "responses": responses_front,
}


def counted(url: str) -> dict[str, float]:
    """The gateway's own account of its predictions, all workers together, and of its tokens."""
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
    found = {}
    for name in ("predictions_checked", "mispredictions", "prediction_error_tokens"):
        found[name] = sum(map(float, re.findall(rf"^kvscout_{name}_total{{[^}}]*}} (\S+)", page, re.MULTILINE)))
    for outcome, value in re.findall(r'^kvscout_token_parity_total{outcome="(\w+)"} (\S+)', page, re.MULTILINE):
        found[f"tokens_{outcome}"] = float(value)
    for helper, value in re.findall(r'^kvscout_degraded_decisions_total{helper="(\w+)"} (\S+)', page, re.MULTILINE):
        found[f"degraded_{helper}"] = float(value)
    return found


async def converse(ask: Ask, requests: int, longest: int, draw: random.Random, *, with_tools: bool) -> tuple[int, int]:
    """Runs the requests; the tokens of their prompts, and how many of them the engines had cached."""

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(4000)}" for _ in range(count))

    system = [words(80) for _ in range(4)]
    talks: list[Turns] = []
    prompt_tokens = cached_tokens = 0
    for number in range(requests):
        if not talks or (len(talks) < 6 and draw.random() < 0.4):
            talks.append([{"role": "system", "content": draw.choice(system)}])
        talk = draw.choice(talks)
        turn: Turn = {"role": "user", "content": words(draw.randrange(10, 90))}
        if with_tools and talk[-1]["role"] == "assistant" and draw.random() < 0.5:
            turn["of_tool"] = True
        talk.append(turn)
        answer = await ask(talk, number)
        prompt_tokens += answer.prompt_tokens
        cached_tokens += answer.cached_tokens
        talk.append({"role": "assistant", "content": answer.text})
        if answer.prompt_tokens > longest:
            talks.remove(talk)
        await asyncio.sleep(SETTLE_SECONDS)
    return prompt_tokens, cached_tokens


def main() -> None:
    """Asks, and prints what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--front", choices=["grpc", *HTTP_FRONTS], required=True)
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--url", help="of the OpenAI API or of Envoy")
    parser.add_argument("--metrics", default="http://127.0.0.1:9093/metrics")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=600, help="prompt after which a conversation ends")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    http = options.url or f"http://127.0.0.1:{8080 if options.front == 'picker' else 8000}"

    async def run() -> tuple[int, int]:
        if options.front == "grpc":
            ask = grpc_front(options.gateway, options.model)
        else:
            ask = HTTP_FRONTS[options.front](http, options.model)
        draw, with_tools = random.Random(options.seed), options.front in ("messages", "responses")
        return await converse(ask, options.requests, options.longest, draw, with_tools=with_tools)

    before, started = counted(options.metrics), time.monotonic()
    prompt_tokens, cached_tokens = asyncio.run(run())
    seconds = time.monotonic() - started
    time.sleep(1.0)
    after = counted(options.metrics)
    change = {name: int(after[name] - before.get(name, 0.0)) for name in sorted(after)}
    checked, wrong = change["predictions_checked"], change["mispredictions"]
    print(f"{options.requests} requests in {seconds:.0f} s, {prompt_tokens:,} prompt tokens")
    print(f"cached, as the engines say: {cached_tokens:,} tokens, {cached_tokens / max(1, prompt_tokens):.1%}")
    print(f"predicted exactly: {checked - wrong} of {checked} checked, {(checked - wrong) / max(1, checked):.2%}")
    for kind, title in (("tokens_", "tokens compared"), ("degraded_", "placed without")):
        outcomes = ", ".join(
            f"{name.removeprefix(kind)} {n}" for name, n in change.items() if name.startswith(kind) and n
        )
        if outcomes:
            print(f"{title}: {outcomes}")


if __name__ == "__main__":
    main()
