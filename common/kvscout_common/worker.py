"""Worker: the registry's entry, whichever backend it came from."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from kvscout_common.endpoints import (
    MAX_PORT,
    Allowed,
    address_problem,
    event_endpoint_problem,
    grpc_endpoint_problem,
    host_problem,
    is_grpc_endpoint,
    refusal,
    url_problem,
)
from kvscout_common.errors import InvalidArgument
from kvscout_common.plain_text import name_problem, text_problem

DEFAULT_TENANT = "default"
ALL_TENANTS = "*"
"""In place of a tenant's name, where it may be every one."""
REVISION: Final = "revision"
"""The label of workers that were rolled out together: what one revision computes, another may not be able to use."""
SHARED_CACHE: Final = "shared_cache"
"""The label that names the cache outside of workers which they share: what one stores there, all of them can read."""
SHARED_CACHE_TIER: Final = "shared_cache_tier"
"""The label with the tier on which engines announce what they share: host or disk, besides external storage."""
SHARED_CACHE_BLOCKS: Final = "shared_cache_blocks"
"""The label with the number of blocks that a shared cache has room for."""
OFFLOAD_BLOCKS: Final = "offload_blocks"
"""The label with the number of blocks that a rank's own host and disk tiers have room for."""
KV_SOURCE: Final = "kv_source"
"""The label with HOST:PORT at which an engine serves its blocks to others. One that has it fetches from others, too."""
KV_SOURCE_BLOCKS_PER_SECOND: Final = "kv_source_blocks_per_second"
"""The label with the number of blocks that are fetched in a second, as measured."""
MAX_RANKS: Final = 1024
"""Data-parallel ranks of one worker."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,14}", re.ASCII)


class Role(StrEnum):
    """Part of a request that a worker runs."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(StrEnum):
    """Kind of engine, which determines the HTTP API and the event format of a worker."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    MOCK = "mock"
    CUSTOM = "custom"
    OPENAI = "openai"
    """Any engine with OpenAI's API, of which nothing else is asked."""


class DeviceClass(StrEnum):
    """Kind of device that a worker computes on."""

    GPU = "gpu"
    CPU = "cpu"


class CopyMode(StrEnum):
    """Rule by which repeated Stored events of one block count."""

    COUNT = "count"
    """One per physical copy: the block is held until as many Removed came."""
    SET = "set"
    """Any number counts as one: the first Removed drops the block."""


class Transport(StrEnum):
    """Transport of the events of a worker to the indexer."""

    ZMQ = "zmq"
    NATS_CORE = "nats-core"
    JETSTREAM = "jetstream"
    GRPC = "grpc"
    SUBSCRIBE = "subscribe"
    NONE = "none"


