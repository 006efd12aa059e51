"""`kvscout bench http`: CPU that the pump costs between a client and an engine, and peers beside it in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvscout_bench.gateway_bench import GatewayBench, GatewayCase, streams
from kvscout_bench.gateway_stack import envoy
from kvscout_bench.http_pump import pump_stack
from kvscout_common.hashing import native_available

CASES = [
    *streams(
        "http",
        "HTTP to HTTP",
        lambda chunks: lambda client: client.complete(chunks),
        http=True,
        goals_us=(400.0, 30.0),
    ),
    *streams(
        "pieces",
        "Events to gRPC pieces",
        lambda chunks: lambda client: client.generate(chunks),
        http=False,
        goals_us=(550.0, 25.0),
    ),
]
_PEERS: Mapping[str, Callable[[list[str]], Any]] = {"aiohttp": partial(pump_stack, transport="grpcio"), "envoy": envoy}
PEERS = tuple(_PEERS)


@dataclass(frozen=True, slots=True)
class HttpBench(GatewayBench):
    """Rows to run. Errors as of `Selection`."""

    @classmethod
    def cases(cls) -> Sequence[GatewayCase]:
        """See `GatewayBench`."""
        return CASES

    @classmethod
    def our_stack(cls, engines: list[str]) -> Any:
        """See `GatewayBench`."""
        return pump_stack(engines, "native" if native_available() else "grpcio")

    @classmethod
    def peer_stacks(cls) -> Mapping[str, Callable[[list[str]], Any]]:
        """See `GatewayBench`."""
        return _PEERS
