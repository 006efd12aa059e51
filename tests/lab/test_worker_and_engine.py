"""The same requests in the laboratory's worker and in the engine of `kvscout mocker`, which steps as vLLM does."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

import pytest
from support.seeds import test_seed

from kvscout_lab.simulation.timing import StepTime, picoseconds, seconds
from kvscout_lab.simulation.worker import NEVER, EngineSettings, Job, Worker
from kvscout_mocker.config import EngineConfig, StepCost
from kvscout_mocker.engine.engine import Engine, Step
from kvscout_mocker.engine.request import Request
from kvscout_mocker.tokens.sequence import Sequence

SEED = test_seed()
BLOCK = 4
STEP = StepTime(base_ms=20.0, prefill_us_per_token=1_000.0, decode_us_per_request=500.0, context_ns_per_token=20_000.0)
COST = StepCost(
    base_seconds=0.02,
    prefill_seconds_per_token=0.001,
    decode_seconds_per_request=0.0005,
    context_seconds_per_token=0.00002,
)
MAX_NUM_SEQS = 16


@dataclass(frozen=True)
class Asked:
    at: float
    prompt: list[int]
    output_tokens: int


@dataclass
class Served:
    """What became of a request: prompt tokens that it found cached, when its tokens came."""

    cached: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def told(self) -> tuple[int, float, float]:
        return self.cached, round(self.times[0], 6), round(self.times[-1], 6)


def asked(random: Random, per_second: float) -> list[Asked]:
    """Prompts that share beginnings with each other."""
    at, seen = 0.0, [[random.randrange(1, 1000) for _ in range(random.randrange(1, 50))] for _ in range(4)]
    requests = []
    for _ in range(80):
        at += random.expovariate(per_second)
        base = random.choice(seen[:4] + seen[-6:])
        begins = base[: random.randrange(1, len(base) + 1)] if random.random() < 0.3 else base
        prompt = [*begins, *(random.randrange(1, 1000) for _ in range(random.randrange(16)))][:100]
        seen.append(prompt)
        requests.append(Asked(at, prompt, random.randrange(1, 30)))
    return requests


def by_the_engine(requests: list[Asked], blocks: int, budget: int) -> tuple[list[Served], int]:
    """Of `kvscout mocker`, whose cost model has seconds; and how often a request was preempted."""
    engine = Engine(
        EngineConfig(
            block_size=BLOCK,
            num_gpu_blocks=blocks + 1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            max_model_len=1_000,
            max_waiting=1_000,
            vocab_size=32_000,
            cost=COST,
        )
    )
    served = [Served() for _ in requests]
    numbers: dict[Request, int] = {}
    step: Step | None = None
    ends = float("inf")

    def begin(now: float) -> None:
        nonlocal step, ends
        step = engine.begin_step()
        ends = now + step.duration_seconds if step is not None else float("inf")

    def finish() -> None:
        assert step is not None
        now = ends
        for output in engine.finish_step(step):
            one = served[numbers[output.request]]
            one.times.append(now)
            one.cached = output.request.cached_tokens or 0
        begin(now)

    for number, one in enumerate(requests):
        while ends <= one.at:
            finish()
        tokens = Sequence(array("I", one.prompt), block_size=BLOCK, hash_seed=0)
        request = Request(str(number), tokens, one.output_tokens)
        numbers[request] = number
        engine.submit(request)
        if step is None:
            begin(one.at)
    while step is not None:
        finish()
    return served, engine.counters.preemptions


def by_the_worker(requests: list[Asked], blocks: int, budget: int) -> tuple[list[Served], int]:
    """Of the laboratory; of the tokens only the first and the last."""
    nodes: dict[tuple[object, ...], int] = {}

    def chain(one: Asked) -> list[int]:
        # What an engine generates follows from the prompt, here as there.
        tokens = [*one.prompt, *((tuple(one.prompt), place) for place in range(one.output_tokens))]
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [nodes.setdefault(tuple(tokens[:end]), len(nodes) + 1) for end in ends]

    worker = Worker(
        EngineSettings(
            block_size=BLOCK,
            kv_tokens=blocks * BLOCK,
            max_num_batched_tokens=budget,
            max_num_seqs=MAX_NUM_SEQS,
            step=STEP,
        )
    )
    served = [Served() for _ in requests]

    def finish() -> None:
        now = worker.end
        for done in worker.finish()[0]:
            job = done.job
            assert isinstance(job.request, int)
            one = served[job.request]
            one.times.append(seconds(now))
            one.cached = job.cached_tokens or 0
        worker.begin(now)

    for number, one in enumerate(requests):
        at = picoseconds(one.at)
        while worker.end <= at:
            finish()
        job = Job(request=number, nodes=chain(one), prompt_tokens=len(one.prompt), output_tokens=one.output_tokens)
        worker.submit(job, at)
    while worker.end != NEVER:
        finish()
    return served, worker.preemptions


@pytest.mark.parametrize("budget", [32, 64, 2_048])
def test_where_there_is_room_every_request_fares_alike_to_the_microsecond(budget: int) -> None:
    requests = asked(Random(SEED), per_second=4.0)
    theirs, _ = by_the_engine(requests, 4_000, budget)
    ours, _ = by_the_worker(requests, 4_000, budget)
    assert [one.told for one in ours] == [one.told for one in theirs]


def test_where_requests_are_preempted_all_the_time_they_find_as_much_cached_and_take_as_long() -> None:
    random = Random(SEED)
    cached, times, preemptions = [0, 0], [0.0, 0.0], [0, 0]
    for _ in range(12):
        requests, blocks, budget = asked(random, 20.0), random.choice([40, 60]), random.choice([32, 64, 2_048])
        for side, of in enumerate((by_the_engine, by_the_worker)):
            served, preempted = of(requests, blocks, budget)
            cached[side] += sum(one.cached for one in served)
            times[side] += sum(one.times[-1] - asked_one.at for one, asked_one in zip(served, requests, strict=True))
            preemptions[side] += preempted
    assert preemptions[0] > 100
    assert preemptions[1] == pytest.approx(preemptions[0], rel=0.05)
    assert cached[1] == pytest.approx(cached[0], rel=0.02)
    assert times[1] == pytest.approx(times[0], rel=0.02)
