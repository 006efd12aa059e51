"""The event sockets of a real mocker process: live batches and the replay of past ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from support.mocker_process import DEADLINE_SECONDS, MockerProcess, running_mocker

END = b"\xff" * 8


@asynccontextmanager
async def subscribed(mocker: MockerProcess, topic: str = "", rank: int = 0) -> AsyncIterator[zmq.asyncio.Socket]:
    """A SUB socket that is known to receive: what it got until then is thrown away."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.set(zmq.LINGER, 0)
    socket.subscribe(topic)
    socket.connect(mocker.ranks[rank]["events"])
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            number = 0
            while not await socket.poll(20):
                number += 1
                await mocker.complete([number] * 16, {"X-data-parallel-rank": str(rank)}, max_tokens=1)
        newest = (await mocker.replay(0, rank))[-2][-2]
        while (await socket.recv_multipart())[1] != newest:
            pass
        yield socket
    finally:
        socket.close()
        context.term()


def batch(payload: bytes) -> list[Any]:
    unpacked: list[Any] = msgpack.unpackb(payload)
    return unpacked


async def test_live_batches_carry_topic_sequence_and_the_prompts_blocks() -> None:
    async with running_mocker("--topic", "kv-events") as mocker, subscribed(mocker, "kv-") as socket:
        prompt = list(range(1000, 1040))
        before = len(await mocker.replay(0)) - 1
        await mocker.complete(prompt, max_tokens=1)
        topic, seq, payload = await socket.recv_multipart()
        assert topic == b"kv-events"
        assert int.from_bytes(seq, "big") == before
        _, [event], dp_rank = batch(payload)
        assert (event["type"], event["token_ids"], dp_rank) == ("BlockStored", prompt[:32], 0)
        # Fully cached: nothing to report, so the next batch is the other prompt's.
        await mocker.complete(prompt, max_tokens=1)
        await mocker.complete(prompt[::-1], max_tokens=1)
        _, seq, payload = await socket.recv_multipart()
        assert int.from_bytes(seq, "big") == before + 1
        assert batch(payload)[1][0]["token_ids"] == prompt[::-1][:32]


async def test_a_replay_repeats_the_published_bytes() -> None:
    async with running_mocker("--topic", "t") as mocker, subscribed(mocker) as socket:
        live = []
        for first in range(2000, 2500, 100):
            await mocker.complete(list(range(first, first + 20)), max_tokens=1)
            live.append(await socket.recv_multipart())
        start = int.from_bytes(live[0][1], "big")
        *answers, end = await mocker.replay(start)
        assert answers == [[b"", *frames] for frames in live]
        assert end == [b"", b"", END, b""]
        everything = await mocker.replay(0)
        assert [int.from_bytes(frames[2], "big") for frames in everything[:-1]] == list(range(start + 5))
        assert await mocker.replay(start + 5) == [end]
        assert await mocker.replay(-1) == [end]


async def test_the_array_format_is_that_of_older_engines_also_in_the_replay() -> None:
    async with running_mocker("--event-format", "array", "--topic", "t", "--lora", "x") as mocker:
        await mocker.complete(list(range(20)), max_tokens=1, model="x", cache_salt="s")
        first, end = await mocker.replay(0)
        assert end == [b"", END, b""]
        assert first[:2] == [b"", (0).to_bytes(8, "big")]
        [event] = batch(first[2])[1]
        hashes = event.pop(1)
        assert len(hashes) == 1
        keys = [["x", "s"]]
        expected = ["BlockStored", None, list(range(16)), 16, 1, "GPU", "x", keys, 0, "full_attention", None]
        assert event == expected


async def test_only_the_last_buffer_steps_batches_are_kept() -> None:
    async with running_mocker("--buffer-steps", "3") as mocker:
        for first in range(5):
            await mocker.complete([first] * 16, max_tokens=1)
        *answers, _ = await mocker.replay(0)
        assert [int.from_bytes(frames[2], "big") for frames in answers] == [2, 3, 4]


