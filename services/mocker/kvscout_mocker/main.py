"""`kvscout-mocker`: flags become one config; then bind everything, say so, and step until a signal or a crash."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import click
import grpc
import uvloop
import zmq
import zmq.asyncio
from aiohttp import web

from kvscout_common.endpoints import bracketed
from kvscout_common.errors import ConfigError
from kvscout_common.observability.telemetry import configure_logging
from kvscout_common.process.descriptors import raise_descriptor_limit
from kvscout_common.settings.flags import SectionedCommand, flag
from kvscout_common.variables import warn_of_variables
from kvscout_mocker.config import EngineConfig, MockerConfig, Role, config_from_flags, flags
from kvscout_mocker.engine.block_manager import BlockManager
from kvscout_mocker.engine.engine import Engine
from kvscout_mocker.engine.hybrid_blocks import HybridBlockManager
from kvscout_mocker.engine.kv_stream import SERVER_OPTIONS, KvStreams
from kvscout_mocker.engine.publisher import EventPublisher
from kvscout_mocker.engine.rank import Rank
from kvscout_mocker.engine.state_blocks import StateBlockManager
from kvscout_mocker.events import EventEncoder
from kvscout_mocker.faults import BoundPorts, Faults, restart
from kvscout_mocker.routes.answering import Answering
from kvscout_mocker.routes.anthropic_api import AnthropicRoutes
from kvscout_mocker.routes.engine_routes import EngineRoutes
from kvscout_mocker.routes.fault_routes import FaultRoutes
from kvscout_mocker.routes.intake import Intake
from kvscout_mocker.routes.openai_api import OpenAiRoutes
from kvscout_mocker.routes.render_api import RenderRoutes
from kvscout_mocker.routes.responses_api import ResponsesRoutes
from kvscout_mocker.routes.sglang_api import SglangRoutes
from kvscout_mocker.server import application
from kvscout_mocker.transfer.handshakes import Handshakes

_log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 0.5
"""Time for handlers to notice that their requests were aborted."""


async def run(config: MockerConfig) -> int:
    """Serve until SIGTERM or SIGINT; prints the ready line on stdout when everything is bound.

    Returns:
        The exit code: 0 after a signal, 1 if a port is taken or a task crashed.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _log.info, "SIGHUP: there is nothing to read again")
    try:
        async with AsyncExitStack() as stack:
            await _serve(config, stack, stop)
    except (OSError, zmq.ZMQError) as error:
        _log.error("cannot bind: %s", error)
        return 1
    except BaseExceptionGroup:
        _log.exception("a task crashed")
        return 1
    return 0


async def _serve(config: MockerConfig, stack: AsyncExitStack, stop: asyncio.Event) -> None:
    bound = BoundPorts.from_environment()
    faults = Faults(config.faults)
    context = zmq.asyncio.Context()
    stack.callback(context.term)
    ranks: list[Rank] = []
    streams = KvStreams() if config.grpc_port is not None else None
    for dp_rank in range(config.dp_size):
        ranks.append(_rank(config, dp_rank, context, faults, bound, streams))
        stack.callback(ranks[-1].publisher.close)

    handshakes = Handshakes(config, ranks)
    stack.push_async_callback(handshakes.close)
    bootstrap_port = 0
    if config.has_sglang_api and config.role is Role.PREFILL:
        app = application()
        handshakes.rooms.add_to(app)
        bootstrap_port = await _listen(stack, app, config.host, bound.bootstrap if bound else config.bootstrap_port)

    intake = Intake(config, ranks, faults, handshakes.transfer)
    app = application()
    EngineRoutes(config, ranks).add_to(app)
    answering = Answering(intake, faults)
    OpenAiRoutes(config, answering).add_to(app)
    if config.has_vllm_api:
        AnthropicRoutes(config, answering).add_to(app)
        ResponsesRoutes(config, answering).add_to(app)
        RenderRoutes(config).add_to(app)
        handshakes.nixl.add_to(app)
    if config.has_sglang_api:
        SglangRoutes(config, intake, ranks, faults, bootstrap_port).add_to(app)
    FaultRoutes(ranks, faults, lambda replay: _restart(ports, replay)).add_to(app)
    port = await _listen(stack, app, config.host, bound.port if bound else config.port)
    handshakes.nixl.port = port
    grpc_port = 0
    if streams is not None:
        grpc_port = await _serve_streams(stack, streams, config.host, bound.grpc if bound else config.grpc_port or 0)
    for rank in ranks:
        stack.callback(rank.stop)  # first of all: who waits for tokens ends the servers' requests
    ports = BoundPorts(
        port,
        bootstrap_port,
        tuple(_port(rank.publisher.endpoint) for rank in ranks),
        tuple(_port(rank.publisher.replay_endpoint) for rank in ranks),
        grpc_port,
    )
    _announce(config, ports, ranks, faults)
    await _step_until(stop, ranks)


