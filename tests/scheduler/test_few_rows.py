"""Few rows, with what all other ranks have, decide as a row for each rank does: every policy, both backends, and as
messages of every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.cpu_cost import cpu_ratio
from support.scheduler_builders import BLOCK, MODEL, ManualClock, key, scheduler, worker
from support.seeds import test_seed

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_blocks.index.block_index import Overlap
from kvscout_blocks.index.block_index import Overlaps as Found
from kvscout_blocks.index.top_k import top_k
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_indexer.rpc.servicer import overlaps_to_proto
from kvscout_scheduler.load.active_load import MakeLoad, ReferenceLoad
from kvscout_scheduler.load.native import select_request
from kvscout_scheduler.messages.codec import select_of
from kvscout_scheduler.messages.translate import selection_from_proto
from kvscout_scheduler.policies import installed_policies
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import ConfigOverride, SelectionRequest, WorkerConstraints

SPECS = [worker(f"w{number}", dp_size=1 + number % 3, total_kv_blocks=90 * number) for number in range(9)]
ELSEWHERE = [WorkerRank("of another role", 0), WorkerRank("of another role", 1)]
EVERYONE = sorted([rank for spec in SPECS for rank in spec.ranks] + ELSEWHERE)
POLICIES = installed_policies().names
Read = Callable[[scheduler_pb2.SelectRequest], SelectionRequest]
READERS: dict[str, Read] = {"protobuf": selection_from_proto}
LOADS: dict[str, MakeLoad] = {"reference": ReferenceLoad}
if native_available():
    from kvscout_scheduler.load.native import NativeLoad

    def read_natively(message: scheduler_pb2.SelectRequest) -> SelectionRequest:
        read = select_request(message.SerializeToString())
        return select_of(read).request if read is not None else selection_from_proto(message)

    READERS["extension"] = read_natively
    LOADS["extension"] = NativeLoad


def found(rng: Random, blocks: int) -> dict[WorkerRank, Overlap]:
    """What each rank has of a prompt: most often as much as many others, as under a system prompt."""

    def some() -> Overlap:
        device = rng.randrange(blocks + 1)
        host = rng.randint(device, blocks) if rng.random() < 0.3 else device
        disk = rng.randint(host, blocks) if rng.random() < 0.3 else host
        predicted = rng.randint(device, blocks) if rng.random() < 0.3 else device
        return Overlap(device, host, disk, disk, predicted)

    kinds = [some() for _ in range(rng.randrange(1, 4))]
    rows = {rank: rng.choice(kinds) if rng.random() < 0.8 else some() for rank in EVERYONE}
    return {rank: row for rank, row in rows.items() if rng.random() < 0.9 and any(row)}


def messages(rows: dict[WorkerRank, Overlap]) -> tuple[types_pb2.Overlaps, types_pb2.Overlaps]:
    """A row each, and few of them."""
    each = Found(tuple(rows), *zip(*rows.values(), strict=True)) if rows else Found()
    few, common = top_k(each, len(EVERYONE), EVERYONE)
    assert common.exact
    return overlaps_to_proto(each), overlaps_to_proto(few, common)


class Pair:
    """Two schedulers that are asked the same: with a row for each rank, and with few."""

    def __init__(self, seed: int, policy: str, make_load: MakeLoad, read: Read) -> None:
        self.rng, self.clock, self.read = Random(seed), ManualClock(), read
        self.each: list[Scheduler] = [
            scheduler(*SPECS, clock=self.clock, seed=seed, make_load=make_load, policy=policy) for _ in range(2)
        ]
        self.booked: list[str] = []
        self.pins = policy == "direct"
        self.decided = self.asked = self.saved = 0

    def ask(self) -> None:
        rng = self.rng
        self.asked += 1
        blocks = rng.randrange(1, 40)
        message = scheduler_pb2.SelectRequest(
            model=MODEL,
            request_id=f"r{self.asked}",
            isl_tokens=blocks * BLOCK + rng.randrange(BLOCK),
            block_hashes=[rng.choice((1, 2)) for _ in range(blocks)],
            expected_output_tokens=rng.choice((0, 0, 1, 300)),
            prefill_elsewhere=rng.random() < 0.1,
            session=rng.choice((0, 0, 1, 2, 3)),
        )
        changes: dict[str, Any] = {
            "explain": rng.random() < 0.2,
            "override": ConfigOverride(
                overlap_score_weight=rng.choice((None, None, 0.0, 0.3)),
                router_temperature=rng.choice((None, None, None, 0.2)),
            ),
            "constraints": WorkerConstraints(
                pinned_worker_id=f"w{rng.randrange(9)}" if self.pins or rng.random() < 0.1 else "",
                excluded_worker_ids=frozenset(rng.sample([spec.worker_id for spec in SPECS], 2))
                if rng.random() < 0.2
                else frozenset(),
            ),
        }
        rows, books = found(rng, blocks), rng.random() < 0.7
        answers: list[Decision | str] = []
        for made, overlaps in zip(self.each, messages(rows), strict=True):
            message.overlaps.CopyFrom(overlaps)
            self.saved += len(rows) - len(overlaps.worker_ids)
            asked = replace(self.read(message), **changes)
            try:
                answers.append((made.select_and_reserve if books else made.select)(asked))
            except KvscoutError as error:
                answers.append(repr(error))
        assert answers[0] == answers[1]
        if isinstance(answers[0], Decision):
            self.decided += 1
            if books:
                self.booked.append(message.request_id)

    def go_on(self) -> None:
        if self.booked:
            name, tokens = self.booked.pop(self.rng.randrange(len(self.booked))), self.rng.choice((0, 30))
            for made in self.each:
                made.mark_prefill_complete(key(name))
            self.clock.advance(0.01)
            for made in self.each:
                made.free(key(name), output_tokens=tokens)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_few_rows_decide_as_a_row_for_each_rank_does(policy: str, reader: str, load: str) -> None:
    pair = Pair(test_seed(), policy, LOADS[load], READERS[reader])
    for _ in range(150):
        pair.ask()
        if pair.rng.random() < 0.6:
            pair.go_on()
        pair.clock.advance(pair.rng.choice((0.0, 0.013, 0.2, 3.0)))
    assert pair.decided > 100
    assert pair.saved > 100, "few rows are fewer"


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("reader", READERS)
def test_ranks_with_different_block_sizes_are_given_what_those_of_their_size_have(reader: str, load: str) -> None:
    other = worker("large", block_size=2 * BLOCK, dp_size=3)
    made = scheduler(worker("small", dp_size=3), other, make_load=LOADS[load])
    message = scheduler_pb2.SelectRequest(
        model=MODEL, isl_tokens=8 * BLOCK, block_size=BLOCK, block_hashes=range(8), explain=True
    )
    message.overlaps.others.CopyFrom(common(device_blocks=3))
    further = message.other_pools.add(block_size=2 * BLOCK, eagle=False, block_hashes=range(4))
    further.overlaps.CopyFrom(types_pb2.Overlaps(worker_ids=["large"], dp_ranks=[1], device_blocks=[4]))
    further.overlaps.others.CopyFrom(common(device_blocks=1))
    decision = made.select(READERS[reader](message))
    assert decision.explanation is not None
    shown = {candidate.rank: candidate.device_blocks for candidate in decision.explanation.candidates}
    expected = {WorkerRank("small", rank): 3 for rank in range(3)} | {WorkerRank("large", rank): 1 for rank in (0, 2)}
    assert shown == expected | {WorkerRank("large", 1): 4}
    assert (decision.rank, decision.overlap_blocks) == (WorkerRank("large", 1), 4)


def common(**levels: int) -> types_pb2.CommonOverlap:
    device = levels.get("device_blocks", 0)
    names = ("device_blocks", "host_blocks", "disk_blocks", "external_blocks", "predicted_blocks")
    made = types_pb2.CommonOverlap(exact=True)
    for name in names:
        setattr(made, name, levels.get(name, device))
    return made


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("others", "field"),
    [
        (common(device_blocks=9), "external_blocks"),
        (common(device_blocks=2, host_blocks=1), "host_blocks"),
        (common(device_blocks=2, disk_blocks=1), "disk_blocks"),
        (common(device_blocks=2, external_blocks=1), "external_blocks"),
        (common(device_blocks=2, predicted_blocks=1), "predicted_blocks"),
        (common(device_blocks=2, predicted_blocks=9), "predicted_blocks"),
    ],
)
def test_what_others_cannot_have_is_refused_by_name(reader: str, others: types_pb2.CommonOverlap, field: str) -> None:
    message = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=4 * BLOCK, block_hashes=range(4))
    message.overlaps.others.CopyFrom(others)
    with pytest.raises(InvalidArgument) as refused:
        scheduler("w0").select(READERS[reader](message))
    assert refused.value.field == f"overlaps.others.{field}"


@pytest.mark.skipif(not native_available(), reason="the reference makes a Python object of each rank")
def test_few_rows_are_read_and_scored_in_less_than_half_the_time() -> None:
    ranks, specs = 4_000, [worker(f"w-{number:03}", dp_size=8) for number in range(500)]
    rows = {rank: Overlap(*[3 + (number % 320 == 0)] * 5) for number, rank in enumerate(_ranks(specs))}
    each = Found(tuple(rows), *zip(*rows.values(), strict=True))
    few, others = top_k(each, ranks, list(rows))
    made = scheduler(*specs)
    message = scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=8 * BLOCK, block_hashes=range(8))
    decisions = []

    def asking(overlaps: types_pb2.Overlaps) -> Callable[[], None]:
        message.overlaps.CopyFrom(overlaps)
        data = message.SerializeToString()

        def ask() -> None:
            read = select_request(data)
            assert read is not None
            decisions.append(made.select(select_of(read).request))

        return ask

    assert cpu_ratio(asking(overlaps_to_proto(each)), asking(overlaps_to_proto(few, others))) <= 0.5
    assert {decision.overlap_blocks for decision in decisions} == {4}


def _ranks(specs: list[WorkerSpec]) -> list[WorkerRank]:
    return [rank for spec in specs for rank in spec.ranks]
