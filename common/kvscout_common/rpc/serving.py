"""The life of a server process: start, be ready, stop on SIGTERM.

One `asyncio.TaskGroup` holds everything that runs beside the gRPC server, under names. A task that crashes ends the
process with exit code 1: a server that answers from a frozen state is worse than none.

When the server is ready it prints one JSON line on stdout, `{"ready": true, "service": …, "port": …}`, which is what
supervisors and tests wait for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvscout_common import __version__
from kvscout_common.errors import ConfigError
from kvscout_common.hashing import log_backend
from kvscout_common.http.byte_budget import Budget, BudgetCollector, make_budget
from kvscout_common.http.factory import serve_http
from kvscout_common.http.http import HttpCall, HttpHandler, HttpLimits, HttpServer
from kvscout_common.http.metrics_server import MetricsPage, serve_metrics
from kvscout_common.identity.identity import TokenTable
from kvscout_common.identity.pem import Pem
from kvscout_common.identity.tenant_limits import TenantLimits
from kvscout_common.identity.tls import ServerCertificates
from kvscout_common.observability import tracing
from kvscout_common.observability.process_metrics import register_process_metrics
from kvscout_common.observability.rpc_metrics import RpcTimes
from kvscout_common.observability.telemetry import configure_logging
from kvscout_common.process.descriptors import raise_descriptor_limit
from kvscout_common.process.endings import FirstDefect
from kvscout_common.process.followed_file import FollowedFile
from kvscout_common.process.running_calls import RunningCalls
from kvscout_common.rpc.binding import wait_for_port
from kvscout_common.rpc.guard import Guard
from kvscout_common.rpc.reflection import enable_reflection
from kvscout_common.rpc.stopping import Signals, stop_serving
from kvscout_common.rpc.transport_metrics import TransportCollector
from kvscout_common.settings.config import ServerConfig
from kvscout_common.transport import Transport, choose
from kvscout_common.transport.keepalive import SERVER_OPTIONS
from kvscout_common.transport.waiting import running_task
from kvscout_common.variables import warn_of_variables

log = logging.getLogger("kvscout.serving")

COLLECTED_OBJECTS = 10_000
"""Objects that are made, and not given back, between two collections of the youngest."""
MAX_PENDING_CALLS = 16_000
"""Calls of all connections that the loop has not looked at. Above, grpc refuses at random whoever calls; its own 1,000
are what a few connections reach that only open streams and reset them."""


@dataclass(frozen=True, slots=True)
class SidePort:
    """A gRPC server for callers who expect one to themselves, beside the service's own."""

    name: str
    """The ready line has its port as `<name>_port`."""
    port: int
    """0 = any free one."""
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]]
    """As those of the app; there is no reflection here."""
    make_pem: Callable[[], Pem] | None
    """Certificate where the service has none of its own; None = plaintext, in any case."""
    needs_token: bool = True
    """True = callers show tokens, where the service has them; else whoever reaches it may call."""
    alive_names: tuple[str, ...] = ()
    """Health says SERVING of these as long as the process answers."""
    ready_names: tuple[str, ...] = ()
    """And of these, as of the services, once the app is warm."""
    shutdown_delay_seconds: float = 0.0
    """Default where the configuration does not say; see there."""


@dataclass(frozen=True, slots=True)
class HttpPort:
    """An HTTP server beside the service's gRPC one; it has the same address, certificate and tokens."""

    port: int
    """0 = any free one; the ready line has it as `http_port`."""
    make: Callable[[TokenTable | None], HttpHandler]
    """Gives what answers; whom it admits is its own to judge, by the service's tokens (None = there are none)."""
    limits: HttpLimits = field(default_factory=HttpLimits)


