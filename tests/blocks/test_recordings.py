"""The index predicts what real engines reported as cached, from the recordings of their events.

Each recorded request is asked for before its own events are applied. The engine always computes the last
token again, so it can report at most (prompt - 1) // block_size blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvscout_blocks.bytes.frames import Message, parse_message, parse_replay_reply
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.source.decisions import Apply, SequencedBatch, digest
from kvscout_blocks.source.sequence import SourceSequence
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import WorkerRank

CAPTURES = sorted((Path(__file__).parents[1] / "data" / "captures").iterdir())


def frames(path: Path) -> list[list[bytes]]:
    with path.open("rb") as file:
        # Topics are bytes or text, depending on the recording; only their place matters.
        records = msgpack.Unpacker(file, raw=True)
        return [[bytes(frame) for frame in record[1]] for record in records]


def published(capture: Path) -> list[list[Message]]:
    """The messages of each rank, in order."""
    paths = [capture / "events.bin", *sorted(capture.glob("events.[0-9]*.bin"))]
    return [[parse_message(f) for f in frames(path)] for path in paths]


def requests(capture: Path) -> list[dict[str, Any]]:
    with (capture / "requests.jsonl").open() as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_predicted_blocks_are_what_the_engine_reported_as_cached(capture: Path) -> None:
    streams = published(capture)
    block_size = next(
        event.block_size
        for message in streams[0]
        for event in decode_batch(message.payload).events
        if hasattr(event, "block_size")
    )
    index = ReferenceIndex(block_size)
    workers = [WorkerRank("engine", rank) for rank in range(len(streams))]
    for worker in workers:
        index.add_worker(worker, WorkerOptions())
    applied = [0] * len(streams)
    compared, after_reset = 0, False
    for request in requests(capture):
        if request.get("kind") == "call":
            after_reset = True
        if request.get("usage") is None or request.get("seq_after") is None:
            continue
        # vLLM 0.23 leaves the details out where nothing was cached.
        details = request["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        for rank, messages in enumerate(streams):
            while applied[rank] <= request["seq_before"][rank]:
                index.apply_payload(workers[rank], messages[applied[rank]].payload)
                applied[rank] += 1
        tokens = request["prompt_token_ids"]
        model = request["params"]["model"]
        hashes = block_hashes(
            tokens,
            block_size,
            lora_name=model if model.startswith("adapter") else "",
            cache_salt=request["params"].get("cache_salt") or "",
        )
        limit = (len(tokens) - 1) // block_size
        found = index.find_matches(hashes, now=0.0, usable=limit).by_worker()
        # The rank that published something served the request; if none did, any may have.
        served = [
            rank for rank in range(len(streams)) if request["seq_before"][rank] != request["seq_after"][rank]
        ] or range(len(streams))
        predicted = {
            min(found[workers[rank]].device if workers[rank] in found else 0, limit) * block_size for rank in served
        }
        if not after_reset:
            assert details["cached_tokens"] in predicted, request["phase"]
            compared += 1
        after_reset = False
    assert compared >= 10
    index.check_invariants()


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_a_recorded_replay_gives_what_was_published_live(capture: Path) -> None:
    live = published(capture)[0]
    replies = [parse_replay_reply(f) for f in frames(capture / "replay_from0.bin")]
    assert replies[-1] is None
    sequence: SourceSequence[Message] = SourceSequence()
    sequence.on_reconnect()
    applied = [
        decision.batch.content
        for reply in replies
        if reply is not None
        for decision in sequence.on_replay(
            sequence.attempt, SequencedBatch(reply.seq, digest(reply.payload), reply), 0.0
        )
        if isinstance(decision, Apply)
    ]
    assert sequence.on_replay_end(sequence.attempt, 0.0) == []
    assert [m.payload for m in applied] == [m.payload for m in live]
    assert not sequence.replaying
    assert not sequence.history_incomplete
