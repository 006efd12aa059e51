"""`kvscout bench http`: CPU that the pump costs between a client and an engine, and peers beside it in one run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvscout_bench.gateway_bench import OUR_TRANSPORT, GatewayBench, streams
from kvscout_bench.gateway_loads import StartStack, Target
from kvscout_bench.gateway_stack import envoy
from kvscout_bench.harness import OURS
from kvscout_bench.http_pump import pump_stack


@dataclass(frozen=True, slots=True)
class HttpBench(GatewayBench):
    """The benchmark of the pump. Errors as of `Bench`."""

    CASES = (
        *streams(
            "http",
            "HTTP to HTTP",
            lambda chunks: lambda client: client.complete(chunks),
            goals_us=(400.0, 30.0),
        ),
        *streams(
            "messages",
            "Events to gRPC messages",
            lambda chunks: lambda client: client.generate(chunks),
            Target.GRPC,
            (550.0, 25.0),
        ),
    )
    PEERS: ClassVar[Collection[str]] = ("aiohttp", "envoy")
    STACKS: ClassVar[Mapping[str, StartStack]] = {
        OURS: partial(pump_stack, transport=OUR_TRANSPORT),
        "aiohttp": partial(pump_stack, transport="grpcio"),
        "envoy": envoy,
    }
