"""The mocker's configuration: flags and `KVSCOUT_MOCKER_…` variables become one frozen value."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import click

from kvscout_common.errors import ConfigError
from kvscout_common.settings.flags import flag
from kvscout_mocker.events import BlockHashFormat, EventFormat
from kvscout_mocker.faults import MAX_STALL_SECONDS, FaultConfig
from kvscout_mocker.tokens.tokenizer import RESERVED_TOKENS

DEFAULT_MAX_MODEL_LEN = 32_768


class Render(StrEnum):
    """Render endpoints that an engine serves."""

    OFF = "off"
    """None: vLLM 0.32 answers with 403 until it is started with `--enable-scale-out`."""
    CHAT = "chat"
    """Those of completions and chat completions, as vLLM before it had the others."""
    ALL = "all"
    """Also those of messages and responses, as vLLM 0.32 with `--enable-scale-out`."""


class PromptTokensDetails(StrEnum):
    """Condition on which a usage reports cached tokens."""

    ALWAYS = "always"
    NONZERO = "nonzero"
    """Left out where there are none, as several releases of vLLM do."""
    NEVER = "never"
    """As vLLM without `--enable-prompt-tokens-details`."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a step: base + prefill tokens · per token + decoding requests · per request + their contexts."""

    base_seconds: float
    """Every step: weights are read once however small the batch is."""
    prefill_seconds_per_token: float
    decode_seconds_per_request: float
    context_seconds_per_token: float = 0.0
    """Each token of the contexts that decoding requests have: their keys and values are read in every step."""

    def step_seconds(self, prefill_tokens: int, decodes: int, context_tokens: int = 0) -> float:
        """Return the duration of one step in seconds; `context_tokens` of all decoding requests together."""
        return (
            self.base_seconds
            + prefill_tokens * self.prefill_seconds_per_token
            + decodes * self.decode_seconds_per_request
            + context_tokens * self.context_seconds_per_token
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine of one data-parallel rank."""

    block_size: int
    """Tokens per KV block."""
    num_gpu_blocks: int
    """Physical blocks including vLLM's null block: one less can hold tokens."""
    max_num_seqs: int
    """Requests in one batch."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    max_model_len: int
    """Prompt and output tokens of one request."""
    max_waiting: int
    """Requests in the waiting queue; one more is refused with 503."""
    vocab_size: int
    """Generated token ids are below it."""
    cost: StepCost
    by_priority: bool = False
    """Requests wait by their priority, not by their arrival alone."""
    sliding_window: int = 0
    """Tokens that a token sees in a second cache group; 0: there is none."""
    state_space: bool = False
    """There is a second cache group, of states."""


class Role(StrEnum):
    """Role of an engine in disaggregated serving."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineApi(StrEnum):
    """HTTP API of the process."""

    VLLM = "vllm"
    SGLANG = "sglang"
    BOTH = "both"


class KvLoadFailure(StrEnum):
    """Reaction of a vLLM decode engine to blocks that do not come."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Durations and limits of transfers from a prefill to a decode engine."""

    base_seconds: float
    """Every transfer."""
    seconds_per_token: float
    recomputes: bool
    """A vLLM decode engine computes what does not come; else the request fails."""
    lease_seconds: float
    """Time for which a vLLM prefill engine keeps blocks for a decode engine."""
    timeout_seconds: float
    """Time that a vLLM decode engine waits beyond the duration of a transfer."""
    bootstrap_timeout_seconds: float
    """Longest wait of a SGLang prefill engine for the decode engine."""
    waiting_timeout_seconds: float
    """Longest wait of a SGLang decode engine for the blocks."""

    def seconds(self, tokens: int) -> float:
        """Return the duration of a transfer of `tokens` tokens."""
        return self.base_seconds + tokens * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class MockerConfig:
    """One mocker process."""

    host: str
    """Address that HTTP and both event sockets of every rank are bound to."""
    port: int
    """HTTP port; 0: any free one."""
    events_port: int
    """Event port of rank 0, rank r uses + r; 0: any free ones."""
    replay_port: int
    """Replay port of rank 0, rank r uses + r; 0: any free ones."""
    grpc_port: int | None
    """Port of `SubscribeKvEvents`; 0: any free one; None: it is not served."""
    topic: str
    """First frame of every event message."""
    event_format: EventFormat
    block_hash_format: BlockHashFormat
    buffer_steps: int
    """Batches that the replay socket can repeat."""
    model: str
    """The served model's name."""
    lora_names: tuple[str, ...]
    """Adapters served as models of their own; their `lora_id` counts from 1."""
    dp_size: int
    """Data-parallel ranks in this process."""
    seed: int
    """Together with prompt and position it decides the generated tokens."""
    prompt_tokens_details: PromptTokensDetails
    tool_call_share: float
    """Share of the answers that call a tool, of requests that have tools and leave it open."""
    store_responses: bool
    """Responses are stored, and the next request may continue them."""
    render: Render
    hash_seed: int | None
    """Makes block hashes repeatable; None: random a rank and process, as vLLM's are."""
    role: Role
    api: EngineApi
    bootstrap_port: int
    """Port of a SGLang prefill engine's bootstrap server; 0: any free one."""
    transfer: TransferConfig
    engine: EngineConfig
    faults: FaultConfig

    @property
    def has_vllm_api(self) -> bool:
        """Return True if it has vLLM's API."""
        return self.api is not EngineApi.SGLANG

    @property
    def has_sglang_api(self) -> bool:
        """Return True if it has SGLang's API."""
        return self.api is not EngineApi.VLLM

    def rank_hash_seed(self) -> int:
        """Return the hash seed of one more rank."""
        return secrets.randbits(64) if self.hash_seed is None else self.hash_seed


def config_from_flags(
    *,
    model: str,
    lora: tuple[str, ...],
    dp_size: int,
    events_port: int,
    replay_port: int,
    block_size: int,
    num_gpu_blocks: int,
    sliding_window: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    speedup: float,
    **others: Any,
) -> MockerConfig:
    """Return the configuration of the flags.

    Args: as documented by `--help`; `max_model_len` 0 means the default or what the blocks hold.

    Raises:
        ConfigError: Naming the flag that is out of range or contradicts another.
    """
    flags = {name: value for name, value in locals().items() if name != "others"} | others
    # The groups of a hybrid model share the blocks, and a prompt may be computed in one step.
    state_space = others["state_space"]
    usable_blocks = (num_gpu_blocks - 1) // (2 if sliding_window else 1) - (2 if state_space else 0)
    capacity = usable_blocks * block_size
    last_rank = dp_size - 1
    checks: tuple[tuple[str, bool, str], ...] = (
        ("model", bool(model), "must not be empty"),
        ("lora", all(lora) and len({model, *lora}) == 1 + len(lora), "names must be distinct and not empty"),
        (
            "max_num_batched_tokens",
            max_num_batched_tokens >= max_num_seqs,
            f"must be at least max_num_seqs ({max_num_seqs}), or decoding requests starve",
        ),
        (
            "max_model_len",
            max_model_len <= capacity,
            f"{max_model_len} tokens do not fit the {usable_blocks} usable blocks of {block_size}",
        ),
        ("sliding_window", sliding_window != 1, "must be 0, or at least 2 tokens"),
        ("state_space", not (state_space and sliding_window), "excludes sliding_window: there are two cache groups"),
        (
            "max_num_batched_tokens",
            not state_space or max_num_batched_tokens >= block_size,
            f"must be at least block_size ({block_size}): with states, steps end where blocks end",
        ),
        ("events_port", events_port + last_rank <= 65_535, "the last rank's port is above 65535"),
        ("replay_port", replay_port + last_rank <= 65_535, "the last rank's port is above 65535"),
        (
            "replay_port",
            0 in (events_port, replay_port) or abs(events_port - replay_port) >= dp_size,
            f"must be at least dp_size ({dp_size}) away from events_port: rank r adds r to both",
        ),
    )
    for name, good, message in checks:
        if not good:
            raise ConfigError(message, field=name)
    transfer = {
        "base_seconds": others["kv_transfer_base_ms"] / 1e3 / speedup,
        "seconds_per_token": others["kv_transfer_us_per_token"] / 1e6 / speedup,
        "recomputes": others["kv_load_failure"] is KvLoadFailure.RECOMPUTE,
        "lease_seconds": others["kv_lease_seconds"],
        "timeout_seconds": others["kv_transfer_timeout_seconds"],
    }
    cost = StepCost(
        base_seconds=others["step_base_ms"] / 1e3 / speedup,
        prefill_seconds_per_token=others["prefill_us_per_token"] / 1e6 / speedup,
        decode_seconds_per_request=others["decode_us_per_request"] / 1e6 / speedup,
        context_seconds_per_token=others["context_ns_per_token"] / 1e9 / speedup,
    )
    engine = {
        "cost": cost,
        "by_priority": others["scheduling_policy"] == "priority",
        "max_model_len": max_model_len or min(DEFAULT_MAX_MODEL_LEN, capacity),
    }
    fault_seed = others["fault_seed"]
    parts = {
        "lora_names": lora,
        "transfer": TransferConfig(**_fields(TransferConfig, flags | transfer)),
        "engine": EngineConfig(**_fields(EngineConfig, flags | engine)),
        "faults": FaultConfig(
            **_fields(FaultConfig, flags | {"seed": secrets.randbits(32) if fault_seed is None else fault_seed})
        ),
    }
    return MockerConfig(**_fields(MockerConfig, flags | parts))


def _fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    return {field.name: values[field.name] for field in fields(kind)}


_PORT = click.IntRange(0, 65_535)
_COUNT = click.IntRange(min=1)
_U64 = click.IntRange(0, 2**64 - 1)
_SHARE = click.FloatRange(0, 1)
_BATCHES = click.IntRange(min=0)
_DURATION = click.FloatRange(min=0.0)
_WAIT = click.FloatRange(min=0.0, min_open=True)

_flag = functools.partial(flag, program="mocker")

_FLAGS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    _flag("--host", default="127.0.0.1", help="Address of all sockets."),
    _flag("--port", type=_PORT, default=8100, help="HTTP port; 0: any free one."),
    _flag(
        "--events-port",
        type=_PORT,
        default=5557,
        help="First port; rank r uses this port + r. 0: any free ports.",
    ),
    _flag(
        "--replay-port",
        type=_PORT,
        default=5657,
        help="First port; rank r uses this port + r. 0: any free ports.",
    ),
    _flag(
        "--grpc-port",
        type=_PORT,
        help="Serve the events of all ranks over gRPC, too (SubscribeKvEvents). 0: any free port.",
    ),
    _flag("--topic", default="", help="First frame of every event message."),
    _flag(
        "--event-format",
        type=click.Choice(EventFormat, case_sensitive=False),
        default=EventFormat.MAP,
        show_default="map",
        help="Encoding of events and replay frames; map: vLLM 0.32; array: vLLM 0.23.",
    ),
    _flag(
        "--block-hash-format",
        type=click.Choice(BlockHashFormat, case_sensitive=False),
        default=BlockHashFormat.INT,
        show_default="int",
        help="u64 or 32 raw bytes.",
    ),
    _flag(
        "--buffer-steps",
        type=click.IntRange(1, 1_000_000),
        default=10_000,
        help="Batches retained for replay.",
    ),
    _flag("--model", default="mock", help="Served model name."),
    _flag("--lora", multiple=True, help="Name of a LoRA adapter to serve; repeatable."),
    _flag("--dp-size", type=click.IntRange(1, 1024), default=1, help="Data-parallel ranks."),
    _flag("--seed", type=_U64, default=0, help="Changes the generated tokens."),
    _flag("--hash-seed", type=_U64, help="Makes block hashes repeatable.  [default: random]"),
    _flag(
        "--prompt-tokens-details",
        type=click.Choice(PromptTokensDetails, case_sensitive=False),
        default=PromptTokensDetails.ALWAYS,
        show_default="always",
        help="When usages report cached tokens; nonzero: only if there are any, as in several vLLM releases.",
    ),
    _flag(
        "--tool-call-share",
        type=_SHARE,
        default=0.0,
        help="Share of answers that call a tool, if the request has tools and leaves it open.",
    ),
    _flag("--store-responses", is_flag=True, help="Stores responses, as vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1."),
    _flag(
        "--render",
        type=click.Choice(Render, case_sensitive=False),
        default=Render.OFF,
        show_default="off",
        help="Render endpoints. all: as vLLM 0.32 with --enable-scale-out; chat: as earlier releases; off: 403.",
    ),
    _flag(
        "--role",
        type=click.Choice(Role, case_sensitive=False),
        default=Role.AGGREGATED,
        show_default="aggregated",
        help="Role; prefill and decode take part in the handshake of its API.",
    ),
    _flag(
        "--api",
        type=click.Choice(EngineApi, case_sensitive=False),
        default=EngineApi.VLLM,
        show_default="vllm",
        help="HTTP API of the engine; both have OpenAI's endpoints.",
    ),
    _flag(
        "--bootstrap-port",
        type=_PORT,
        default=8998,
        help="Bootstrap port of an SGLang prefill engine; 0: any free one.",
    ),
    _flag("--kv-transfer-base-ms", type=_DURATION, default=2.0, help="Time of each transfer of blocks."),
    _flag("--kv-transfer-us-per-token", type=_DURATION, default=5.0, help="Time per token of a transfer."),
    _flag(
        "--kv-transfer-timeout-seconds",
        type=_WAIT,
        default=5.0,
        help="Time for which a vLLM decode engine waits in addition to the duration of a transfer.",
    ),
    _flag(
        "--kv-lease-seconds",
        type=_WAIT,
        default=30.0,
        help="Time for which a vLLM prefill engine holds blocks for a decode engine.",
    ),
    _flag(
        "--kv-load-failure",
        type=click.Choice(KvLoadFailure, case_sensitive=False),
        default=KvLoadFailure.RECOMPUTE,
        show_default="recompute",
        help="Reaction of a vLLM decode engine if blocks do not arrive; vLLM's own default is fail.",
    ),
    _flag(
        "--bootstrap-timeout-seconds",
        type=_WAIT,
        default=300.0,
        help="Time for which an SGLang prefill engine waits for the decode engine.",
    ),
    _flag(
        "--waiting-timeout-seconds",
        type=_WAIT,
        default=300.0,
        help="Time for which an SGLang decode engine waits for the blocks.",
    ),
    _flag("--block-size", type=_COUNT, default=16, help="Tokens per KV block."),
    _flag(
        "--num-gpu-blocks",
        type=click.IntRange(min=2),
        default=4096,
        help="KV blocks of one rank, including vLLM's null block.",
    ),
    _flag(
        "--sliding-window",
        type=click.IntRange(min=0),
        default=0,
        help="Tokens of the sliding window in every other layer, as of a hybrid model; 0 = full attention only.",
    ),
    _flag(
        "--state-space",
        is_flag=True,
        help="Every other layer has states instead of attention, as of a hybrid model with Mamba or linear attention.",
    ),
    _flag(
        "--scheduling-policy",
        type=click.Choice(["fcfs", "priority"]),
        default="fcfs",
        help="priority: requests with a lower priority number go first; fcfs: their priority has no effect.",
    ),
    _flag("--max-num-seqs", type=_COUNT, default=256, help="Requests in a batch."),
    _flag("--max-num-batched-tokens", type=_COUNT, default=2048, help="Tokens in a step."),
    _flag(
        "--max-model-len",
        type=click.IntRange(min=0),
        default=0,
        help=f"Tokens of one request.  [default: {DEFAULT_MAX_MODEL_LEN} or what the blocks hold]",
    ),
    _flag("--max-waiting", type=_COUNT, default=1024, help="More waiting requests: HTTP 503."),
    _flag(
        "--vocab-size",
        type=click.IntRange(RESERVED_TOKENS + 1, 2**31),
        default=32_000,
        help="Generated ids are below it; prompts may hold any u32.",
    ),
    _flag("--step-base-ms", type=_DURATION, default=8.0, help="Duration of an empty step."),
    _flag(
        "--prefill-us-per-token",
        type=_DURATION,
        default=50.0,
        help="Time that each uncached prompt token adds to its step.",
    ),
    _flag(
        "--decode-us-per-request",
        type=_DURATION,
        default=50.0,
        help="Time that each decoding request adds to a step.",
    ),
    _flag(
        "--context-ns-per-token",
        type=_DURATION,
        default=0.0,
        help="Time that each token of the contexts of decoding requests adds to a step.",
    ),
    _flag(
        "--speedup",
        type=click.FloatRange(min=0.0, min_open=True),
        default=1.0,
        help="Factor by which all durations are divided.",
    ),
    _flag("--drop-events", type=_SHARE, default=0.0, help="Fault: share of batches not sent live."),
    _flag("--duplicate-events", type=_SHARE, default=0.0, help="Fault: share of batches sent twice."),
    _flag("--mute-requests", type=_SHARE, default=0.0, help="Fault: share of streams that get pings and no token."),
    _flag("--fail-requests", type=_SHARE, default=0.0, help="Fault: share of requests that fail in the engine."),
    _flag("--fault-seed", type=_U64, help="Makes the draws of faults repeatable.  [default: random]"),
    _flag("--crash-after", type=_BATCHES, default=0, help="Fault: die after this number of batches; 0: never."),
    _flag("--stall-after", type=_BATCHES, default=0, help="Fault: hang after this number of batches; 0: never."),
    _flag(
        "--stall-seconds",
        type=click.FloatRange(0, MAX_STALL_SECONDS),
        default=5.0,
        help="Duration of the hang.",
    ),
    _flag("--no-replay", is_flag=True, help="Fault: no replay socket."),
)


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command all flags of the mocker, in the order `--help` shows them."""
    for option in reversed(_FLAGS):
        command = option(command)
    return command
