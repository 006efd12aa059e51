"""The workers file: what it may say, and that changes of it take effect."""

import asyncio
from pathlib import Path

import pytest

from kvscout_common.errors import ConfigError
from kvscout_common.registry.registry import Registry
from kvscout_common.registry.worker_proto import spec_from_proto, spec_to_proto
from kvscout_common.registry.workers_file import WorkersFile, load_workers
from kvscout_common.worker import CopyMode, EngineKind, Role, Transport

FULL = """
workers:
  - worker_id: sglang-0
    model: llama
    tenant: team
    role: prefill
    engine: sglang
    http_endpoint: http://10.0.0.5:8000/
    block_size: 64
    dp_size: 2
    event_endpoints:
      - {dp_rank: 0, endpoint: "tcp://10.0.0.5:5557", replay_endpoint: "tcp://10.0.0.5:5657", topic: kv}
      - {dp_rank: 1, endpoint: "tcp://10.0.0.5:5558", bind: true}
    total_kv_blocks: 4096
    labels: {zone: a, gen: 3}
    adapters: [{name: sql, lora_id: 7}]
    copies: set
  - {worker_id: silent, model: llama, block_size: 16}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_key_reaches_the_registration(tmp_path: Path) -> None:
    full, silent = load_workers(write(tmp_path / "w.yaml", FULL))
    assert (full.role, full.engine, full.copies) == (Role.PREFILL, EngineKind.SGLANG, CopyMode.SET)
    assert (full.tenant, full.http_endpoint, full.labels) == ("team", "http://10.0.0.5:8000", {"zone": "a", "gen": "3"})
    assert [rank.dp_rank for rank in full.ranks] == [0, 1]
    rank_1 = full.event_endpoint(1)
    assert rank_1 is not None and rank_1.bind
    assert {adapter.lora_id: adapter.name for adapter in full.adapters} == {7: "sql"}
    assert (full.transport, silent.transport) == (Transport.ZMQ, Transport.NONE)


def test_a_registration_survives_its_way_through_protobuf(tmp_path: Path) -> None:
    for spec in load_workers(write(tmp_path / "w.yaml", FULL)):
        assert spec_from_proto(spec_to_proto(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: [{worker_id: a, model: m}]", "workers.0.block_size: must be at least 1 token"),
        (
            "workers: [{worker_id: a, model: m, block_size: 16, role: king}]",
            "w.yaml, line 1: workers.0.role: 'king' is not one of these; known: aggregated, decode, prefill",
        ),
        (
            "workers: [{worker_id: a, model: m, block_size: 16, colour: red}]",
            "w.yaml, line 1: workers.0.colour: there is no such key; known: adapters, block_size, .* and 18 more",
        ),
        ("workers: [{worker_id: a, model: m, block_size: 16}, {worker_id: a, model: m, block_size: 16}]", "twice"),
        ("workers: [{worker_id: a, model: m, block_size: 16, labels: [a]}]", "workers.0.labels: is not a mapping"),
        (
            "workers: [{worker_id: a, model: m, block_size: 16, event_endpoints: [{endpoint: 'tcp://*:5557'}]}]",
            r"workers.0.event_endpoints\[0\].endpoint: tcp://\*:5557 is what the engine binds: write tcp://HOST:5557",
        ),
        (
            "workers:\n- {worker_id: a, model: m, block_size: 16}\n- worker_id: b\n  modle: m\n",
            "w.yaml, line 4: workers.1.modle: there is no such key; did you mean 'model'",
        ),
        (
            "workers:\n- worker_id: a\n  role: prefil\n",
            "w.yaml, line 3: workers.0.role: 'prefil' is not one of these; did you mean 'prefill'",
        ),
        (
            "workers:\n- worker_id: a\n  model: m\n  block_size: sixteen\n",
            "w.yaml, line 4: workers.0.block_size: cannot be 'sixteen'",
        ),
        (
            "workers:\n- worker_id: a\n  event_endpoints:\n  - {endpoint: x, replay: y}\n",
            r"w.yaml, line 4: workers.0.event_endpoints\[0\].replay: there is no such key",
        ),
        ("workers:\n- worker_id: a\n  model: m\n", "w.yaml, line 2: workers.0.block_size: must be at least 1 token"),
        ('workers: [{worker_id: "\\uD800", model: m, block_size: 16}]', "workers"),
        ("workers: [3]", "workers.0: is not a mapping"),
        ("workers: {}", "no list 'workers'"),
        ("workers: [", "cannot read"),
        ("workers: 2026-02-31", "cannot read"),
        ("[" * 10_000, "cannot read"),
    ],
)
def test_a_wrong_file_names_the_entry_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workers(write(tmp_path / "w.yaml", text))


def test_a_file_of_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(b"workers: [\xff]")
    with pytest.raises(ConfigError, match="cannot read"):
        load_workers(path)


async def test_changes_are_followed_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", "workers: [{worker_id: a, model: m, block_size: 16}]")
    registry = Registry(lambda: 0.0)
    file = WorkersFile(path, registry)
    file.load()
    looks: asyncio.Queue[None] = asyncio.Queue()
    looked: asyncio.Queue[None] = asyncio.Queue()

    async def step(_: float) -> None:
        looked.put_nowait(None)
        await looks.get()

    watching = asyncio.create_task(file.watch(step))

    async def look() -> list[str]:
        await looked.get()
        looks.put_nowait(None)
        await looked.get()
        looked.put_nowait(None)  # the watcher waits again: what it did is done
        return [entry.spec.worker_id for entry in registry.entries()]

    assert await look() == ["a"]
    write(path, "workers: [{worker_id: b, model: m, block_size: 16}, {worker_id: c, model: m, block_size: 16}]")
    assert await look() == ["b", "c"]
    write(path, "workers: [{worker_id: d}]")
    assert await look() == ["b", "c"]
    assert "workers.0.model" in file.error
    path.unlink()
    assert await look() == ["b", "c"]
    write(path, "")
    assert await look() == []
    assert file.error == ""
    watching.cancel()
