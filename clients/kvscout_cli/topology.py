"""The processes of a kvscout on one machine, and the addresses at which they find each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvscout_cli.port_holders import holder
from kvscout_cli.process import ManagedProcess, Program
from kvscout_cli.stack import Stack
from kvscout_client import Router, RouterStatus
from kvscout_common.errors import FailedPrecondition, KvscoutError, Unavailable
from kvscout_common.registry.workers_file import load_workers
from kvscout_common.rpc.binding import wait_for_port
from kvscout_common.worker import Role, Transport, WorkerRank, WorkerSpec

MODEL = "mock-model"
"""Model of simulated engines."""

CONNECTED_SECONDS = 30.0
"""Longest wait until the gateway has registered every worker with its upstreams."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of the services of a stack; 0 = any free port, -1 for metrics and HTTP = none."""

    gateway: int = 0
    indexer: int = 0
    scheduler: int = 0
    gateway_metrics: int = -1
    indexer_metrics: int = -1
    scheduler_metrics: int = -1
    mocker_http: int = 0
    """Port of the first simulated engine, the next ones count up; also for the two below."""
    mocker_events: int = 0
    mocker_replay: int = 0
    bridge: int = 0
    bridge_metrics: int = -1
    nats: int = 0
    gateway_http: int = -1


DEFAULT_PORTS = Ports(7050, 7051, 7052, 9093, 9091, 9092, 8100, 5557, 5657, 7053, 9094, 4222, 8000)


@dataclass(frozen=True, slots=True)
class Mockers:
    """Simulated engines of one kind."""

    count: int = 4
    prefill: int = 0
    """Engines that only compute prompts, for the others; 0 = each does both."""
    block_size: int = 16
    num_gpu_blocks: int = 4096
    max_num_batched_tokens: int = 2048
    flags: tuple[str, ...] = ()
    """Further flags of `kvscout_mocker.main`."""
    first_flags: tuple[str, ...] = ()
    """Flags of the first one, instead; empty = as the others."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A stack: one indexer, one scheduler, one gateway, and engines; with a bridge and NATS where wanted."""

    mockers: Mockers = Mockers()
    workers_file: Path | None = None
    """Engines that run already; None = start simulated ones."""
    one_process: bool = False
    """Indexer, scheduler and gateway as one `kvscout serve`, which has the gateway's ports."""
    ports: Ports = Ports()
    indexer_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    """In one process: the flags of all three."""
    transport: Transport = Transport.ZMQ
    """Transport of events to the indexer; over NATS a server and a bridge for all engines are started, too."""
    bridge_flags: tuple[str, ...] = ()

    @property
    def fixed_ports(self) -> dict[int, str]:
        """Return the purpose of each fixed port."""
        wanted = {field.name: getattr(self.ports, field.name) for field in fields(Ports)}
        without_nats = ("bridge", "nats") if self.transport is Transport.ZMQ else ()
        within_gateway = ("indexer", "scheduler") if self.one_process else ()
        wanted = {name: p for name, p in wanted.items() if not name.startswith((*without_nats, *within_gateway))}
        ports: dict[int, str] = {}
        for name, port in wanted.items():
            engines = (0 if self.workers_file else self.mockers.count) if name.startswith("mocker") else 1
            if port > 0:
                ports |= {port + index: name.replace("_", " ") for index in range(engines)}
        return ports


@dataclass(frozen=True, slots=True)
class Running:
    """A stack that is ready."""

    gateway: str
    indexer: str
    scheduler: str
    workers: tuple[WorkerSpec, ...]
    openai: str = ""
    """URL of the OpenAI API; "" = there is none."""

    @property
    def answering(self) -> tuple[WorkerRank, ...]:
        """Return every worker rank that answers clients: those that compute prompts for others do not."""
        return tuple(rank for worker in self.workers if worker.role is not Role.PREFILL for rank in worker.ranks)


async def launch(stack: Stack, topology: Topology, directory: Path) -> Running:
    """Start a topology and wait until its helpers know all workers.

    Args:
        stack: Starts and watches the processes.
        topology: Processes to start.
        directory: Takes the workers file of simulated engines; must outlive the stack.

    Raises:
        ConfigError: The workers file is wrong.
        ProcessFailed: A process ended or was not ready in time.
        FailedPrecondition: A port is taken.
        Unavailable: The gateway could not reach its helpers.
    """
    ports = topology.ports
    await asyncio.gather(*(_free(port, name) for port, name in topology.fixed_ports.items()))
    workers_file = topology.workers_file
    workers: Sequence[WorkerSpec] = load_workers(workers_file) if workers_file else ()
    mockers = [] if workers_file else [_mocker(topology, index) for index in range(topology.mockers.count)]
    nats: tuple[str, ...] = ()
    if topology.transport is not Transport.ZMQ:
        program = Program("nats", "kvscout_cli.embedded_nats", (str(ports.nats), str(directory / "nats")))
        (server,) = await stack.start(program)
        nats = ("--nats-server", f"nats://127.0.0.1:{server.ready_line['port']}")
    apart = [
        _service("indexer", ports.indexer, ports.indexer_metrics, (*nats, *topology.indexer_flags)),
        _service("scheduler", ports.scheduler, ports.scheduler_metrics, (*nats, *topology.scheduler_flags)),
    ]
    if topology.one_process:
        apart.clear()
    started = await stack.start(*apart, *mockers)
    upstreams, engines = started[: len(apart)], started[len(apart) :]
    if workers_file is None:
        workers_file = directory / "workers.yaml"
        entries = [_worker_entry(topology.mockers, index, engine) for index, engine in enumerate(engines)]
        workers_file.write_text(yaml.safe_dump({"workers": entries}, sort_keys=False))
        workers = load_workers(workers_file)
    named = ("--workers-file", str(workers_file.absolute()))
    if nats:
        # The bridge registers the engines in NATS, where everyone finds them.
        flags = (*nats, *named, "--transport", str(topology.transport), *topology.bridge_flags)
        await stack.start(_service("bridge", ports.bridge, ports.bridge_metrics, flags))
    flags = (
        *(f"--{service.program.name}={_address(service)}" for service in upstreams),
        *("--http-port", str(ports.gateway_http), *(nats or named), *topology.gateway_flags),
    )
    name = "serve" if topology.one_process else "gateway"
    (gateway,) = await stack.start(_service(name, ports.gateway, ports.gateway_metrics, flags))
    http = gateway.ready_line.get("http_port")
    openai = f"http://127.0.0.1:{http}/v1" if http else ""
    indexer, scheduler = upstreams or (gateway, gateway)
    running = Running(_address(gateway), _address(indexer), _address(scheduler), tuple(workers), openai)
    await stack.run(_connected(running))
    return running


