"""Options of a request beside its prompt. None: the engine's or the service's default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias, TypedDict

from kvscout.v1 import gateway_pb2, types_pb2
from kvscout_common.hashing import MmItem
from kvscout_common.worker import Role

WorkerId: TypeAlias = str | int
"""A worker's id; a number stands for its text."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a generation."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_proto(self) -> gateway_pb2.StopConditions:
        """Return the protobuf message."""
        return gateway_pb2.StopConditions(**asdict(self))


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Settings of the sampler."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def to_proto(self) -> gateway_pb2.SamplingOptions:
        """Return the protobuf message."""
        return gateway_pb2.SamplingOptions(**asdict(self))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Contents of the output beside tokens and text."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None

    def to_proto(self) -> gateway_pb2.OutputOptions:
        """Return the protobuf message."""
        return gateway_pb2.OutputOptions(**asdict(self))


@dataclass(frozen=True, slots=True)
class RouterOverride:
    """Changes of the scheduler's settings for one request."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    policy: str | None = None
    seed: int | None = None

    def to_proto(self) -> types_pb2.RouterConfigOverride:
        """Return the protobuf message."""
        return types_pb2.RouterConfigOverride(**asdict(self))


class RouteOptions(TypedDict, total=False):
    """Keyword arguments of `Router.route`, which explains them."""

    block_hashes: Iterable[int]
    block_size: int | None
    isl_tokens: int
    attempt_id: int
    model: str
    lora_name: str
    cache_salt: str
    mm_items: Iterable[MmItem]
    role: Role
    pinned_worker_id: WorkerId
    pinned_dp_rank: int | None
    allowed_worker_ids: Iterable[WorkerId]
    required_labels: Mapping[str, str] | None
    override: RouterOverride | None
    priority: int
    fairness_id: str
    objective: str
    expected_output_tokens: int
    max_output_tokens: int
    output_class: str
    estimate_prefill_complete: bool
    session: str
    explain: bool
    lease_seconds: int
