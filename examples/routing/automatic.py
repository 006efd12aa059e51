"""The gateway decides, runs the request and accounts for it; the caller reads tokens.

python examples/routing/automatic.py --gateway localhost:7050 --model mock-model
"""

from __future__ import annotations

import argparse
import asyncio

from kvscout_client import Router, StopConditions

PROMPT = list(range(1, 513))


async def main(gateway: str, model: str) -> None:
    """Asks twice: the second time most of the prompt is cached where the first one ran."""
    async with Router(gateway, model=model) as router:
        for turn in (1, 2):
            worker, generated, cached = None, 0, None
            async for chunk in router.generate(PROMPT, stop=StopConditions(max_tokens=16)):
                if chunk.decision is not None:
                    worker = chunk.decision.worker
                generated += len(chunk.token_ids)
                if chunk.usage is not None:
                    cached = chunk.usage.cached_tokens
            assert worker is not None
            print(f"turn {turn}: {worker.worker_id} generated {generated} tokens, {cached} of the prompt were cached")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--model", default="mock-model")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.gateway, arguments.model))
