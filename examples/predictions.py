"""Share of exact predictions of an engine's cached tokens, through each of the gateway's fronts.

    python predictions.py --front grpc   [--gateway localhost:7050] [--metrics http://127.0.0.1:9093/metrics]
    python predictions.py --front openai [--url http://127.0.0.1:8000] …
    python predictions.py --front picker [--url http://127.0.0.1:8080] …     (an Envoy that asks the gateway)

Conversations of a few turns, one request after the other, so that each prediction can be held against what the engine
says in the very next moment. Over HTTP every second one is a chat completion, every third one streams. Needs the
package `openai`, engines that report cached tokens (vLLM: `--enable-prompt-tokens-details`, SGLang:
`--enable-cache-report`), and the words of `tiny_model.py` as tokens.
"""

from __future__ import annotations

import argparse
import asyncio
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

Turns = list[dict[str, str]]


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


async def converse(ask: Ask, requests: int, longest: int, draw: random.Random) -> tuple[int, int]:
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
        talk.append({"role": "user", "content": words(draw.randrange(10, 90))})
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
    parser.add_argument("--front", choices=["grpc", "openai", "picker"], required=True)
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--url", help="of the OpenAI API or of Envoy")
    parser.add_argument("--metrics", default="http://127.0.0.1:9093/metrics")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=600, help="prompt after which a conversation ends")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    http = options.url or f"http://127.0.0.1:{8000 if options.front == 'openai' else 8080}"

    async def run() -> tuple[int, int]:
        ask = (
            grpc_front(options.gateway, options.model) if options.front == "grpc" else openai_front(http, options.model)
        )
        return await converse(ask, options.requests, options.longest, random.Random(options.seed))

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
