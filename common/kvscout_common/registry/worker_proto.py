"""Workers as protobuf: `kvscout.v1.Worker` ↔ `WorkerSpec`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeVar

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.engine_facts import QUERIED_ENGINES
from kvscout_common.worker import (
    DEFAULT_TENANT,
    Adapter,
    CopyMode,
    DeviceClass,
    EngineKind,
    EventEndpoint,
    Role,
    Transport,
    WorkerRank,
    WorkerSpec,
    transport_of,
)

E = TypeVar("E", bound=StrEnum)
_ROLES: Final = {role: types_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}


def enum_from_proto(kind: type[E], wrapper: Any, prefix: str, number: int, unset: E, *, field: str) -> E:
    """Return the member of one of our enums that a proto number names; 0 means `unset`.

    Raises:
        InvalidArgument: If this release does not know the number.
    """
    if number == 0:
        return unset
    try:
        return kind[wrapper.Name(number).removeprefix(prefix)]
    except (ValueError, KeyError):
        raise InvalidArgument(f"unknown value {number}", field=field) from None


def role_from_proto(number: int) -> Role:
    """Return the role of a proto number; unset = aggregated."""
    return enum_from_proto(Role, types_pb2.Role, "ROLE_", number, Role.AGGREGATED, field="role")


def role_to_proto(role: Role) -> types_pb2.Role.ValueType:
    """Return the proto number of a role."""
    return _ROLES[role]


def rank_to_proto(rank: WorkerRank) -> types_pb2.WorkerRank:
    """Return a worker rank as protobuf."""
    return types_pb2.WorkerRank(worker_id=rank.worker_id, dp_rank=rank.dp_rank)


def rank_from_proto(message: types_pb2.WorkerRank) -> WorkerRank:
    """Return a worker rank from protobuf.

    Raises:
        InvalidArgument: If it names no worker.
    """
    if not message.worker_id:
        raise InvalidArgument("must not be empty", field="worker_id")
    return WorkerRank(message.worker_id, message.dp_rank)


def spec_from_proto(worker: workers_pb2.Worker, tenant: str = "") -> WorkerSpec:
    """Return a validated registration, defaults filled in.

    Args:
        worker: As received.
        tenant: Tenant of the request around it; "" = not given.

    Raises:
        InvalidArgument: Naming the first field that is wrong.
    """
    if worker.tenant and tenant and worker.tenant != tenant:
        raise InvalidArgument(f"{worker.tenant!r} is not the request's {tenant!r}", field="worker.tenant")
    endpoints = tuple(
        EventEndpoint(e.dp_rank, e.endpoint, e.replay_endpoint, e.topic, e.bind) for e in worker.event_endpoints
    )
    http_endpoint = worker.http_endpoint.rstrip("/")
    engine = enum_from_proto(
        EngineKind, workers_pb2.EngineKind, "ENGINE_KIND_", worker.engine, EngineKind.VLLM, field="engine"
    )
    events_known = bool(endpoints or (http_endpoint and engine in QUERIED_ENGINES))
    return WorkerSpec(
        worker_id=worker.worker_id,
        model=worker.model,
        block_size=worker.block_size,
        tenant=worker.tenant or tenant or DEFAULT_TENANT,
        role=role_from_proto(worker.role),
        engine=engine,
        http_endpoint=http_endpoint,
        grpc_endpoint=worker.grpc_endpoint,
        dp_start_rank=worker.dp_start_rank,
        dp_size=worker.dp_size or 1,
        event_endpoints=endpoints,
        total_kv_blocks=worker.total_kv_blocks,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        device_class=enum_from_proto(
            DeviceClass,
            workers_pb2.DeviceClass,
            "DEVICE_CLASS_",
            worker.device_class,
            DeviceClass.GPU,
            field="device_class",
        ),
        labels=dict(worker.labels),
        bootstrap_host=worker.bootstrap_host,
        bootstrap_port=worker.bootstrap_port,
        transport=enum_from_proto(
            Transport,
            workers_pb2.EventTransport,
            "EVENT_TRANSPORT_",
            worker.transport,
            transport_of(endpoints) if events_known else Transport.NONE,
            field="transport",
        ),
        topic=worker.topic,
        adapters=tuple(Adapter(a.name, a.lora_id) for a in worker.adapters),
        total_slots=worker.total_slots,
        draining=worker.draining,
        eagle=worker.eagle,
        copies=enum_from_proto(
            CopyMode, workers_pb2.CopyMode, "COPY_MODE_", worker.copies, CopyMode.COUNT, field="copies"
        ),
        can_fallback=worker.can_fallback,
        bridge_endpoint=worker.bridge_endpoint,
    ).validate()


def spec_to_proto(spec: WorkerSpec) -> workers_pb2.Worker:
    """Return a registration as protobuf, every default written out."""
    return workers_pb2.Worker(
        worker_id=spec.worker_id,
        model=spec.model,
        tenant=spec.tenant,
        role=role_to_proto(spec.role),
        engine=workers_pb2.EngineKind.Value(f"ENGINE_KIND_{spec.engine.name}"),
        http_endpoint=spec.http_endpoint,
        grpc_endpoint=spec.grpc_endpoint,
        block_size=spec.block_size,
        dp_start_rank=spec.dp_start_rank,
        dp_size=spec.dp_size,
        event_endpoints=[
            workers_pb2.EventEndpoint(
                dp_rank=e.dp_rank,
                endpoint=e.endpoint,
                replay_endpoint=e.replay_endpoint,
                topic=e.topic,
                bind=e.bind,
            )
            for e in spec.event_endpoints
        ],
        total_kv_blocks=spec.total_kv_blocks,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        device_class=workers_pb2.DeviceClass.Value(f"DEVICE_CLASS_{spec.device_class.name}"),
        labels=spec.labels,
        bootstrap_host=spec.bootstrap_host,
        bootstrap_port=spec.bootstrap_port,
        transport=workers_pb2.EventTransport.Value(f"EVENT_TRANSPORT_{spec.transport.name}"),
        topic=spec.topic,
        adapters=[workers_pb2.Adapter(name=a.name, lora_id=a.lora_id) for a in spec.adapters],
        total_slots=spec.total_slots,
        draining=spec.draining,
        eagle=spec.eagle,
        copies=workers_pb2.CopyMode.Value(f"COPY_MODE_{spec.copies.name}"),
        can_fallback=spec.can_fallback,
        bridge_endpoint=spec.bridge_endpoint,
    )
