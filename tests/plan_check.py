"""`make check-plan`: plans of a recorded stack, and the same changes made to the stack, side by side.

Engines are slow, so that the machine's own work does not count. Each row is one run of real processes.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from support.gateway_stack import running_stack

from kvscout.v1 import gateway_pb2
from kvscout_client import Router, StopConditions
from kvscout_lab.cells.cells import Contender
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.plan import Outcome, Planner
from kvscout_lab.workloads.recording import RecordedWorker, head, line_of, read_recording

SECONDS: Final = 60.0
"""In which conversations begin."""
RATE: Final = 1.3
"""Conversations a second."""
BLOCKS: Final = 768
STEP: Final = (
    *("--step-base-ms", "40", "--prefill-us-per-token", "1100", "--decode-us-per-request", "1400"),
    *("--context-ns-per-token", "1400", "--max-num-batched-tokens", "2048", "--speedup", "1"),
)
SYSTEM_PROMPTS: Final = [random.Random(f"system {number}").choices(range(30_000), k=300) for number in range(6)]
HITS, TTFT = 0.03, 0.15
"""How far a plan may be off: hit rate, and mean TTFT as a part of it."""


async def talk(router: Router, model: str, draw: random.Random, after: float) -> None:
    """One conversation of some turns."""
    await asyncio.sleep(after)
    prompt = [*draw.choice(SYSTEM_PROMPTS)]
    session = str(draw.random())
    for _ in range(draw.randint(2, 5)):
        prompt += [draw.randrange(30_000) for _ in range(draw.randint(60, 600))]
        pause, output = draw.expovariate(0.7), draw.randint(8, 40)
        async for chunk in router.generate(
            prompt, model=model, stop=StopConditions(max_tokens=output), session=session
        ):
            prompt += chunk.token_ids
        await asyncio.sleep(pause)


async def run(workers: int, blocks: int, policy: str, seconds: float) -> list[gateway_pb2.RecordedRequest]:
    """Send the traffic to a new stack; return what was recorded of it."""
    mockers = [(*STEP, "--num-gpu-blocks", str(blocks + 1)) for _ in range(workers)]
    draw = random.Random(5)
    recorded: list[gateway_pb2.RecordedRequest] = []
    async with running_stack(mockers=mockers, scheduler_flags=("--router-mode", policy)) as stack:
        async with Router(stack.gateway.address) as router:
            [model, *_] = [worker.spec.model for worker in await router.list_workers()]

            async def read() -> None:
                async for message in router.record(secrets.token_bytes(16)):
                    recorded.extend(message.requests)

            reading = asyncio.create_task(read())
            starts = sorted(draw.uniform(0.0, seconds) for _ in range(round(RATE * seconds)))
            talks = [talk(router, model, random.Random(f"talk {number}"), start) for number, start in enumerate(starts)]
            await asyncio.gather(*talks)
            await asyncio.sleep(1.0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return recorded


def planner(folder: Path, requests: Sequence[gateway_pb2.RecordedRequest], workers: int, blocks: int) -> Planner:
    """Return the planner of what was recorded."""
    specs = [RecordedWorker(f"w{number}", "mock", "aggregated", 1, 16, blocks, 2_048) for number in range(workers)]
    path = folder / f"{time.monotonic_ns()}.jsonl"
    path.write_text("\n".join([head(["gateway"], specs), *(line_of(one, "gateway") for one in requests)]) + "\n")
    return Planner(read_recording([path]))


async def main(seconds: float) -> int:
    """Record, plan, change, and say how far they are apart."""
    setups = {
        "none": (4, BLOCKS, "kv-time"),
        "4 → 6 workers": (6, BLOCKS, "kv-time"),
        "caches halved": (4, BLOCKS // 2, "kv-time"),
        "`round-robin`": (4, BLOCKS, "round-robin"),
    }
    failed = 0
    plan: Planner | None = None
    print("| change | hit rate predicted | seen | mean TTFT predicted | seen |\n|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        for name, (workers, blocks, policy) in setups.items():
            made = planner(Path(folder), await run(workers, blocks, policy, seconds), workers, blocks)
            plan = plan or made
            engine = replace(plan.cluster.engine, kv_tokens=16 * blocks)
            cluster = replace(plan.cluster, workers=workers, engine=engine)
            said, seen = plan.run(cluster, Contender.parse(policy, lab_policies())), made.recorded()
            far = _is_far(said, seen)
            failed += far
            print(
                f"| {name} | {said.hit_rate:.1%} | {seen.hit_rate:.1%} | {1000 * said.ttft_mean:.0f} ms | "
                f"{1000 * seen.ttft_mean:.0f} ms |{' too far' if far else ''}".replace("%", " %"),
                flush=True,
            )
    return failed


def _is_far(said: Outcome, seen: Outcome) -> bool:
    return abs(said.hit_rate - seen.hit_rate) > HITS or abs(said.ttft_mean - seen.ttft_mean) > TTFT * seen.ttft_mean


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)))
