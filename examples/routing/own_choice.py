"""The caller decides by a rule of its own over the loads of the workers, and names the one that has to run the request.

python examples/routing/own_choice.py --gateway localhost:7050 --model mock-model
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

from kvscout_client import Router, StopConditions, WorkerLoad


def weight(load: WorkerLoad, sent: Counter[str]) -> tuple[int, int, int]:
    """The fewest requests, then those that were given the least until now: caches play no part in this rule.

    Args:
        load: Of a worker, as the scheduler has it.
        sent: What this caller has sent to each worker; the scheduler may not have heard of the last ones yet.
    """
    worker_id = load.worker.worker_id
    return max(load.active_requests, sent[worker_id]), load.potential_decode_blocks, sent[worker_id]


async def main(gateway: str, model: str) -> None:
    """Runs eight requests at once."""
    sent: Counter[str] = Counter()

    async with Router(gateway, model=model) as router:

        async def run(number: int) -> None:
            prompt = range(number * 1_000, number * 1_000 + 256)
            loads = await router.potential_loads(prompt)
            able = [load for load in loads if not (load.busy or load.draining or load.cooldown_seconds)]
            best = min(able, key=lambda load: weight(load, sent)).worker
            sent[best.worker_id] += 1
            async for _ in router.generate(
                prompt, pinned_worker_id=best.worker_id, pinned_dp_rank=best.dp_rank, stop=StopConditions(max_tokens=16)
            ):
                pass

        await asyncio.gather(*(run(number) for number in range(8)))
    print(", ".join(f"{worker} ran {times}" for worker, times in sorted(sent.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--model", default="mock-model")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.gateway, arguments.model))
