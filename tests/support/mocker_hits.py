"""Requests to an engine of the mocker one after the other, and an index that predicts what they hit."""

from __future__ import annotations

import random
from array import array

from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import WorkerRank
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.request import Request
from kvscout_mocker.events import BlockHashFormat, EventEncoder, EventFormat
from kvscout_mocker.tokens.sequence import Sequence
from support.mocker_invariants import check_blocks

BLOCK_SIZE = 4
WORKER = WorkerRank("w", 0)
ENCODER = EventEncoder(EventFormat.MAP, BlockHashFormat.INT, dp_rank=0)


def request_of(tokens: list[int], max_tokens: int, request_id: str = "r") -> Request:
    return Request(request_id, Sequence(array("I", tokens), block_size=BLOCK_SIZE, hash_seed=1), max_tokens)


def serve(served: Engine, tokens: list[int], max_tokens: int) -> Request:
    """Run a request to its end."""
    request = request_of(tokens, max_tokens)
    served.submit(request)
    while (step := served.begin_step()) is not None:
        served.finish_step(step)
    return request


def assert_hits_are_predicted(served: Engine, rng: random.Random, where: str) -> None:
    """Serve prompts that go on with earlier ones; an index of the engine's events knows what each hits.

    Args:
        served: An engine with blocks of `BLOCK_SIZE` tokens.
        rng: Draws the prompts.
        where: What a failure names.
    """
    index = make_index(BLOCK_SIZE)
    index.add_worker(WORKER, WorkerOptions())
    asked: list[list[int]] = [[1]]
    hits = 0
    for number in range(60):
        before = rng.choice(asked[-8:])
        tokens = before[: rng.randrange(1, len(before) + 1)] if rng.random() < 0.4 else list(before)
        tokens = (tokens + [rng.randrange(50) for _ in range(rng.choice([0, 0, 3, 8, 20]))])[:50]
        usable = (len(tokens) - 1) // BLOCK_SIZE
        found = index.find_matches(block_hashes(tokens, BLOCK_SIZE), now=0.0, usable=usable).by_worker()
        predicted = min(found[WORKER].device if found else 0, usable) * BLOCK_SIZE
        request = serve(served, tokens, rng.choice([1, 2, 9]))
        assert request.cached_tokens == predicted, f"{where}, request {number}"
        hits += predicted > 0
        asked.append(list(request.sequence.tokens))
        events = served.take_events()
        if events:
            index.apply_payload(WORKER, ENCODER.encode(events, 0.0), event_id=number)
        check_blocks(served.blocks)
    index.check_invariants()
    assert hits > 0
