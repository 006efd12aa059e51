"""Recordings of real engines, over real sockets, into a real indexer process: predicted = reported, request by request.

Each recording is published twice at once, as two workers: as it was recorded, and re-encoded into the other form of
events (arrays until vLLM 0.23, maps since), each with the replay framing of its time. Before each request that ran
alone, the indexer is asked what it would hit; that must be what the engine then reported as `cached_tokens`. An
engine computes the last token of a prompt again, whatever it has: (prompt - 1) // block_size blocks are its most.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.recorded_engine import RecordedEngine, recorded_engine

from kvscout.v1 import indexer_pb2
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import block_hashes
from kvscout_common.worker import WorkerRank

CAPTURES = Path(__file__).parents[1] / "data" / "captures"

STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
FIELDS = {
    "BlockStored": STORED_FIELDS,
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True)
class Recording:
    """What a recording holds, and what must come out of it."""

    name: str
    block_size: int
    compared: int
    """Requests whose cached tokens must be predicted exactly."""
    after_reset: tuple[int, ...] = ()
    """Blocks that the first request after each reset seems to have cached, because the engine has not said yet that
    they are gone."""
    loras: int = 0
    """Compared requests with a LoRA adapter."""
    salts: int = 0
    """Compared requests with a cache salt."""
    hits: int = 0
    """Compared requests with cached tokens."""
    shortened: int = 0
    """Compared requests of which full attention has more than sliding windows let the engine use."""

    @property
    def folder(self) -> Path:
        return CAPTURES / self.name

    def batches(self) -> list[list[bytes]]:
        """The payloads of each rank, in order of their seq."""
        ranks = []
        for path in [self.folder / "events.bin", *sorted(self.folder.glob("events.[0-9]*.bin"))]:
            with path.open("rb") as file:
                frames = [record[1] for record in msgpack.Unpacker(file)]
            assert [int.from_bytes(seq, "big") for _, seq, _ in frames] == list(range(len(frames)))
            ranks.append([payload for _, _, payload in frames])
        return ranks

    def calls(self) -> list[dict[str, Any]]:
        """Everything that was sent to the engine one at a time, in order."""
        lines = (self.folder / "requests.jsonl").read_text().splitlines()
        calls = [call for call in map(json.loads, lines) if call.get("seq_after") is not None]
        return sorted(calls, key=lambda call: int(call["i"]))


RECORDINGS = [
    Recording("vllm-0.23.0-array", 16, compared=44, after_reset=(3,), salts=3, hits=9),
    Recording("vllm-0.32.0", 32, compared=42, after_reset=(3,), salts=3, hits=8),
    Recording("vllm-0.32.0-dp2", 32, compared=34, after_reset=(2,), hits=3),
    Recording("vllm-0.32.0-lora-chunked", 32, compared=11, after_reset=(0,), loras=3, salts=4, hits=3),
    # Every other layer has a window of 64 tokens.
    Recording("vllm-0.32.0-sliding-window", 32, compared=64, after_reset=(0, 0, 0), salts=6, hits=32, shortened=14),
    # Five of six layers, each a group of its own, have a window of 100 tokens; chunks of 128 tokens.
    Recording("vllm-0.32.0-six-groups", 32, compared=64, after_reset=(1, 4, 0), salts=4, hits=28, shortened=15),
    # Every other layer has a window of 300 tokens, and what ends every 96 is kept.
    Recording("vllm-0.32.0-sliding-window-300", 32, compared=76, after_reset=(0, 0), salts=3, hits=44, shortened=1),
    # Every other layer has a window of 33 tokens; chunks of 96 tokens.
    Recording("vllm-0.32.0-sliding-window-33", 32, compared=78, after_reset=(0,), salts=5, hits=39, shortened=14),
]


def is_array_form(payload: bytes) -> bool:
    events = msgpack.unpackb(payload)[1]
    return isinstance(events[0], list)


def other_form(payload: bytes) -> bytes:
    """A batch in the other form of events."""
    timestamp, events, rank = msgpack.unpackb(payload)
    converted: list[Any] = []
    for event in events:
        if isinstance(event, list):
            tag, *values = event
            converted.append({"type": tag, **dict(zip(FIELDS[tag], values, strict=False))})
        else:
            converted.append([event["type"], *(event.get(name) for name in FIELDS[event["type"]])])
    packed: bytes = msgpack.packb([timestamp, converted, rank])
    return packed


def cached_tokens(call: dict[str, Any]) -> int:
    """What the engine reported; vLLM 0.23 leaves the details out where nothing was cached."""
    details = call["usage"]["prompt_tokens_details"]
    if details is None:
        return 0
    cached: int = details["cached_tokens"]
    return cached


def serving_rank(call: dict[str, Any], block_size: int) -> int:
    """The rank that served a request: the one that published because of it."""
    changed = [
        rank
        for rank, (before, after) in enumerate(zip(call["seq_before"], call["seq_after"], strict=True))
        if before != after
    ]
    if changed:
        assert len(changed) == 1, call["i"]
        return changed[0]
    # Nothing was new. With several ranks that was a prompt that no cache can have any of, so that each rank will do.
    assert len(call["seq_before"]) == 1 or len(call["prompt_token_ids"]) < block_size
    return 0


class Playback:
    """One worker whose ranks publish a recording."""

    def __init__(self, client: IndexerClient, worker_id: str, engines: list[RecordedEngine]) -> None:
        self._client = client
        self._engines = engines
        self.worker_id = worker_id
        self.batches: list[list[bytes]] = []

    async def play(self, seqs: list[int]) -> None:
        """Publishes each rank's batches up to a seq and waits until they are applied."""
        for rank, (engine, seq) in enumerate(zip(self._engines, seqs, strict=True)):
            await engine.publish(*self.batches[rank][engine.next_seq : seq + 1])
            await self._client.until_applied(seq, self.worker_id, rank)


