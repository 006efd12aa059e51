"""The gateway decides and books; the caller sends the prompt to the engine itself, and says what happens.

python examples/routing/manual_lifecycle.py --gateway localhost:7050 --model mock-model
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid

import aiohttp

from kvscout_client import Router

PROMPT = list(range(1, 513))


async def main(gateway: str, model: str) -> None:
    """Runs one request on an engine that speaks as vLLM does."""
    async with (
        Router(gateway, model=model) as router,
        # Whatever happens in here, leaving it frees what is booked.
        await router.route(PROMPT, request_id=uuid.uuid4().hex, max_output_tokens=16) as booking,
        aiohttp.ClientSession() as http,
    ):
        decision = booking.decision
        print(
            f"booked on {decision.worker.worker_id}: {decision.overlap_blocks} of {decision.num_blocks} blocks cached"
        )
        body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "stream": True, "return_token_ids": True}
        headers = {"X-Request-Id": booking.request_id, "X-data-parallel-rank": str(decision.worker.dp_rank)}
        tokens = 0
        async with http.post(f"{decision.http_endpoint}/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                new = len(choices[0]["token_ids"]) if choices else 0
                if new and not tokens:
                    # From here on the prompt is no load any more. Long requests also call booking.renew() before their
                    # lease ends, and booking.add_output() where the scheduler tracks what they generate.
                    await booking.prefill_complete()
                tokens += new
        print(f"generated {tokens} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--model", default="mock-model")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.gateway, arguments.model))
