"""Routers of `kvscout bench routers` before the same engines: kvscout, and peers that are installed from wheels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvscout_bench.gateway_stack import answers, start_envoy, start_router, until_attached, workers_file
from kvscout_bench.router_cells import BLOCK_SIZE
from kvscout_bench.service_process import (
    MODEL,
    READY_SECONDS,
    IndexerProcess,
    MeasuredProcess,
    ReadyProcess,
    ServiceProcess,
    until,
)
from kvscout_lab.real_time.apis import Api, Completions

SMG, VLLM_ROUTER = "smg", "vllm-router"


@dataclass(frozen=True, slots=True)
class Engine:
    """A simulated engine."""

    process: ReadyProcess

    @property
    def address(self) -> str:
        """Return host:port of its HTTP API."""
        return f"127.0.0.1:{self.process.ready['http_port']}"

    @property
    def ranks(self) -> Sequence[Mapping[str, str]]:
        """Return the addresses of the event sockets of each rank."""
        ranks: Sequence[Mapping[str, str]] = self.process.ready["ranks"]
        return ranks


@dataclass(frozen=True, slots=True)
class Routers:
    """Processes of a router, and where its clients find it."""

    processes: Sequence[MeasuredProcess]
    addresses: Sequence[str]
    """host:port of each HTTP front."""

    def cpu_seconds(self) -> float:
        """Return the user and system time of all processes so far."""
        return sum(process.cpu_ns() for process in self.processes) / 1e9

    def rss_bytes(self) -> int:
        """Return the memory of all processes that is in RAM."""
        return sum(process.rss_bytes() for process in self.processes)


StartRouters: TypeAlias = Callable[[Sequence[Engine], int, ExitStack], Routers]
"""(engines, processes, what ends them) → running routers that answer."""


def services(engines: Sequence[Engine], count: int, running: ExitStack) -> Routers:
    """Start an indexer, a scheduler and `count` gateways."""
    carried = ("--log-level", "error")
    indexer = running.enter_context(IndexerProcess(*carried))
    scheduler = running.enter_context(ServiceProcess("scheduler", *carried))
    upstreams = ("--indexer", indexer.address, "--scheduler", scheduler.address)
    workers = ("--workers-file", workers_file(running, [engine.address for engine in engines]))
    gateways = _start(
        count, running, lambda: ServiceProcess("gateway", "--http-port", "0", *upstreams, *workers, *carried)
    )
    for gateway in gateways:
        until_attached(gateway.address)
        until(partial(answers, gateway.http_address), "the gateway answers", within_seconds=READY_SECONDS)
    return Routers([indexer, scheduler, *gateways], [gateway.http_address for gateway in gateways])


def serve(engines: Sequence[Engine], count: int, running: ExitStack) -> Routers:
    """Start `count` processes of `kvscout serve`, each for itself."""
    workers = ("--workers-file", workers_file(running, [engine.address for engine in engines]))
    flags = ("--http-port", "0", "--log-level", "error", *workers)
    processes = _start(count, running, lambda: ServiceProcess("serve", *flags))
    for process in processes:
        until(partial(answers, process.http_address), "kvscout serve answers", within_seconds=READY_SECONDS)
    return Routers(processes, [process.http_address for process in processes])


def _start(count: int, running: ExitStack, start: Callable[[], ServiceProcess]) -> list[ServiceProcess]:
    with ThreadPoolExecutor() as starting:
        started = [starting.submit(start) for _ in range(count)]
    return [running.enter_context(process.result()) for process in started]


def wheel(
    engines: Sequence[Engine],
    count: int,
    running: ExitStack,
    *,
    name: str,
    flags: Callable[[Sequence[Engine]], Sequence[str]],
) -> Routers:
    """Start `count` processes of SGLang's or vLLM's router, which share nothing.

    Args:
        engines: Before which it is put.
        count: Number of processes.
        running: Ends them.
        name: One of `gateway_stack.ROUTERS`.
        flags: Further flags, by the engines.

    Raises:
        DriverFailed: It cannot be installed or started.
    """
    addresses = [engine.address for engine in engines]
    started = [start_router(running, addresses, name, flags(engines)) for _ in range(count)]
    return Routers([process for process, _ in started], [address for _, address in started])


def _by_policy(policy: str) -> Callable[[Sequence[Engine]], Sequence[str]]:
    return lambda _: ("--policy", policy)


def _kv_aware(engines: Sequence[Engine]) -> Sequence[str]:
    """Return the flags with which vLLM's router reads the engines' events."""
    flags = ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
    for flag, socket in (("--kv-event-source", "events"), ("--kv-event-replay-source", "replay")):
        for engine in engines:
            flags += [flag, f"http://{engine.address}={engine.ranks[0][socket]}"]
    return flags


def envoy(engines: Sequence[Engine], count: int, running: ExitStack) -> Routers:
    """Start `count` processes of Envoy as a plain proxy: round robin. Errors as of `wheel`."""
    started = [start_envoy(running, [engine.address for engine in engines], policy="ROUND_ROBIN") for _ in range(count)]
    return Routers([process for process, _ in started], [address for _, address in started])


PEERS: Mapping[str, StartRouters] = {
    "serve": serve,
    SMG: partial(wheel, name=SMG, flags=_by_policy("cache_aware")),
    "smg-hash": partial(wheel, name=SMG, flags=_by_policy("consistent_hashing")),
    VLLM_ROUTER: partial(wheel, name=VLLM_ROUTER, flags=_by_policy("cache_aware")),
    "vllm-router-kv": partial(wheel, name=VLLM_ROUTER, flags=_kv_aware),
    "envoy": envoy,
}
TOKEN_APIS: Mapping[str, Callable[[], Api]] = {"vllm-router-kv": Completions}
"""API of the clients of routers that find prefixes in requests with token ids only."""
