"""The recordings of a real vLLM 0.32.0: the engine, given the same requests, caches and reports the same.

Both engines had 65 blocks (one is vLLM's null block; the hybrid one had 79) of 32 tokens and at most 16 requests in a
batch.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.mocker_invariants import check_blocks

from kvscout_mocker.config import EngineConfig, StepCost
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.hybrid_blocks import HybridBlockManager
from kvscout_mocker.engine.request import Request
from kvscout_mocker.events import BlockHashFormat, EventEncoder, EventFormat
from kvscout_mocker.tokens.sequence import CacheScope, Sequence

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
BLOCK_SIZE = 32
ENCODER = EventEncoder(EventFormat.MAP, BlockHashFormat.INT, dp_rank=0)


class RecordedRequest(Request):
    """Generates the tokens that the real engine generated."""

    recorded: list[int]

    def next_token(self, vocab_size: int) -> int:
        return self.recorded[self.output_tokens]


class HashNames:
    """Replaces an engine's opaque hashes by what they stand for, so that two engines can be compared."""

    def __init__(self) -> None:
        self._names: dict[int | None, str] = {None: ""}

    def batch(self, payload: bytes) -> list[dict[str, Any]]:
        _, events, dp_rank = msgpack.unpackb(payload)
        assert dp_rank == 0
        return [self._event(event) for event in events]

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        named = {key: value for key, value in event.items() if key != "type"} | {"type": event["type"]}
        if event["type"] == "BlockStored":
            name = named["parent_block_hash"] = self._names[event["parent_block_hash"]]
            for index, block_hash in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                name = self._names[block_hash] = f"{name}/{tokens}{event['extra_keys'][index]}"
        if "block_hashes" in event:
            named["block_hashes"] = [self._names[block_hash] for block_hash in event["block_hashes"]]
        return named


def recorded_batches(name: str) -> list[bytes]:
    with (CAPTURES / name / "events.bin").open("rb") as file:
        return [payload for _, (_, _, payload) in msgpack.Unpacker(file)]


def recorded_calls(name: str) -> list[dict[str, Any]]:
    lines = (CAPTURES / name / "requests.jsonl").read_text().splitlines()
    calls = [call for call in map(json.loads, lines) if "kind" in call]
    return sorted(calls, key=lambda call: int(call["i"]))


def request_of(call: dict[str, Any]) -> RecordedRequest:
    params = call.get("params", {})
    model = params.get("model", "tiny")
    request = RecordedRequest(
        str(call["i"]),
        Sequence(
            array("I", call["prompt_token_ids"]),
            block_size=BLOCK_SIZE,
            hash_seed=7,
            scope=CacheScope(
                lora_name="" if model == "tiny" else model,
                lora_id=int(model != "tiny"),
                cache_salt=params.get("cache_salt", ""),
                session_id=params.get("session_id", ""),
            ),
        ),
        call["usage"]["completion_tokens"],
        report_prefix=params.get("vllm_xargs", {}).get("kv_cache_report_mode") == "full",
    )
    request.recorded = call["output_token_ids"]
    return request


class Replay:
    """Gives recorded calls to an engine; requests that ran side by side are submitted side by side."""

    def __init__(self, max_num_batched_tokens: int, *, num_gpu_blocks: int = 65, sliding_window: int = 0) -> None:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=num_gpu_blocks,
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=1024,
            max_waiting=1000,
            vocab_size=4096,
            cost=StepCost(0.0, 0.0, 0.0),
            sliding_window=sliding_window,
        )
        hybrid = HybridBlockManager(num_gpu_blocks, BLOCK_SIZE, sliding_window) if sliding_window else None
        self.engine = Engine(config, hybrid)
        self.payloads: list[bytes] = []
        self.cached: dict[int, int | None] = {}

    def run(self, calls: list[dict[str, Any]], lone_arrivals: frozenset[str] = frozenset()) -> None:
        """Run the calls.

        Args:
            calls: Recorded calls, in order.
            lone_arrivals: Phases whose first request was scheduled alone in the recording.
        """
        while calls:
            if calls[0]["kind"] == "call":
                assert self.engine.reset_prefix_cache()
                calls = calls[1:]
                continue
            size = 1
            if calls[0]["seq_after"] is None:
                size = sum(call["phase"] == calls[0]["phase"] for call in calls)
            group, calls = calls[:size], calls[size:]
            requests = {int(call["i"]): request_of(call) for call in group}
            for index, request in enumerate(requests.values()):
                self.engine.submit(request)
                if index == 0 and group[0]["phase"] in lone_arrivals:
                    self._step()
            while self._step():
                pass
            check_blocks(self.engine.blocks)
            self.cached |= {number: request.cached_tokens for number, request in requests.items()}

    def _step(self) -> bool:
        step = self.engine.begin_step()
        if step is None:
            return False
        self.engine.finish_step(step)
        events = self.engine.take_events()
        if events:
            self.payloads.append(ENCODER.encode(events, 0.0))
        return True