async def test_a_malformed_replay_request_does_not_stop_the_next() -> None:
    async with running_mocker() as mocker:
        await mocker.complete([1] * 16, max_tokens=1)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.connect(mocker.ranks[0]["replay"])
        for frames in ([b"", b"short"], [b"lone"], [b"", b"", b"\x00" * 8], [b"", b"\x00" * 8]):
            await socket.send_multipart(frames)
        async with asyncio.timeout(DEADLINE_SECONDS):
            answers = [await socket.recv_multipart() for _ in range(2)]
        assert [frames[2] for frames in answers] == [(0).to_bytes(8, "big"), END]
        assert not await socket.poll(0)
        socket.close()
        context.term()


async def test_each_rank_counts_and_publishes_on_its_own() -> None:
    async with running_mocker("--dp-size", "2") as mocker:
        for rank in (1, 1, 0):
            headers = {"X-data-parallel-rank": str(rank)}
            await mocker.complete([rank, *range(50 * rank + rank, 20 + 50 * rank)], headers, max_tokens=1)
        async with mocker.http.get(mocker.url + "/kv_event_sources") as response:
            sources = await response.json()
        for rank in (0, 1):
            [frames] = (await mocker.replay(0, rank))[:-1]
            assert int.from_bytes(frames[2], "big") == 0
            assert batch(frames[3])[2] == rank
            assert sources[str(rank)]["endpoint"] == mocker.ranks[rank]["events"]
            assert sources[str(rank)]["replay_endpoint"] == mocker.ranks[rank]["replay"]
        assert [rank["dp_rank"] for rank in mocker.ranks] == [0, 1]
        assert len({rank[kind] for rank in mocker.ranks for kind in ("events", "replay")}) == 4


async def test_a_restarted_process_counts_from_0_with_other_hashes() -> None:
    first_batches = []
    for _ in range(2):
        async with running_mocker() as mocker:
            await mocker.complete(list(range(16)), max_tokens=1)
            await mocker.complete(list(range(40, 56)), max_tokens=1)
            *answers, _ = await mocker.replay(0)
            assert [int.from_bytes(frames[2], "big") for frames in answers] == [0, 1]
            first_batches.append(batch(answers[0][3])[1][0])
    assert first_batches[0]["token_ids"] == first_batches[1]["token_ids"]
    assert first_batches[0]["block_hashes"] != first_batches[1]["block_hashes"]


async def test_a_cleared_cache_is_reported_with_the_next_requests_batch() -> None:
    async with running_mocker() as mocker:
        await mocker.complete([7] * 20, max_tokens=1)
        assert await mocker.post("/reset_prefix_cache", None) == (200, {"success": True})
        assert len(await mocker.replay(0)) == 2
        await mocker.complete([7] * 20, max_tokens=1)
        *_, newest, _ = await mocker.replay(0)
        assert [event["type"] for event in batch(newest[3])[1]] == ["AllBlocksCleared", "BlockStored"]


@pytest.mark.parametrize("hash_format", ["int", "bytes"])
async def test_counting_stored_and_removed_copies_predicts_the_cached_tokens(hash_format: str) -> None:
    flags = ("--num-gpu-blocks", "20", "--block-hash-format", hash_format, "--max-num-seqs", "4")
    async with running_mocker(*flags, "--max-num-batched-tokens", "64") as mocker:
        for turn in range(40):
            prompt = [turn % 3] * 16 + [turn % 5] * 32 + [turn] * (turn % 4 * 8)
            copies: dict[object, int] = {}
            chain: dict[object, tuple[int, ...]] = {None: ()}
            for frames in (await mocker.replay(0))[:-1]:
                for event in batch(frames[3])[1]:
                    delta = 1 if event["type"] == "BlockStored" else -1
                    parent = event.get("parent_block_hash")
                    for index, block_hash in enumerate(event["block_hashes"]):
                        copies[block_hash] = copies.get(block_hash, 0) + delta
                        if delta == 1:
                            tokens = event["token_ids"][index * 16 : index * 16 + 16]
                            parent, chain[block_hash] = block_hash, (*chain[parent], *tokens)
            held = {chain[block_hash] for block_hash, count in copies.items() if count > 0}
            overlap = 0
            while tuple(prompt[: overlap + 16]) in held and overlap + 16 <= len(prompt):
                overlap += 16
            answer = await mocker.complete(prompt, max_tokens=4)
            expected = min(overlap, (len(prompt) - 1) // 16 * 16)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected, f"turn {turn}"
