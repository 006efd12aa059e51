"""Services stop when they are told to although NATS is gone, or hangs."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.mocker_process import running_mocker
from support.nats_server import NatsServer
from support.processes import DEADLINE_SECONDS, eventually, start

from kvscout.v1 import bridge_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import call, open_channel


@pytest.mark.parametrize("ends", ["killed", "paused"])
async def test_services_exit_with_0_without_nats(tmp_path: Path, ends: str) -> None:
    nats = NatsServer(tmp_path / "nats")
    await nats.start()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_mocker())
        flags = ("--nats-server", nats.url)
        rank = engine.ranks[0]
        services = await asyncio.gather(
            start("kvscout_indexer.main", *flags),
            start("kvscout_scheduler.main", *flags, "--router-replica-sync"),
            start("kvscout_gateway.main", *flags, "--no-indexer"),
            start(
                "kvscout_bridge.main", *flags, "--worker-id", "w", "--model", "m", "--block-size", "16",
                "--event-endpoint", rank["events"], "--replay-endpoint", rank["replay"],
            ),
        )  # fmt: skip
        try:
            channel = open_channel(services[-1].address)
            bridge = bridge_pb2_grpc.BridgeStub(channel)

            async def published() -> bool:
                await engine.complete(list(range(64)), max_tokens=1)
                status = await call(bridge.GetStatus, types_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS)
                return not status.service.warnings

            await eventually(published)
            await channel.close()
            if ends == "killed":
                await nats.kill()
            else:
                nats.pause()
            # There is something left that the bridge has to send.
            await engine.complete(list(range(100, 200)), max_tokens=1)
            for service in services:
                service.process.send_signal(signal.SIGTERM)
            for service in services:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await service.process.communicate()
                assert service.process.returncode == 0, service.ready
        finally:
            for service in services:
                if service.process.returncode is None:
                    service.process.kill()
                    await service.process.communicate()
            nats.resume() if ends == "paused" else None
            await nats.kill()
