"""From where an engine had better fetch blocks than compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.values.decision import Pull
from kvscout_gateway.values.overlaps import Columns, Others
from kvscout_gateway.values.pull import pull_of

HERE, THERE = WorkerRank("here", 0), WorkerRank("there", 0)
RATE = "kv_source_blocks_per_second"


@dataclass
class Table:
    """Rows as a test writes them: device and host blocks by worker rank."""

    device: dict[WorkerRank, int]
    host: Sequence[int] = ()
    external: Sequence[int] = ()
    others: Others | None = None

    @property
    def columns(self) -> Columns:
        ids, ranks = [rank.worker_id for rank in self.device], [rank.dp_rank for rank in self.device]
        return ids, ranks, list(self.device.values()), self.host, (), self.external, ()

    def confirmed(self, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        return overlap_blocks


def spec(worker_id: str, labels: dict[str, str] | None = None, *, model: str = "m", block_size: int = 16) -> WorkerSpec:
    labels = {"kv_source": f"{worker_id}:5710", **(labels or {})}
    return WorkerSpec(worker_id, model, block_size, dp_size=4, labels={k: v for k, v in labels.items() if v})


def pull(table: Table, *specs: WorkerSpec, overlap: int = 0, block_seconds: float = 0.0) -> Pull | None:
    known = {one.worker_id: one for one in specs or (spec("here"), spec("there"))}
    return pull_of(HERE, known["here"], table, known, overlap_blocks=overlap, block_seconds=block_seconds)


def test_blocks_are_fetched_from_who_holds_most_beyond_what_the_worker_holds() -> None:
    table = Table({HERE: 2, THERE: 8, WorkerRank("there", 3): 9, WorkerRank("stranger", 0): 20})
    assert pull(table) == Pull(WorkerRank("there", 3), "there", 5713, 7, 0.0, 0.0)


def test_nothing_is_fetched_that_the_worker_can_load_itself() -> None:
    assert pull(Table({HERE: 2, THERE: 8}, external=[8, 8])) is None
    assert pull(Table({HERE: 2, THERE: 8}), overlap=8) is None
    assert pull(Table({THERE: 8}, others=(8, 8, 8, 8, 8))) is None
    assert pull(Table({})) is None


def test_what_others_have_in_host_memory_counts_and_what_is_on_external_storage_does_not() -> None:
    found = pull(Table({HERE: 0, THERE: 2}, host=[0, 6], external=[0, 30]))
    assert found is not None
    assert found.blocks == 6


@pytest.mark.parametrize(
    "there",
    [spec("there", {"kv_source": ""}), spec("there", model="other"), spec("there", block_size=32)],
    ids=["no source", "another model", "another block size"],
)
def test_engines_that_do_not_serve_blocks_of_the_same_kind_are_no_source(there: WorkerSpec) -> None:
    assert pull(Table({THERE: 8}), spec("here"), there) is None


def test_an_engine_that_does_not_fetch_is_told_nothing() -> None:
    assert pull(Table({THERE: 8}), spec("here", {"kv_source": ""}), spec("there")) is None


def test_the_slower_end_of_the_link_is_compared_with_computing() -> None:
    specs = spec("here", {RATE: "1000"}), spec("there", {RATE: "400"})
    found = pull(Table({THERE: 8}), *specs, block_seconds=0.01)
    assert found is not None
    assert found.seconds == pytest.approx(0.02)
    assert found.compute_seconds == pytest.approx(0.08)
    assert found.in_words(16) == "128 tokens fetched from there in 20 ms, computed in 80 ms"
    assert pull(Table({THERE: 8}), *specs, block_seconds=0.002) is None


def test_addresses_are_written_as_urls_write_them() -> None:
    found = pull(Table({THERE: 8}), spec("here"), spec("there", {"kv_source": "[fd00::1]:5710"}))
    assert found is not None
    assert (found.host, found.address) == ("fd00::1", "[fd00::1]:5710")


@pytest.mark.parametrize(
    "labels", [{"kv_source": "nowhere"}, {"kv_source": "h:0"}, {"kv_source": "h:1", RATE: "-3"}, {RATE: "1e400"}]
)
def test_labels_that_name_no_address_or_no_speed_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spec("here", labels).validate()
    assert caught.value.field == "labels"