def same_engine(engine: ManagedProcess) -> Program | None:
    """Return the program of a simulated engine with the ports that it had; None = it is no engine, or had none yet."""
    ready = engine.ready_line
    if "ranks" not in ready:
        return None
    (rank,) = ready["ranks"]  # `_mocker` makes engines of one
    ports = {
        "--port": str(ready["http_port"]),
        "--events-port": rank["events"].rpartition(":")[2],
        "--replay-port": rank["replay"].rpartition(":")[2],
    }
    words = list(engine.program.arguments)
    for name, port in ports.items():
        words[words.index(name) + 1] = port
    return replace(engine.program, arguments=tuple(words))


async def _free(port: int, name: str) -> None:
    """Wait for a port as servers do."""
    try:
        await wait_for_port("127.0.0.1", port)
    except OSError as error:
        raise FailedPrecondition(
            f"port {port} ({name}) is taken: {holder(port) or error}; --free-ports takes any free ones"
        ) from error


async def _connected(running: Running) -> None:
    error: object = "no answer"
    async with Router(running.gateway, timeout_seconds=5.0) as router:
        try:
            async with asyncio.timeout(CONNECTED_SECONDS):
                while True:
                    try:
                        status = await router.status()
                        error = _unconnected(status)
                        if not error and len(await router.list_workers()) >= len(running.workers):
                            return
                    except KvscoutError as failure:
                        error = failure
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Unavailable(f"the gateway is not connected to its helpers: {error}") from None


def _unconnected(status: RouterStatus) -> str:
    missing = [
        f"{helper.kind} {helper.address}: {helper.last_error or f'{helper.pending_registrations} workers missing'}"
        for helper in status.helpers
        if helper.pending_registrations or helper.last_error
    ]
    return "; ".join(missing)


def _service(name: str, port: int, metrics_port: int, flags: Sequence[str]) -> Program:
    arguments = ("--port", str(port), "--metrics-port", str(metrics_port), *flags)
    return Program(name, f"kvscout_{name}.main", arguments)


def _mocker(topology: Topology, index: int) -> Program:
    mockers, ports = topology.mockers, topology.ports
    flags: dict[str, object] = {
        "--port": ports.mocker_http and ports.mocker_http + index,
        "--events-port": ports.mocker_events and ports.mocker_events + index,
        "--replay-port": ports.mocker_replay and ports.mocker_replay + index,
        "--model": MODEL,
        "--block-size": mockers.block_size,
        "--num-gpu-blocks": mockers.num_gpu_blocks,
        "--max-num-batched-tokens": mockers.max_num_batched_tokens,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    if (role := _role(mockers, index)) is not Role.AGGREGATED:
        words += ["--role", role.value]
    return Program(
        f"mocker-{index}", "kvscout_mocker.main", (*words, *((not index and mockers.first_flags) or mockers.flags))
    )


def _role(mockers: Mockers, index: int) -> Role:
    if not mockers.prefill:
        return Role.AGGREGATED
    return Role.PREFILL if index < mockers.prefill else Role.DECODE


def _worker_entry(mockers: Mockers, index: int, engine: ManagedProcess) -> dict[str, Any]:
    ranks, role = engine.ready_line["ranks"], _role(mockers, index)
    return {
        "worker_id": engine.program.name,
        "model": MODEL,
        "engine": "mock",
        "role": role.value,
        "can_fallback": role is Role.DECODE,
        "http_endpoint": f"http://127.0.0.1:{engine.ready_line['http_port']}",
        "block_size": mockers.block_size,
        "dp_size": len(ranks),
        "event_endpoints": [
            {"dp_rank": rank["dp_rank"], "endpoint": rank["events"], "replay_endpoint": rank["replay"]}
            for rank in ranks
        ],
        "total_kv_blocks": mockers.num_gpu_blocks,
        "max_num_batched_tokens": mockers.max_num_batched_tokens,
    }


def _address(service: ManagedProcess) -> str:
    return f"127.0.0.1:{service.ready_line['port']}"