SUBSCRIBED_ENGINES: Final = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.TRTLLM, EngineKind.MOCK})
"""Engines that may have `SubscribeKvEvents`."""


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: the unit of caches and of load."""

    worker_id: str
    dp_rank: int


class PoolKey(NamedTuple):
    """Key of a block index: prefix caches can be compared within one pool."""

    model: str
    tenant: str
    block_size: int
    eagle: bool


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """Endpoint at which one rank publishes its KV events; with `Transport.SUBSCRIBE`, all ranks, at a gRPC address.

    Otherwise `endpoint` and `replay_endpoint` are ZMQ addresses as the subscriber connects to them (an engine's
    `tcp://*:5557` is `tcp://host:5557` here). `bind` turns it around: the engine connects, we bind.
    """

    dp_rank: int
    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    bind: bool = False


def transport_of(endpoints: Collection[EventEndpoint]) -> Transport:
    """Return the transport of the events of a worker that is registered with endpoints, and without a transport."""
    return Transport.SUBSCRIBE if any(is_grpc_endpoint(each.endpoint) for each in endpoints) else Transport.ZMQ


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a worker has loaded: `lora_id` as its events number it (0: unknown)."""

    name: str
    lora_id: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker as registered. Zero and "" mean unknown unless a line says otherwise."""

    worker_id: str
    model: str
    block_size: int
    tenant: str = DEFAULT_TENANT
    role: Role = Role.AGGREGATED
    engine: EngineKind = EngineKind.VLLM
    http_endpoint: str = ""
    """Base URL of the engine's HTTP API, such as http://10.0.0.5:8000."""
    grpc_endpoint: str = ""
    dp_start_rank: int = 0
    dp_size: int = 1
    event_endpoints: tuple[EventEndpoint, ...] = ()
    total_kv_blocks: int = 0
    """KV blocks of one rank's device cache; 0: unknown, thresholds on blocks cannot apply."""
    max_num_batched_tokens: int = 0
    device_class: DeviceClass = DeviceClass.GPU
    labels: dict[str, str] = field(default_factory=dict)
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    transport: Transport = Transport.ZMQ
    topic: str = ""
    adapters: tuple[Adapter, ...] = ()
    total_slots: int = 0
    draining: bool = False
    eagle: bool = False
    copies: CopyMode = CopyMode.COUNT
    can_fallback: bool = False
    bridge_endpoint: str = ""
    """gRPC address of its bridge, for events that NATS lost."""

    @property
    def pool(self) -> PoolKey:
        """The block index this worker belongs to."""
        return PoolKey(self.model, self.tenant, self.block_size, self.eagle)

    @property
    def kept_blocks(self) -> int:
        """Blocks that one rank keeps on its device and slower tiers, each counted once; 0: unknown.

        Engines write blocks to slower tiers while the device still has them: the larger of both, not the sum.
        """
        return max(self.total_kv_blocks, int(self.labels.get(OFFLOAD_BLOCKS, "0"))) if self.total_kv_blocks else 0

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """Every data-parallel rank of this worker, in order."""
        return tuple(
            WorkerRank(self.worker_id, rank) for rank in range(self.dp_start_rank, self.dp_start_rank + self.dp_size)
        )

    def event_endpoint(self, dp_rank: int) -> EventEndpoint | None:
        """Return the event endpoint of a rank, or None if that rank publishes none."""
        if self.transport is Transport.SUBSCRIBE:
            return next(iter(self.event_endpoints), None)
        return next((e for e in self.event_endpoints if e.dp_rank == dp_rank), None)

    def with_draining(self, draining: bool) -> WorkerSpec:
        """Return a copy that takes new requests or, if draining, no longer does."""
        return replace(self, draining=draining)

    def validate(self) -> WorkerSpec:
        """Itself, if every field is in range.

        Raises:
            InvalidArgument: Naming the first field that is not, as `kvscout.v1.Worker` does.
        """
        for name, text in (("worker_id", self.worker_id), ("model", self.model), ("tenant", self.tenant)):
            _require(name, name_problem(text))
        checks: tuple[tuple[str, bool, str], ...] = (
            ("tenant", self.tenant != "*", '"*" means all tenants'),
            ("block_size", self.block_size > 0, "must be at least 1 token"),
            ("block_size", self.block_size < 2**32, "must be below 2**32"),
            ("dp_size", 1 <= self.dp_size <= MAX_RANKS, f"must be between 1 and {MAX_RANKS}"),
            ("dp_start_rank", self.dp_start_rank >= 0, "must not be negative"),
            (
                "dp_start_rank",
                self.dp_start_rank + self.dp_size <= 2**32,
                "must leave room for dp_size ranks below 2**32",
            ),
            ("total_kv_blocks", 0 <= self.total_kv_blocks < 2**64, "must be between 0 and 2**64 - 1"),
            ("bootstrap_port", 0 <= self.bootstrap_port <= MAX_PORT, f"must be at most {MAX_PORT}"),
        )
        for name, good, message in checks:
            if not good:
                raise InvalidArgument(message, field=name)
        self._require_addresses()
        self._require_event_endpoints()
        _require("topic", text_problem(self.topic))
        for number, adapter in enumerate(self.adapters):
            _require(f"adapters[{number}].name", name_problem(adapter.name))
        for key, value in self.labels.items():
            _require("labels", text_problem(key) or text_problem(value))
        self._require_cache_labels()
        return self

    def _require_cache_labels(self) -> None:
        if self.labels.get(SHARED_CACHE_TIER, "host") not in ("host", "disk"):
            raise InvalidArgument(f"{SHARED_CACHE_TIER} must be host or disk", field="labels")
        for label in (SHARED_CACHE_BLOCKS, OFFLOAD_BLOCKS, KV_SOURCE_BLOCKS_PER_SECOND):
            if not _NUMBER.fullmatch(self.labels.get(label, "1")):
                raise InvalidArgument(f"{label} must be a number of blocks, at least 1", field="labels")
        if (source := self.labels.get(KV_SOURCE)) and (problem := address_problem(source)):
            raise InvalidArgument(f"{KV_SOURCE} {problem}", field="labels")

    def _require_addresses(self) -> None:
        if self.http_endpoint:
            _require("http_endpoint", url_problem(self.http_endpoint))
        if self.grpc_endpoint:
            _require("grpc_endpoint", address_problem(self.grpc_endpoint))
        if self.bridge_endpoint:
            _require("bridge_endpoint", address_problem(self.bridge_endpoint))
        if self.bootstrap_host:
            _require("bootstrap_host", host_problem(self.bootstrap_host.strip("[]")))

    def _require_event_endpoints(self) -> None:
        if self.transport is Transport.SUBSCRIBE:
            self._require_stream()
        first, last = self.dp_start_rank, self.dp_start_rank + self.dp_size - 1
        seen: set[int] = set()
        for number, endpoint in enumerate(self.event_endpoints):
            where, rank = f"event_endpoints[{number}]", endpoint.dp_rank
            if not first <= rank <= last:
                raise InvalidArgument(f"rank {rank} is not one of {first}..{last}", field=f"{where}.dp_rank")
            if rank in seen:
                raise InvalidArgument(f"rank {rank} is given twice", field=f"{where}.dp_rank")
            if self.transport is Transport.SUBSCRIBE:
                _require(f"{where}.endpoint", grpc_endpoint_problem(endpoint.endpoint))
            else:
                _require(f"{where}.endpoint", event_endpoint_problem(endpoint.endpoint, bind=endpoint.bind))
            if endpoint.replay_endpoint:
                _require(f"{where}.replay_endpoint", event_endpoint_problem(endpoint.replay_endpoint))
            _require(f"{where}.topic", text_problem(endpoint.topic))
            seen.add(rank)

    def _require_stream(self) -> None:
        if self.engine not in SUBSCRIBED_ENGINES:
            raise InvalidArgument(f"{self.engine} has no SubscribeKvEvents", field="engine")
        if len(self.event_endpoints) != 1:
            raise InvalidArgument("must be one, for all ranks, with transport subscribe", field="event_endpoints")
        (endpoint,) = self.event_endpoints
        for name in ("replay_endpoint", "topic", "bind"):
            if getattr(endpoint, name):
                raise InvalidArgument("is for ZMQ only", field=f"event_endpoints[0].{name}")

    def require_allowed(self, allowed: Collection[Allowed]) -> None:
        """Raise unless every event endpoint may be opened here.

        Args:
            allowed: What the operator of this service allows.

        Raises:
            InvalidArgument: Naming the first that is not.
        """
        for number, endpoint in enumerate(self.event_endpoints):
            where = f"event_endpoints[{number}]"
            _require(f"{where}.endpoint", refusal(endpoint.endpoint, allowed, bind=endpoint.bind))
            if endpoint.replay_endpoint:
                _require(f"{where}.replay_endpoint", refusal(endpoint.replay_endpoint, allowed))


def _require(field: str, problem: str) -> None:
    if problem:
        raise InvalidArgument(problem, field=field)
