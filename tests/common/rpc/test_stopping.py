"""How servers stop: clients are sent away at once, what runs has its time, endless calls hold nobody."""

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import DEADLINE_SECONDS, eventually, running
from support.tcp_relay import tcp_relay
from support.tcp_server import tcp_server

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.errors import Unavailable
from kvscout_common.hashing import native_available
from kvscout_common.rpc.channel import call
from kvscout_common.transport import Transport

TRANSPORTS = [Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])]

PROGRAM = """
import sys
import grpc
from kvscout_common.settings.config import ServerConfig
from kvscout_common.rpc.serving import App, run
from kvscout_common.transport import Transport

async def echo(requests, context):
    async for request in requests:
        yield request

async def answer(request, context):
    return request

def add(server):
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Answer": grpc.unary_unary_rpc_method_handler(answer),
    }
    # As generated code does: each transport reads one of them.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("work.Work", handlers),))
    server.add_registered_method_handlers("work.Work", handlers)

async def build():
    return App(name="test", services=[("work.Work", add)])

run(ServerConfig(grace_seconds=float(sys.argv[1]), transport=Transport(sys.argv[2])), build)
"""


@asynccontextmanager
async def working(
    tmp_path: Path, grace_seconds: float = 1000.0, transport: Transport = Transport.GRPCIO
) -> AsyncIterator[tuple[Process, str]]:
    """A server of one echoing stream, and its address."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), str(grace_seconds), transport.value, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            ready = json.loads(await process.stdout.readline())
            yield process, f"127.0.0.1:{ready['port']}"
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def open_stream(channel: grpc.aio.Channel) -> Any:
    """An echoing stream that runs."""
    stream: Any = channel.stream_stream("/work.Work/Echo")()
    await stream.write(b"first")
    assert await stream.read() == b"first"
    return stream


async def sent_away(channel: grpc.aio.Channel) -> None:
    """Waits for GOAWAY: the channel has no connection for new calls any more."""
    while channel.get_state() is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_clients_are_sent_away_at_once_and_a_running_stream_ends_by_itself(tmp_path: Path) -> None:
    async with working(tmp_path) as (process, address), grpc.aio.insecure_channel(address) as channel:
        stream = await open_stream(channel)
        process.terminate()
        await sent_away(channel)
        for number in range(100):
            await stream.write(b"%d" % number)
            assert await stream.read() == b"%d" % number
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
    assert process.returncode == 0


async def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    async with working(tmp_path) as (process, address), grpc.aio.insecure_channel(address) as channel:
        stream = await open_stream(channel)
        process.terminate()
        await sent_away(channel)
        process.terminate()
        assert await stream.code() is not grpc.StatusCode.OK
        await process.wait()
    assert process.returncode == 0


async def test_a_stream_that_does_not_end_is_cut_when_the_grace_time_is_over(tmp_path: Path) -> None:
    async with working(tmp_path, grace_seconds=0.2) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            stream = await open_stream(channel)
            process.terminate()
            assert await stream.code() is not grpc.StatusCode.OK
            await process.wait()
    assert process.returncode == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_call_that_crosses_the_goaway_is_served_or_one_that_no_service_has_answered(
    tmp_path: Path, transport: Transport
) -> None:
    """Until GOAWAY has reached it a client goes on calling; grpc's server drops these calls, as a lost connection."""
    deliver = asyncio.Event()
    deliver.set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(*address.split(":"))

        async def back() -> None:
            while data := await onward_reader.read(65_536):
                await deliver.wait()
                writer.write(data)
            writer.close()

        answers = asyncio.create_task(back())
        try:
            while data := await reader.read(65_536):
                onward_writer.write(data)
            onward_writer.close()
            await answers
        finally:
            answers.cancel()
            onward_writer.transport.abort()

    async with working(tmp_path, transport=transport) as (process, address), tcp_server(relay) as port:
        async with grpc.aio.insecure_channel(address) as direct:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stream = await open_stream(channel)
                other = await open_stream(direct)
                answer: Any = channel.unary_unary("/work.Work/Answer")
                assert await call(answer, b"here") == b"here"
                deliver.clear()
                process.terminate()
                await sent_away(direct)
                late = asyncio.ensure_future(call(answer, b"late"))
                # A whole round trip on the other connection: what was sent before has reached the server.
                await other.write(b"later")
                assert await other.read() == b"later"
                deliver.set()
                if transport is Transport.NATIVE:
                    assert await late == b"late"
                else:
                    with pytest.raises(Unavailable) as caught:
                        await late
                    assert not caught.value.answered
                for running_on in (stream, other):
                    await running_on.done_writing()
                    assert await running_on.code() is grpc.StatusCode.OK


