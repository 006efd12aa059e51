"""The caller minimises the time to first token: what a worker still has to compute, this prompt included, over how fast
it computes. Workers of different speed are told apart, which a cost in blocks alone does not do.

python examples/routing/least_ttft.py --gateway localhost:7050 --model mock-model --speed w0=20000 --speed w1=5000
"""

from __future__ import annotations

import argparse
import asyncio
import time

from kvscout_client import Router, StopConditions, WorkerLoad

PROMPT = list(range(1, 2_049))
USUAL_SPEED = 10_000.0
"""Prompt tokens a second of a worker whose speed was not told."""


def seconds_to_first_token(load: WorkerLoad, speeds: dict[str, float]) -> float:
    """The prompts that wait there are computed before this one, of which only what is not cached counts."""
    return load.potential_prefill_tokens / speeds.get(load.worker.worker_id, USUAL_SPEED)


async def main(gateway: str, model: str, speeds: dict[str, float]) -> None:
    """Runs one request where it should answer first."""
    async with Router(gateway, model=model) as router:
        loads = await router.potential_loads(PROMPT)
        able = [load for load in loads if not (load.busy or load.draining or load.cooldown_seconds)]
        best = min(able, key=lambda load: seconds_to_first_token(load, speeds))
        began = time.monotonic()
        first = None
        async for chunk in router.generate(
            PROMPT,
            pinned_worker_id=best.worker.worker_id,
            pinned_dp_rank=best.worker.dp_rank,
            stop=StopConditions(max_tokens=16),
        ):
            if chunk.token_ids and first is None:
                first = time.monotonic() - began
        assert first is not None
        expected = seconds_to_first_token(best, speeds)
        print(
            f"{best.worker.worker_id}: expected {expected * 1000:.0f} ms to the first token, it took {first * 1000:.0f}"
        )


def _speed(text: str) -> tuple[str, float]:
    worker_id, _, tokens = text.partition("=")
    return worker_id, float(tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--model", default="mock-model")
    parser.add_argument("--speed", type=_speed, action="append", default=[], metavar="WORKER=TOKENS_PER_SECOND")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.gateway, arguments.model, dict(arguments.speed)))