@dataclass(slots=True)
class App:
    """Parts of a service: its servicers and what runs beside them."""

    name: str
    """Such as "indexer"."""
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]]
    """Full name of each gRPC service and what adds it to a server."""
    bound: Callable[[int], None] | None = None
    """Receives the port of the gRPC server, before the tasks begin."""
    tasks: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=dict)
    """Long-running tasks by name; each runs until cancelled."""
    warm: Callable[[], Awaitable[None]] | None = None
    """Awaited before health says SERVING, in bounded time; calls are answered meanwhile."""
    leave: Callable[[], object] | None = None
    """Called at SIGTERM: the service says from now on that it is going to stop, and still takes calls."""
    drain: Callable[[], Awaitable[None]] | None = None
    """Called when clients were sent away; returns when nothing is left to wait for."""
    close: Callable[[], Awaitable[None]] | None = None
    """Called last, to close what the service holds."""
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    limits: TenantLimits = field(default_factory=TenantLimits)
    """Receives what the tokens file allows each tenant."""
    budget: Budget | None = None
    """Charged for requests that come; None = its servers have one alone, by `ServerConfig.request_memory_bytes`."""
    side_ports: Sequence[SidePort] = ()
    http: HttpPort | None = None
    ready: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the ready line."""


def run(config: ServerConfig, build: Callable[[], Awaitable[App]]) -> None:
    """Run a server process until a signal stops it; never returns.

    Args:
        config: How to serve.
        build: Makes the app, on the running loop.

    Exits:
        0 after SIGTERM or SIGINT, 1 after a crash, 2 for a configuration error.
    """
    gc.disable()
    configure_logging(config.log_level, config.log_format)
    warn_of_variables(log)
    raise_descriptor_limit()
    log_backend()
    try:
        choose(config.transport)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(serve(config, build))
            except BaseException as error:
                # A server of grpc.aio that never started wants its loop when it goes.
                traceback.clear_frames(error.__traceback__)
                raise
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BaseExceptionGroup as group:
        for leaf in _leaves(group):
            log.critical("a task crashed: %r", leaf, exc_info=leaf)
        raise SystemExit(1) from None
    except OSError as error:
        log.critical("cannot serve: %s", error)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


async def serve(config: ServerConfig, build: Callable[[], Awaitable[App]]) -> None:  # noqa: C901, PLR0912, PLR0915  # a process from start to end
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: If a file that the configuration names is wrong.
        OSError: If an address cannot be bound.
        ExceptionGroup: If a task crashed.
    """
    signals = Signals()
    defect = FirstDefect()
    defect.watch_loop()
    async with AsyncExitStack() as held:
        app = await build()
        if app.close is not None:
            held.push_async_callback(app.close)
        if config.otlp_endpoint:
            stop = tracing.start(app.name, config.otlp_endpoint, ratio=config.trace_ratio, version=__version__)
            held.push_async_callback(asyncio.to_thread, stop)
        files: list[FollowedFile[Any]] = []
        tokens = certificates = None
        if config.auth_tokens is not None:
            tokens = TokenTable(limits=app.limits)
            files.append(tokens.follow(config.auth_tokens))
        if config.tls is not None:
            certificates = ServerCertificates(config.tls)
            files.append(certificates.file)
        calls, times = RunningCalls(), RpcTimes()
        budget = app.budget if app.budget is not None else make_budget(config.request_memory_bytes)
        main = await _start(config, app, certificates, Guard(tokens, calls, times), budget)
        held.push_async_callback(main.server.stop, 0)
        if app.bound is not None:
            app.bound(main.port)
        sides: dict[str, _Listening] = {}
        for side in app.side_ports:
            guard = Guard(tokens if side.needs_token else None, calls, times)
            sides[side.name] = await _start_side(config, side, certificates, guard, budget)
            held.push_async_callback(sides[side.name].server.stop, 0)
        listening = (main, *sides.values())
        http, further_ports = None, {name: side.port for name, side in sides.items()}
        if app.http is not None:
            http = serve_http(_counted(app.http.make(tokens), calls), app.http.limits)
            held.push_async_callback(http.stop, 0)
            further_ports["http"] = await _bind_http(http, config, app.http.port, certificates)
        if app.warm is None:
            await _all_ready(listening)
        app.metrics.register(TransportCollector([one.server for one in listening], http))
        app.metrics.register(times)
        app.metrics.register(BudgetCollector(budget))
        app.metrics.register(app.limits)
        register_process_metrics(app.metrics, app.name)
        metrics_port = None
        if config.metrics_port >= 0:
            await wait_for_port(config.host, config.metrics_port, "--metrics-port")
            metrics, metrics_port = await serve_metrics(
                MetricsPage(app.metrics, config.metrics_worker_ranks),
                config.host,
                config.metrics_port,
                tokens if config.metrics_auth else None,
            )
            held.push_async_callback(metrics.stop, 0)
        # Everything made so far lives as long as the process: the collector need not look at it.
        gc.freeze()
        # Requests make hundreds of objects, nearly none of them in a cycle.
        gc.set_threshold(COLLECTED_OBJECTS, 20, 20)
        gc.enable()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(make(), name=name) for name, make in app.tasks.items()]
            background += [group.create_task(file.watch(), name=f"follow {file.what}") for file in files]
            background.append(group.create_task(defect.watch(), name="defects"))
            warming = group.create_task(_warm(app.warm, listening), name="warm") if app.warm is not None else None
            _announce(app, config, main.port, metrics_port, further_ports)
            await signals.stop.wait()
            if warming is not None:
                # Or it would say of a service that drains that it serves.
                warming.cancel()
            for one in listening:
                await one.probe.enter_graceful_shutdown()
            if app.leave is not None:
                app.leave()
            await _wait_at_most(signals.immediate, _shutdown_delay(config, app))
            leaving = [asyncio.ensure_future(side.server.stop(config.grace_seconds)) for side in sides.values()]
            if http is not None:
                leaving.append(asyncio.ensure_future(http.stop(config.grace_seconds)))
            await stop_serving(
                main.server, calls, app.drain, grace_seconds=config.grace_seconds, immediate=signals.immediate
            )
            if http is not None:
                await http.stop(0)
            await asyncio.gather(*(side.server.stop(0) for side in sides.values()), *leaving)
            log.info("%s stopped", app.name)
            for task in background:
                task.cancel()


