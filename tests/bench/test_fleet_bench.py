"""The benchmark of fleets end to end, short; its engines publish, replay and restart as engines do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
import zmq

from kvscout.v1 import workers_pb2
from kvscout_bench.fleet_bench import FleetBench
from kvscout_bench.fleet_process import EVENT_BLOCKS, PROMPT_BLOCKS, SYSTEM_BLOCKS, Engines, Fleet, tokens_of
from kvscout_bench.strangers import DriverFailed
from kvscout_blocks.bytes.events import Removed, Stored
from kvscout_blocks.bytes.frames import parse_replay_reply, replay_request
from kvscout_blocks.bytes.wire import decode_batch

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not there: it compiles the engines")
WAIT_MS = 10_000
FLEET = Fleet(ranks=4, batches=40, capacity=PROMPT_BLOCKS, dp_size=2)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Engines(FLEET) as started:
        yield started


def replayed(engines: Engines, rank: int, first: int) -> list[tuple[int, bytes]]:
    """What libzmq is sent by a rank's replay socket."""
    endpoint = endpoints(engines)[rank]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint.replay_endpoint)
        socket.send_multipart(replay_request(first))
        found: list[tuple[int, bytes]] = []
        while socket.poll(WAIT_MS):
            message = parse_replay_reply(socket.recv_multipart())
            if message is None:
                return found
            found.append((message.seq, message.payload))
    raise TimeoutError("no end of the replay")


def endpoints(engines: Engines) -> list[workers_pb2.EventEndpoint]:
    return [endpoint for worker in engines.workers() for endpoint in worker.event_endpoints]


def stored(payload: bytes) -> list[list[int]]:
    return [list(event.tokens) for event in decode_batch(payload).events if isinstance(event, Stored)]


def test_a_quick_run_gives_rows_without_a_verdict() -> None:
    said: list[str] = []
    rows = list(FleetBench(only=("1000/deep/",), quick=True).run(said.append))
    assert len(rows) == 12
    # A tick may not come in the short time that is looked at.
    assert {
        row.case.name: row.ours.value for row in rows if row.ours.value <= 0 and not row.case.name.endswith("/idle")
    } == {}
    assert {row.met for row in rows} == {None}
    assert json.loads(json.dumps(rows[0].as_json()))["unit"] == "s"
    assert any("ranks live after" in line for line in said)


def test_names_of_rows_are_unique() -> None:
    names = [case.name for case in FleetBench.CASES]
    assert len(set(names)) == len(names)


def test_a_replay_is_the_history_of_a_cache_that_never_holds_more_than_its_blocks(engines: Engines) -> None:
    batches = replayed(engines, 3, 0)
    assert [seq for seq, _ in batches] == list(range(FLEET.batches))
    held: dict[object, int | None] = {}
    for seq, payload in batches:
        decoded = decode_batch(payload)
        assert (decoded.faults, decoded.dp_rank) == ((), 1)
        for event in decoded.events:
            if isinstance(event, Stored):
                names = range(SYSTEM_BLOCKS) if seq == 0 else range((seq - 1) * EVENT_BLOCKS, seq * EVENT_BLOCKS)
                expected = [
                    token for name in names for token in tokens_of(name if seq == 0 else 1 << 63 | 3 << 36 | name)
                ]
                assert list(event.tokens) == expected
                assert event.parent is None if seq == 0 else event.parent in held
                held.update(zip(event.engine_hashes, [event.parent, *event.engine_hashes], strict=False))
            else:
                assert isinstance(event, Removed)
                for block in event.engine_hashes:
                    del held[block]
                    assert block not in held.values(), "engines evict the last blocks of a prompt first"
        assert len(held) <= SYSTEM_BLOCKS + FLEET.capacity
    assert len(held) == SYSTEM_BLOCKS + FLEET.capacity


def test_a_replay_begins_where_it_is_asked_to(engines: Engines) -> None:
    assert [seq for seq, _ in replayed(engines, 0, FLEET.batches - 2)] == [FLEET.batches - 2, FLEET.batches - 1]


def test_a_rank_that_was_ended_comes_back_empty(engines: Engines) -> None:
    before = replayed(engines, 2, 0)[:2]
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(endpoints(engines)[2].endpoint)
        engines.request("kill", first=2, count=1)
        engines.request("revive", first=2, count=1)
        while not engines.request("status")["subscribed"]:
            socket.poll(10)
        assert engines.request("publish", first=2, count=1, messages=2, rate=0, burst=1)["sent"] == 2
        after = [socket.recv_multipart()[1:] for _ in range(2) if socket.poll(WAIT_MS)]
    assert [int.from_bytes(seq, "big") for seq, _ in after] == [0, 1]
    assert stored(before[0][1]) == stored(after[0][1]), "the system prompt"
    assert stored(before[1][1]) != stored(after[1][1])


@pytest.mark.parametrize("command", ["dance", "publish", "kill first=0", "open"])
def test_what_is_no_command_is_an_error_and_the_next_one_is_read(engines: Engines, command: str) -> None:
    with pytest.raises(DriverFailed):
        engines.request(command)
    assert engines.request("status")["subscribed"] == 0