async def _listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> int:
    # Without cancellation a disconnected client would hold its blocks until its request is done.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port).start()
    number: int = runner.addresses[0][1]
    return number


async def _serve_streams(stack: AsyncExitStack, streams: KvStreams, host: str, port: int) -> int:
    """Serve the stream of events; return its port.

    Raises:
        OSError: The port is taken.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((streams,))
    try:
        number = server.add_insecure_port(f"{bracketed(host)}:{port}")
    except RuntimeError as error:
        raise OSError(str(error)) from error
    await server.start()
    stack.push_async_callback(server.stop, None)
    return number


def _rank(
    config: MockerConfig,
    dp_rank: int,
    context: zmq.asyncio.Context,
    faults: Faults,
    bound: BoundPorts | None,
    streams: KvStreams | None,
) -> Rank:
    publisher = EventPublisher(
        context,
        EventEncoder(config.event_format, config.block_hash_format, dp_rank),
        host=config.host,
        events_port=bound.events[dp_rank] if bound else config.events_port and config.events_port + dp_rank,
        replay_port=bound.replay[dp_rank] if bound else config.replay_port and config.replay_port + dp_rank,
        topic=config.topic,
        event_format=config.event_format,
        buffer_steps=config.buffer_steps,
        faults=faults,
        first_rank=dp_rank == 0,
        relayed=streams.relay(dp_rank) if streams is not None else None,
    )
    sizes = config.engine
    return Rank(dp_rank, Engine(sizes, _blocks(sizes)), publisher, hash_seed=config.rank_hash_seed())


def _blocks(sizes: EngineConfig) -> BlockManager:
    if sizes.state_space:
        return StateBlockManager(sizes.num_gpu_blocks, sizes.block_size)
    if sizes.sliding_window:
        return HybridBlockManager(sizes.num_gpu_blocks, sizes.block_size, sizes.sliding_window)
    return BlockManager(sizes.num_gpu_blocks, sizes.block_size)


def _restart(ports: BoundPorts, replay: bool) -> None:
    restart(ports, () if replay else ("--no-replay",))


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2] or 0)


def _announce(config: MockerConfig, ports: BoundPorts, ranks: Sequence[Rank], faults: Faults) -> None:
    ready = {
        "ready": True,
        "http_port": ports.port,
        "role": config.role,
        "bootstrap_port": ports.bootstrap,
        "grpc_port": ports.grpc,
        "fault_seed": faults.config.seed,
        "ranks": [
            {
                "dp_rank": rank.dp_rank,
                "events": rank.publisher.endpoint,
                "replay": rank.publisher.replay_endpoint,
            }
            for rank in ranks
        ],
    }
    print(json.dumps(ready), flush=True)


async def _step_until(stop: asyncio.Event, ranks: Sequence[Rank]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            task
            for rank in ranks
            for task in (
                group.create_task(rank.run(), name=f"engine-{rank.dp_rank}"),
                group.create_task(rank.publisher.serve_replay(), name=f"replay-{rank.dp_rank}"),
            )
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()


FIRST = (
    "--port",
    "--events-port",
    "--replay-port",
    "--grpc-port",
    "--model",
    "--role",
    "--api",
    "--dp-size",
    "--block-size",
    "--num-gpu-blocks",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--max-model-len",
    "--step-base-ms",
    "--prefill-us-per-token",
    "--decode-us-per-request",
    "--speedup",
    "--seed",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@flags
@flag(
    "--log-level",
    program="mocker",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="WARNING",
)
def main(log_level: str, **values: Any) -> None:
    """A vLLM-like engine without a GPU: real prefix cache, real KV events, invented tokens.

    Prints one JSON line with its real ports when it is ready.
    """
    configure_logging(log_level, "text")
    warn_of_variables(logging.getLogger("kvscout.mocker"))
    try:
        config = config_from_flags(**values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    raise_descriptor_limit()
    sys.exit(uvloop.run(run(config)))


if __name__ == "__main__":
    main()
