"""Events of a custom engine over its own ZMQ sockets, read by a real indexer and by a plain replay client."""

from __future__ import annotations

import threading

import msgpack
import pytest
import zmq
from support.free_ports import first_of_free_ports
from support.indexer_client import BLOCK_SIZE, local_indexer

from kvscout_client.zmq_publisher import END_OF_REPLAY, ZmqKvEventPublisher, full_blocks, u64

PROMPT = list(range(100, 112))


def publisher(**fields: object) -> ZmqKvEventPublisher:
    return ZmqKvEventPublisher(
        "tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        block_size=BLOCK_SIZE,
        **fields,  # type: ignore[arg-type]
    )


async def test_an_indexer_follows_what_is_stored_removed_and_cleared() -> None:
    async with local_indexer() as (client, _):
        with publisher() as events:
            await client.register(events)  # type: ignore[arg-type]  # it has both endpoints
            events.publish_stored(PROMPT[:8], [4, 4], [1, -2])
            last = events.publish_stored(PROMPT[8:], [4], [3], parent_hash=-2)
            assert last == 1
            await client.until_applied(1)
            assert await client.overlap(PROMPT) == 3
            events.publish_removed([-2])
            await client.until_applied(2)
            assert await client.overlap(PROMPT) == 1
            events.publish_cleared()
            assert (await client.until_applied(3)).blocks == 0


async def test_an_indexer_that_comes_late_gets_everything_from_the_replay_socket() -> None:
    async with local_indexer() as (client, _):
        with publisher(topic="kv") as events:
            events.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3], lora_name="adapter")
            events.publish_removed([3])
            await client.register(events)  # type: ignore[arg-type]
            await client.until_applied(1)
            assert await client.overlap(PROMPT, lora_name="adapter") == 2
            assert await client.overlap(PROMPT) == 0


async def test_threads_may_publish_together() -> None:
    async with local_indexer() as (client, _):
        with publisher() as events:
            await client.register(events)  # type: ignore[arg-type]

            def store(first: int) -> None:
                for number in range(first, first + 50):
                    events.publish_stored([number] * 4, [4], [number])

            threads = [threading.Thread(target=store, args=(1 + 50 * at,)) for at in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            status = await client.until_applied(199)
            assert (status.blocks, status.malformed) == (200, 0)


def test_ranks_add_to_the_ports_and_a_replay_begins_where_it_is_asked_to() -> None:
    base = first_of_free_ports(2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        with ZmqKvEventPublisher(
            "tcp://127.0.0.1:*", replay_endpoint=f"tcp://[::1]:{base}", block_size=4, dp_rank=1, buffer_steps=3
        ) as events:
            assert events.replay_endpoint == f"tcp://[::1]:{base + 1}"
            for number in range(1, 6):
                events.publish_removed([number])
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.IPV6, 1)
            dealer.set(zmq.RCVTIMEO, 10_000)
            dealer.connect(events.replay_endpoint)
            dealer.send_multipart([b"nonsense"])
            dealer.send_multipart([b"", (1).to_bytes(8, "big")])
            answers = [dealer.recv_multipart()]
            while answers[-1][-2] != END_OF_REPLAY:
                answers.append(dealer.recv_multipart())
            assert [int.from_bytes(answer[-2], "big") for answer in answers[:-1]] == [2, 3, 4]
            assert msgpack.unpackb(answers[0][-1])[1:] == [
                [{"type": "BlockRemoved", "block_hashes": [3], "medium": None}],
                1,
            ]


def test_short_blocks_are_left_out_with_what_follows_them() -> None:
    assert full_blocks(range(10), [4, 2, 4], [1, 2, 3], 4) == ((1,), (0, 1, 2, 3))
    with publisher() as events:
        assert events.publish_stored([1, 2], [2], [9]) is None
        assert events.publish_stored(PROMPT[:4], [4], [9]) == 0


@pytest.mark.parametrize(
    ("tokens", "lengths", "hashes", "reason"),
    [
        ([1, 2, 3, 4], [4], [1, 2], "1 num_block_tokens for 2 block_hashes"),
        ([1, 2, 3], [4], [1], "add up to 4, there are 3"),
        ([1] * 5, [5], [1], "between 1 and block_size"),
        ([], [0], [1], "between 1 and block_size"),
        ([2**32, 1, 1, 1], [4], [1], "u32"),
        ([1] * 4, [4], [2**64], "not a 64-bit hash"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tokens: list[int], lengths: list[int], hashes: list[int], reason: str
) -> None:
    with publisher() as events:
        with pytest.raises(ValueError, match=reason):
            events.publish_stored(tokens, lengths, hashes)
        assert events.publish_cleared() == 0, "nothing was numbered"


def test_signed_hashes_are_reinterpreted() -> None:
    assert u64(-1) == 2**64 - 1
    assert u64(2**64 - 1) == 2**64 - 1


def test_an_address_in_use_is_an_error_and_a_closed_publisher_says_so() -> None:
    with publisher() as first:
        with pytest.raises(zmq.ZMQError):
            ZmqKvEventPublisher(first.endpoint.replace("127.0.0.1", "*"), block_size=4)
    first.close()
    with pytest.raises(ValueError, match="closed"):
        first.publish_cleared()
    with pytest.raises(ValueError, match="block_size"):
        ZmqKvEventPublisher("tcp://127.0.0.1:*", block_size=0)