def _shutdown_delay(config: ServerConfig, app: App) -> float:
    if config.shutdown_delay_seconds is not None:
        return config.shutdown_delay_seconds
    return max((side.shutdown_delay_seconds for side in app.side_ports), default=0.0)


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _Listening(NamedTuple):
    """A server that answers, its health servicer, and the names that become SERVING once the app is warm."""

    server: grpc.aio.Server
    probe: health.aio.HealthServicer
    port: int
    names: tuple[str, ...]

    async def set_health(self, names: Sequence[str], *, serving: bool) -> None:
        known = health_pb2.HealthCheckResponse
        for name in names:
            await self.probe.set(name, known.SERVING if serving else known.NOT_SERVING)


async def _start(
    config: ServerConfig,
    app: App,
    certificates: ServerCertificates | None,
    guard: Guard,
    budget: Budget,
) -> _Listening:
    server, probe = _server(config, app.services, guard, budget)
    names = [name for name, _ in app.services]
    enable_reflection((*names, health.SERVICE_NAME), server)
    port = await _bind(server, config, config.port, certificates)
    return await _started(server, probe, port, ("", *names))


async def _start_side(
    config: ServerConfig,
    side: SidePort,
    certificates: ServerCertificates | None,
    guard: Guard,
    budget: Budget,
) -> _Listening:
    server, probe = _server(config, side.services, guard, budget)
    secured = None if side.make_pem is None else certificates or side.make_pem()
    port = await _bind(server, config, side.port, secured, f"--{side.name.replace('_', '-')}-port")
    started = await _started(server, probe, port, ("", *(name for name, _ in side.services), *side.ready_names))
    await started.set_health(side.alive_names, serving=True)
    return started


