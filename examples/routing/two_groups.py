"""Two groups of workers under two model names, such as two regions or two sizes: the caller probes both, and takes the
one that has more of the prompt; within the group the gateway decides.

python examples/routing/two_groups.py --gateway localhost:7050 --models near far
"""

from __future__ import annotations

import argparse
import asyncio

from kvscout_client import RouteDecision, Router, StopConditions
from kvscout_common.errors import KvscoutError

PROMPT = list(range(1, 513))


def uncached_blocks(decision: RouteDecision) -> float:
    """Return the blocks that the best worker of a group would have to compute."""
    return decision.num_blocks - decision.effective_overlap_blocks


async def main(gateway: str, models: list[str]) -> None:
    """Asks twice: the second time the group that ran the first request has the prompt."""
    async with Router(gateway) as router:
        for turn in (1, 2):
            # A probe has no request id: nothing is booked, nothing needs to be freed.
            probes = await asyncio.gather(
                *(router.route(PROMPT, model=model) for model in models), return_exceptions=True
            )
            found: dict[str, RouteDecision] = {}
            for model, probe in zip(models, probes, strict=True):
                if isinstance(probe, RouteDecision):
                    found[model] = probe
                elif isinstance(probe, KvscoutError):
                    print(f"turn {turn}: {model} is out of the question: {probe}")  # all busy, or none registered
                elif isinstance(probe, BaseException):
                    raise probe
            chosen = min(found, key=lambda model: uncached_blocks(found[model]))
            told = ", ".join(f"{model} computes {uncached_blocks(found[model]):.0f} blocks" for model in found)
            async for _ in router.generate(PROMPT, model=chosen, stop=StopConditions(max_tokens=16)):
                pass
            print(f"turn {turn}: {told}; ran on {chosen}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", default="localhost:7050")
    parser.add_argument("--models", nargs="+", default=["mock-model"])
    arguments = parser.parse_args()
    asyncio.run(main(arguments.gateway, arguments.models))