@pytest.mark.skipif(not native_available(), reason="over grpcio, grpc drops calls that cross its GOAWAY")
async def test_clients_behind_a_slow_proxy_meet_no_status_of_a_server_that_stops(tmp_path: Path) -> None:
    """Each goes on calling until its connection is gone: all it may meet is that there is no other."""
    ended: Counter[grpc.StatusCode] = Counter()
    answered = 0

    async def calls(channel: grpc.aio.Channel) -> None:
        nonlocal answered
        answer: Any = channel.unary_unary("/work.Work/Answer")
        while True:
            try:
                await answer(b"", timeout=DEADLINE_SECONDS)
                answered += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code()] += 1
                return

    async with (
        working(tmp_path, transport=Transport.NATIVE) as (process, address),
        tcp_relay(address, delay_seconds=0.01) as relay,
    ):
        # Channels with the same options share a connection unless they are told not to.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(relay.address, options=options) for _ in range(24)]
        calling = [asyncio.create_task(calls(channel)) for channel in channels for _ in range(8)]
        await eventually(lambda: answered > 2 * len(calling))
        process.terminate()
        await asyncio.wait(calling)
        for channel in channels:
            await channel.close()
    assert process.returncode == 0
    assert ended == {grpc.StatusCode.UNAVAILABLE: len(calling)}


async def test_watches_and_streams_between_services_hold_no_server_that_stops(tmp_path: Path) -> None:
    workers = tmp_path / "workers.yaml"
    workers.write_text("workers: [{worker_id: w, model: m, block_size: 16}]")
    flags = ("--workers-file", str(workers))
    async with (
        running("kvscout_scheduler.main", *flags) as scheduler,
        running("kvscout_indexer.main", *flags) as indexer,
    ):
        channels = [grpc.aio.insecure_channel(address) for address in (scheduler.address, indexer.address)]
        watches: list[Any] = [
            health_pb2_grpc.HealthStub(channels[0]).Watch(health_pb2.HealthCheckRequest()),
            scheduler_pb2_grpc.SchedulerStub(channels[0]).WatchDecisions(
                scheduler_pb2.WatchDecisionsRequest(model="m")
            ),
            scheduler_pb2_grpc.SchedulerStub(channels[0]).WatchLoads(scheduler_pb2.WatchLoadsRequest(model="m")),
            indexer_pb2_grpc.IndexerStub(channels[1]).StreamFindMatches(),
        ]
        await watches[3].write(indexer_pb2.StreamFindMatchesRequest())
        for watch in watches:
            await watch.initial_metadata()
        for service in (scheduler, indexer):
            service.process.terminate()
        async with asyncio.timeout(DEADLINE_SECONDS):
            for watch in watches:
                with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                    async for _ in watch:
                        pass
            for service in (scheduler, indexer):
                assert await service.process.wait() == 0
        for channel in channels:
            await channel.close()


async def test_every_rpc_without_an_end_is_known() -> None:
    from kvscout.v1 import bridge_pb2, gateway_pb2
    from kvscout_common.process.running_calls import ENDLESS

    services = [
        service
        for module in (bridge_pb2, gateway_pb2, indexer_pb2, scheduler_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    streaming = {
        f"/{method.containing_service.full_name}/{method.name}"
        for service in services
        for method in service.methods
        if method.client_streaming or method.name.startswith(("Watch", "RecordRequests"))
    }
    assert streaming == {name for name in ENDLESS if name.startswith("/kvscout.")}