def _server(
    config: ServerConfig,
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]],
    guard: Guard,
    budget: Budget,
) -> tuple[Any, health.aio.HealthServicer]:
    server: Any = (
        _native_server(config, guard, budget) if config.transport is Transport.NATIVE else _grpcio_server(config, guard)
    )
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    for _, add in services:
        add(server)
    return server, probe


async def _started(server: Any, probe: health.aio.HealthServicer, port: int, names: tuple[str, ...]) -> _Listening:
    await server.start()
    started = _Listening(server, probe, port, names)
    await started.set_health(names, serving=False)
    return started


def _grpcio_server(config: ServerConfig, guard: Guard) -> grpc.aio.Server:
    age = [("grpc.max_connection_age_ms", int(1000 * config.max_connection_age_seconds))]
    age = age if config.max_connection_age_seconds else []
    return grpc.aio.server(
        interceptors=(guard,),
        options=[
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", config.max_message_bytes),
            # Calls that were reset count until they are gone here, too: above, streams of that connection are refused.
            ("grpc.max_concurrent_streams", config.max_concurrent_streams),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
            *age,
            # Two servers on one port would share its connections at random: better an error at start.
            ("grpc.so_reuseport", 0),
            *SERVER_OPTIONS,
        ],
    )


def _native_server(config: ServerConfig, guard: Guard, budget: Budget) -> Any:
    # Imported here: the extension may not be there.
    from kvscout_common.rpc.native_server import NativeServer

    return NativeServer(
        guard,
        max_message_bytes=config.max_message_bytes,
        max_streams=config.max_concurrent_streams,
        max_age_seconds=config.max_connection_age_seconds or None,
        budget=budget,
    )


async def _bind(
    server: Any, config: ServerConfig, port: int, secured: ServerCertificates | Pem | None, flag: str = "--port"
) -> int:
    """Bind a port of the configured address: with certificates that are renewed, with one that stays, in plaintext."""
    await wait_for_port(config.host, port, flag)
    address = f"[{config.host}]:{port}" if ":" in config.host else f"{config.host}:{port}"
    renewed = secured if isinstance(secured, ServerCertificates) else None
    pem = secured if isinstance(secured, Pem) else None
    try:
        if config.transport is Transport.NATIVE:
            bound = server.listen(config.host, port, pem if renewed is None else renewed.current)
            if renewed is not None:
                renewed.renewed.append(server.renew)
        elif renewed is not None:
            bound = server.add_secure_port(address, renewed.credentials())
        elif pem is not None:
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([(pem.key, pem.certificate)]))
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot bind {address} ({flag}): {error}") from error
    return int(bound)


def _counted(handler: HttpHandler, calls: RunningCalls) -> HttpHandler:
    async def handle(call: HttpCall) -> None:
        task = running_task()
        calls.begin(task, "HTTP")
        try:
            await handler(call)
        finally:
            calls.end(task)

    return handle


async def _bind_http(
    server: HttpServer, config: ServerConfig, port: int, certificates: ServerCertificates | None
) -> int:
    await wait_for_port(config.host, port, "--http-port")
    bound = await server.listen(config.host, port, certificates.current if certificates is not None else None)
    if certificates is not None:
        certificates.renewed.append(server.renew)
    return bound


async def _warm(warm: Callable[[], Awaitable[None]], listening: Sequence[_Listening]) -> None:
    await warm()
    await _all_ready(listening)


async def _all_ready(listening: Sequence[_Listening]) -> None:
    for one in listening:
        await one.set_health(one.names, serving=True)


def _announce(
    app: App, config: ServerConfig, port: int, metrics_port: int | None, side_ports: Mapping[str, int]
) -> None:
    transport = config.transport.value
    line = {"ready": True, "service": app.name, "host": config.host, "port": port, "transport": transport, **app.ready}
    line |= {f"{name}_port": number for name, number in side_ports.items()}
    if metrics_port is not None:
        line["metrics_port"] = metrics_port
    print(json.dumps(line), flush=True)
    log.info("%s serves on %s:%d over %s", app.name, config.host, port, transport)
