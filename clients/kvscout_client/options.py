"""What a caller can ask for beside the prompt. None: the engine's or the service's default."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout.v1 import gateway_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When generation ends."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def to_proto(self) -> gateway_pb2.StopConditions:
        """As protobuf."""
        return gateway_pb2.StopConditions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def to_proto(self) -> gateway_pb2.SamplingOptions:
        """As protobuf."""
        return gateway_pb2.SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the output carries."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None

    def to_proto(self) -> gateway_pb2.OutputOptions:
        """As protobuf."""
        return gateway_pb2.OutputOptions(
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


@dataclass(frozen=True, slots=True)
class RouterOverride:
    """Changes of the scheduler's settings for one request."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    policy: str | None = None
    seed: int | None = None

    def to_proto(self) -> types_pb2.RouterConfigOverride:
        """As protobuf."""
        return types_pb2.RouterConfigOverride(
            overlap_score_weight=self.overlap_score_weight,
            router_temperature=self.router_temperature,
            policy=self.policy,
            seed=self.seed,
        )
