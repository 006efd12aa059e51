"""How often the gateway predicts an engine's cached tokens exactly, through the OpenAI front.

    python openai_predictions.py --requests 300 --model tiny [--url http://127.0.0.1:8000]

Conversations of a few turns, one request after the other, so that each prediction can be held against what the engine
says in the very next moment: every second one is a chat completion, every third one streams. Needs the package
`openai`, engines with `--enable-prompt-tokens-details`, and words w0 … w4087 as tokens, as `tiny_model.py` makes them.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import urllib.request
from typing import Any

from openai import OpenAI

SETTLE_SECONDS = 0.05
"""Between requests: what the last one stored is announced a moment after its answer."""


def words(draw: random.Random, count: int) -> str:
    """Text of so many tokens."""
    return " ".join(f"w{draw.randrange(4000)}" for _ in range(count))


def counted(url: str) -> dict[str, float]:
    """The gateway's own account of its predictions, all workers together, and of its tokens."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        page = answer.read().decode()
    found = {}
    for name in ("predictions_checked", "mispredictions", "prediction_error_tokens", "kv_hit_rate"):
        sample = re.search(rf'^kvscout_{name}(?:_total)?{{[^}}]*worker=""[^}}]*}} (\S+)', page, re.MULTILINE)
        found[name] = float(sample[1]) if sample else 0.0
    for outcome, value in re.findall(r'^kvscout_token_parity_total{outcome="(\w+)"} (\S+)', page, re.MULTILINE):
        found[f"tokens_{outcome}"] = float(value)
    return found


def ask(client: OpenAI, model: str, turns: list[dict[str, str]], number: int) -> tuple[str, Any]:
    """One request; what was said, and the usage."""
    stream = {"stream": True, "stream_options": {"include_usage": True}} if number % 3 == 0 else {}
    extra: Any = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}, **stream}
    if number % 2:
        made: Any = client.chat.completions.create(model=model, messages=turns, **extra)  # type: ignore[arg-type]
    else:
        text = " ".join(turn["content"] for turn in turns)
        made = client.completions.create(model=model, prompt=text, **extra)
    said, usage = "", None
    for chunk in made if stream else [made]:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            said += (part.content if part is not None else choice.text) or ""
    return said, usage


def main() -> None:
    """Asks, and prints what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="unused", max_retries=0)
    draw, before, started = random.Random(options.seed), counted(options.url), time.monotonic()
    system = [words(draw, 80) for _ in range(4)]
    talks: list[list[dict[str, str]]] = []
    prompt_tokens = cached_tokens = 0
    for number in range(options.requests):
        if not talks or (len(talks) < 6 and draw.random() < 0.4):
            talks.append([{"role": "system", "content": draw.choice(system)}])
        talk = draw.choice(talks)
        talk.append({"role": "user", "content": words(draw, draw.randrange(10, 90))})
        said, usage = ask(client, options.model, talk, number)
        prompt_tokens += usage.prompt_tokens
        cached_tokens += (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        talk.append({"role": "assistant", "content": said})
        if usage.prompt_tokens > 600:
            talks.remove(talk)
        time.sleep(SETTLE_SECONDS)
    time.sleep(1.0)
    after = counted(options.url)
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    checked, wrong = int(change["predictions_checked"]), int(change["mispredictions"])
    print(f"{options.requests} requests in {time.monotonic() - started:.0f} s, {prompt_tokens:,} prompt tokens")
    print(f"cached, as the engines say: {cached_tokens:,} tokens, {cached_tokens / max(1, prompt_tokens):.1%}")
    print(f"predicted exactly: {checked - wrong} of {checked} checked, {(checked - wrong) / max(1, checked):.2%}")
    print("tokens compared: " + ", ".join(f"{n[7:]} {v:.0f}" for n, v in sorted(change.items()) if n[:7] == "tokens_"))


if __name__ == "__main__":
    main()
