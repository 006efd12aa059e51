"""A barrier is passed when the server has what came before it, and never over a lost connection."""

from __future__ import annotations

import asyncio

import nats
import nats.errors
import pytest
from support.nats_server import nats_server

from kvscout_common.nats.barrier import NatsBarrier


async def test_what_was_published_before_a_barrier_is_at_the_subscriber_in_order() -> None:
    async with nats_server() as server, await nats.connect(server.url) as client:
        inbox = await client.subscribe("to.me")
        barrier = NatsBarrier(client)
        generation = barrier.generation
        for number in range(1000):
            await client.publish("to.me", str(number).encode())
        await barrier.wait(generation, seconds=10)
        assert [int((await inbox.next_msg(timeout=1)).data) for _ in range(1000)] == list(range(1000))


async def test_a_barrier_is_not_passed_over_a_lost_connection() -> None:
    async with nats_server() as server:
        client = await nats.connect(server.url, reconnect_time_wait=0.02, max_reconnect_attempts=-1)
        barrier = NatsBarrier(client)
        generation = barrier.generation
        await barrier.wait(generation, seconds=10)
        await server.kill()
        with pytest.raises((nats.errors.Error, TimeoutError)):
            await barrier.wait(generation, seconds=0.05)
        await server.start()
        async with asyncio.timeout(30):
            while not client.is_connected:
                await asyncio.sleep(0.01)
        with pytest.raises(nats.errors.ConnectionReconnectingError):
            await barrier.wait(generation, seconds=10)
        await barrier.wait(barrier.generation, seconds=10)
        await client.close()