@asynccontextmanager
async def playing(recording: Recording, client: IndexerClient) -> AsyncIterator[list[Playback]]:
    """Registers a recording as two workers, "array" and "map"."""
    batches = recording.batches()
    converted = [[other_form(payload) for payload in rank] for rank in batches]
    recorded_form = "array" if is_array_form(batches[0][0]) else "map"
    async with AsyncExitStack() as stack:
        playbacks = []
        for form in ("array", "map"):
            engines = [await stack.enter_async_context(recorded_engine(replay_topics=form == "map")) for _ in batches]
            playback = Playback(client, form, engines)
            playback.batches = batches if form == recorded_form else converted
            await client.register(*engines, worker_id=form, block_size=recording.block_size)
            for rank, engine in enumerate(engines):
                await engine.subscribed()
                await client.until_applied(-1, form, rank)
            playbacks.append(playback)
        yield playbacks


class FullAttention:
    """What the full-attention groups alone of each rank would let an engine use."""

    def __init__(self, recording: Recording) -> None:
        self._block_size = recording.block_size
        self._batches = [list(map(decode_batch, rank)) for rank in recording.batches()]
        self._index = ReferenceIndex(recording.block_size)
        self._ranks = [WorkerRank("full", rank) for rank in range(len(self._batches))]
        for rank in self._ranks:
            self._index.add_worker(rank, WorkerOptions())
        self._applied = [0] * len(self._ranks)
        stored = [event for rank in self._batches for batch in rank for event in batch.events]
        self._others = {event.group for event in stored if isinstance(event, Stored) and not event.full_attention}

    def play(self, seqs: list[int]) -> None:
        """Applies each rank's batches up to a seq."""
        for rank, (batches, seq) in enumerate(zip(self._batches, seqs, strict=True)):
            for batch in batches[self._applied[rank] : seq + 1]:
                full = [event for event in batch.events if getattr(event, "group", None) not in self._others]
                self._index.apply(self._ranks[rank], EventBatch(tuple(full)))
            self._applied[rank] = seq + 1

    def blocks(self, call: dict[str, Any], rank: int) -> int:
        """Of a request."""
        prompt, params = call["prompt_token_ids"], call["params"]
        lora = "" if params["model"] == MODEL else params["model"]
        hashes = block_hashes(prompt, self._block_size, lora_name=lora, cache_salt=params.get("cache_salt", ""))
        found = self._index.find_matches(hashes, now=0.0).by_worker().get(self._ranks[rank])
        return min(found.device if found else 0, (len(prompt) - 1) // self._block_size)


async def predicted_blocks(
    client: IndexerClient, recording: Recording, call: dict[str, Any]
) -> dict[tuple[str, int], int]:
    """Blocks that each worker rank is predicted to report as cached for a request."""
    prompt, params = call["prompt_token_ids"], call["params"]
    overlaps = await client.overlaps(
        prompt,
        lora_name="" if params["model"] == MODEL else params["model"],
        cache_salt=params.get("cache_salt", ""),
    )
    return {row: min(blocks, (len(prompt) - 1) // recording.block_size) for row, blocks in overlaps.items()}


@pytest.mark.parametrize("backend", ["native, where it is built", "reference"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
async def test_predicted_cached_tokens_are_the_engines_own(recording: Recording, backend: str) -> None:
    counts = dict.fromkeys(("compared", "loras", "salts", "hits", "shortened"), 0)
    after_reset: list[int] = []
    environment = {"KVSCOUT_NATIVE": "0", "KVSCOUT_REQUIRE_NATIVE": ""} if backend == "reference" else None
    async with (
        indexer_process("--log-level", "warning", environment=environment) as (client, _),
        playing(recording, client) as playbacks,
    ):
        was_reset = False
        full_attention = FullAttention(recording)
        for call in recording.calls():
            if call["kind"] == "call":
                was_reset = True
                continue
            full_attention.play(call["seq_before"])
            for playback in playbacks:
                await playback.play(call["seq_before"])
            predicted = await predicted_blocks(client, recording, call)
            rank, reported = serving_rank(call, recording.block_size), cached_tokens(call)
            rows = [predicted.get((playback.worker_id, rank), 0) for playback in playbacks]
            if was_reset:
                # The engine tells of a reset with the events of the next request: it still seems to have what it had.
                was_reset = False
                assert reported == 0
                assert rows[0] == rows[1]
                after_reset.append(rows[0])
                for playback in playbacks:
                    await playback.play(call["seq_after"])
                    status = await client.status(playback.worker_id, rank)
                    assert status.blocks == call["usage"]["total_tokens"] // recording.block_size, call["i"]
                continue
            assert [blocks * recording.block_size for blocks in rows] == [reported] * 2, call["i"]
            counts["compared"] += 1
            counts["loras"] += call["params"]["model"] != MODEL
            counts["salts"] += "cache_salt" in call["params"]
            counts["hits"] += reported > 0
            counts["shortened"] += full_attention.blocks(call, rank) > rows[0]
        print(f"{recording.name}: {counts['compared']} requests compared in two encodings, {counts}")
        assert counts == {name: getattr(recording, name) for name in counts}
        assert tuple(after_reset) == recording.after_reset


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
async def test_an_indexer_that_comes_late_learns_the_same_from_a_replay(recording: Recording) -> None:
    prompts = [call["prompt_token_ids"] for call in recording.calls() if call["kind"] != "call"]
    async with indexer_process("--log-level", "warning") as (client, _), playing(recording, client) as (array, maps):
        last = [len(batches) - 1 for batches in maps.batches]
        await maps.play(last)
        await array.play([max(0, seq - 3) for seq in last])
        async with AsyncExitStack() as stack:
            late = []
            for batches in array.batches:
                engine = await stack.enter_async_context(recorded_engine(replay_topics=False))
                engine.lose(*batches[:-2])
                late.append(engine)
            await client.register(*late, worker_id="late", block_size=recording.block_size)
            for rank, engine in enumerate(late):
                await engine.subscribed()
                await engine.publish(*array.batches[rank][-2:])
                await client.until_applied(last[rank], "late", rank)
                # With a Cleared nothing before it matters: where it is first, or overtakes the connect, nobody asks.
                assert engine.replays_asked[:1] == [0] or b"AllBlocksCleared" in array.batches[rank][-1]
            await array.play(last)
            for prompt in prompts:
                found = await client.overlaps(prompt)
                for rank in range(len(last)):
                    blocks = [found.get((worker, rank), 0) for worker in ("array", "map", "late")]
                    assert len(set(blocks)) == 1, (rank, blocks)
            for rank in range(len(last)):
                states = [await client.status(worker, rank) for worker in ("array", "map", "late")]
                assert len({state.blocks for state in states}) == 1
                assert all(state.state == indexer_pb2.SOURCE_STATE_LIVE for state in states)
                assert all(state.malformed == 0 for state in states)
                assert all(not state.ignored for state in states), states