@pytest.mark.parametrize(
    ("name", "max_num_batched_tokens", "comparable_calls"),
    [
        # The burst at the end arrived in an order that nothing recorded.
        ("vllm-0.32.0", 4096, 55),
        ("vllm-0.32.0-lora-chunked", 128, 17),
    ],
)
def test_the_engine_caches_and_reports_what_vllm_did(
    name: str, max_num_batched_tokens: int, comparable_calls: int
) -> None:
    calls = recorded_calls(name)[:comparable_calls]
    replay = Replay(max_num_batched_tokens)
    replay.run(calls, lone_arrivals=frozenset({"conc:8-at-once"}))

    reported = {
        int(call["i"]): call["usage"]["prompt_tokens_details"]["cached_tokens"] for call in calls if "usage" in call
    }
    assert replay.cached == reported

    theirs, ours = HashNames(), HashNames()
    batches = recorded_batches(name)[: len(replay.payloads)]
    assert len(batches) == max(seqs[0] for call in calls if (seqs := call["seq_after"])) + 1
    for seq, (their_payload, our_payload) in enumerate(zip(batches, replay.payloads, strict=True)):
        their_batch, our_batch = theirs.batch(their_payload), ours.batch(our_payload)
        assert list(map(list, our_batch)) == list(map(list, their_batch)), f"fields of batch {seq}"
        assert our_batch == their_batch, f"batch {seq}"


def test_the_hybrid_engine_caches_and_reports_what_vllm_did() -> None:
    name = "vllm-0.32.0-sliding-window"
    calls = recorded_calls(name)
    replay = Replay(4096, num_gpu_blocks=79, sliding_window=64)
    replay.run(calls)

    reported = {
        int(call["i"]): call["usage"]["prompt_tokens_details"]["cached_tokens"] for call in calls if "usage" in call
    }
    assert replay.cached == reported
    assert any(reported.values())

    theirs, ours = GroupEvents(), GroupEvents()
    batches = recorded_batches(name)
    assert len(batches) == len(replay.payloads)
    for seq, (their_payload, our_payload) in enumerate(zip(batches, replay.payloads, strict=True)):
        assert ours.batch(our_payload) == theirs.batch(their_payload), f"batch {seq}"


class GroupEvents:
    """What batches say, with hashes replaced by what they stand for: full attention tells, after the windows."""

    def __init__(self) -> None:
        self._names: dict[int | None, str] = {None: ""}

    def batch(self, payload: bytes) -> list[tuple[object, ...]]:
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            if event.get("kv_cache_spec_kind") == "full_attention":
                self._name(event)
        return [self._plain(event) for event in events]

    def _name(self, event: dict[str, Any]) -> None:
        name = self._names[event["parent_block_hash"]]
        for index, block_hash in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            name = self._names[block_hash] = f"{name}/{tokens}{event['extra_keys'][index]}"

    def _plain(self, event: dict[str, Any]) -> tuple[object, ...]:
        names = [self._names[block_hash] for block_hash in event.get("block_hashes", [])]
        above = self._names[event.get("parent_block_hash")]
        others = {key: value for key, value in event.items() if key not in ("block_hashes", "parent_block_hash")}
        return names, above, others
