"""Gateway messages ↔ the flows' plain values. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, TypeVar

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import InvalidArgument, Unimplemented
from kvscout_common.hashing import MmItem
from kvscout_common.http.http import Form
from kvscout_common.http.json_scan import load_json
from kvscout_common.plain_text import printable
from kvscout_common.registry.worker_proto import rank_to_proto, role_from_proto
from kvscout_common.transport.wire_fields import bytes_of_field
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_gateway.fronts.reserved import reserved_in
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.output import Output, check_class
from kvscout_gateway.values.prompt import Prompt, PromptTooLong
from kvscout_gateway.values.request import Request, TokenBody

MAX_REQUEST_ID = 256
MAX_ENGINE_FIELDS = 1024 * 1024
"""Characters."""
MAX_ENGINE_VALUES = 100_000
"""At any depth."""
_OWN_FIELDS = frozenset(
    {
        *("model", "prompt", "echo", "cache_salt", "priority"),
        *("stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "logprobs", "prompt_logprobs"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
        *("text", "input_ids", "sampling_params", "lora_path", "extra_key", "return_logprob", "top_logprobs_num"),
        *(field.name for field in gateway_pb2.SamplingOptions.DESCRIPTOR.fields),
    }
)
"""Fields of engines' requests that the message has elsewhere, or that the gateway itself sets."""
GENERATE = "generate"
"""The class of outputs of token ids that are continued as they are."""
FLOAT_DIGITS = range(6, 10)
"""Significant digits that distinguish every two single-precision numbers: six do for some, nine for all."""


WithTokens = TypeVar(
    "WithTokens", gateway_pb2.RouteRequest, gateway_pb2.GenerateRequest, gateway_pb2.GatewayGetPotentialLoadsRequest
)


def pack_tokens(request: WithTokens, max_prompt_tokens: int) -> bytes:
    """Return the token ids of a request as little-endian u32, as they travel: no number becomes an object.

    Raises:
        InvalidArgument: They are more than a prompt may have.
    """
    count = len(request.token_ids)
    _check_length(count, max_prompt_tokens, "token_ids")
    return bytes_of_field(request.SerializeToString(), request.TOKEN_IDS_FIELD_NUMBER)


def _check_length(tokens: int, max_prompt_tokens: int, field: str) -> None:
    if tokens > max_prompt_tokens:
        raise PromptTooLong(tokens, max_prompt_tokens, field=field)


def _mm_items(items: Iterable[types_pb2.MultimodalItem]) -> tuple[MmItem, ...]:
    return tuple([MmItem(item.id, item.offset, item.length or 1) for item in items])


def route_request(
    request: gateway_pb2.RouteRequest, max_prompt_tokens: int, *, max_priority: int | None = None
) -> Request:
    """Return what a RouteRequest asks for.

    Args:
        request: The client's.
        max_prompt_tokens: Longer prompts are refused.
        max_priority: A higher priority counts as this one; None = any.

    Raises:
        InvalidArgument: If the prompt is missing, too long, given twice, or given as hashes without their block size.
    """
    if not request.model:
        raise InvalidArgument("must not be empty", field="model")
    check_class(request.output_class)
    if request.token_ids and request.block_hashes:
        raise InvalidArgument("give token_ids or block_hashes, not both", field="token_ids")
    if request.token_ids:
        if request.HasField("block_size") and not request.block_size:
            raise InvalidArgument("must be at least 1 token", field="block_size")
        for name in ("block_size", "isl_tokens"):
            if getattr(request, name):
                raise InvalidArgument("may only be given with block_hashes", field=name)
        prompt = Prompt(
            isl_tokens=len(request.token_ids),
            token_ids=pack_tokens(request, max_prompt_tokens),
            cache_salt=request.cache_salt,
            mm_items=_mm_items(request.mm_items),
        )
    elif request.block_hashes:
        if not request.block_size:
            raise InvalidArgument("is required with block_hashes, at least 1", field="block_size")
        for name in ("cache_salt", "mm_items"):
            if getattr(request, name):
                raise InvalidArgument("may only be given with token_ids: block_hashes include it", field=name)
        least = len(request.block_hashes) * request.block_size
        _check_length(least, max_prompt_tokens, "block_hashes")
        if request.isl_tokens and request.isl_tokens < least:
            raise InvalidArgument(f"is below the {least} tokens of block_hashes", field="isl_tokens")
        prompt = Prompt(
            isl_tokens=request.isl_tokens or least,
            given_hashes=bytes_of_field(request.SerializeToString(), request.BLOCK_HASHES_FIELD_NUMBER),
            field="block_hashes",
            given_block_size=request.block_size,
        )
    else:
        raise InvalidArgument("the prompt is empty: give token_ids or block_hashes", field="token_ids")
    return Request(
        model=request.model,
        tenant=request.tenant or DEFAULT_TENANT,
        prompt=prompt,
        front="Route",
        lora_name=request.lora_name,
        role=role_from_proto(request.role),
        request_id=request.request_id,
        attempt_id=request.attempt_id,
        allowed=tuple(request.allowed_worker_ids),
        pinned=request.pinned_worker_id,
        pinned_rank=_pinned_rank(request),
        required_labels=dict(request.required_labels) if request.required_labels else {},
        override=request.router_config_override if request.HasField("router_config_override") else None,
        priority=request.priority if max_priority is None else min(request.priority, max_priority),
        fairness_id=request.fairness_id,
        output=Output(
            request.expected_output_tokens,
            request.max_output_tokens,
            request.output_class,
            request.estimate_prefill_complete,
        ),
        explain=request.explain,
        lease_seconds=request.lease_seconds,
    )


def generate_request(
    request: gateway_pb2.GenerateRequest, max_prompt_tokens: int, *, max_priority: int | None = None
) -> Request:
    """Return what a GenerateRequest asks for.

    Args:
        request: The client's.
        max_prompt_tokens: Longer prompts are refused.
        max_priority: A higher priority counts as this one; None = any.

    Raises:
        InvalidArgument: If the model or the prompt is missing, the prompt too long, the id no header's value, or a
            parameter out of range.
        Unimplemented: See `engine_parameters`.
    """
    if not request.model:
        raise InvalidArgument("must not be empty", field="model")
    if not request.token_ids:
        raise InvalidArgument("the prompt is empty", field="token_ids")
    if request.mm_items and not request.engine_fields:
        # The engine would get placeholders without the items' content, and answer something.
        raise InvalidArgument("need their content, in engine_fields", field="mm_items")
    request_id = request.request_id
    if len(request_id) > MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidArgument(f"must be printable ASCII, at most {MAX_REQUEST_ID} characters", field="request_id")
    parameters = engine_parameters(request)
    return Request(
        model=request.model,
        tenant=request.tenant or DEFAULT_TENANT,
        prompt=Prompt(
            isl_tokens=len(request.token_ids),
            token_ids=pack_tokens(request, max_prompt_tokens),
            cache_salt=request.cache_salt,
            mm_items=_mm_items(request.mm_items),
        ),
        front="Generate",
        lora_name=request.lora_name,
        request_id=request_id,
        allowed=tuple(request.allowed_worker_ids),
        pinned=request.pinned_worker_id,
        pinned_rank=_pinned_rank(request),
        required_labels=dict(request.required_labels) if request.required_labels else {},
        override=request.router_config_override if request.HasField("router_config_override") else None,
        priority=request.priority if max_priority is None else min(request.priority, max_priority),
        fairness_id=request.fairness_id,
        output=_output(request.stop_conditions),
        explain=request.explain,
        body=TokenBody(parameters, Form.BYTES if "logprobs" in parameters else Form.MESSAGES),
    )


def _output(stop: gateway_pb2.StopConditions) -> Output:
    """Return the output that they describe: it is as long as it may be only where nothing else can end it."""
    reaches_it = stop.ignore_eos or 0 < stop.max_tokens <= stop.min_tokens
    ends_before = stop.stop or stop.stop_token_ids
    return Output(stop.max_tokens if reaches_it and not ends_before else 0, stop.max_tokens, GENERATE)


def _pinned_rank(request: gateway_pb2.RouteRequest | gateway_pb2.GenerateRequest) -> int | None:
    if not request.HasField("pinned_dp_rank"):
        return None
    if not request.pinned_worker_id:
        raise InvalidArgument("needs pinned_worker_id", field="pinned_dp_rank")
    return request.pinned_dp_rank


def engine_parameters(request: gateway_pb2.GenerateRequest) -> dict[str, Any]:  # noqa: C901, PLR0912  # one field after the other
    """Stop, sampling and output options, named as vLLM's /v1/completions names them; unset ones left out.

    Raises:
        InvalidArgument: If one is out of range; what is not checked here, the engine checks.
        Unimplemented: For log probabilities of the prompt, which GenerateResponse has no place for.
    """
    stop, sampling, output = request.stop_conditions, request.sampling_options, request.output_options
    if output.HasField("prompt_logprobs"):
        raise Unimplemented(
            "log probabilities of the prompt are not supported here; use /v1/completions",
            field="output_options.prompt_logprobs",
        )
    for field, value in sampling.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument("must be a finite number", field=f"sampling_options.{field.name}")
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise InvalidArgument("must be at least 1", field="stop_conditions.max_tokens")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        raise InvalidArgument("must not exceed max_tokens", field="stop_conditions.min_tokens")
    if sampling.HasField("n") and sampling.n != 1:
        raise InvalidArgument("a stream carries one sequence", field="sampling_options.n")
    if sampling.HasField("temperature") and sampling.temperature < 0:
        raise InvalidArgument("must be a number >= 0", field="sampling_options.temperature")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument("must be above 0 and at most 1", field="sampling_options.top_p")
    parameters: dict[str, Any] = _engine_fields(request.engine_fields) if request.engine_fields else {}
    parameters |= {
        field.name: _as_written(value) if isinstance(value, float) else value
        for message in (sampling, output)
        for field, value in message.ListFields()  # all optional: only those that are set
    }
    if stop.HasField("max_tokens"):
        parameters["max_tokens"] = stop.max_tokens
    if stop.min_tokens:
        parameters["min_tokens"] = stop.min_tokens
    if stop.stop:
        parameters["stop"] = list(stop.stop)
    if stop.stop_token_ids:
        parameters["stop_token_ids"] = list(stop.stop_token_ids)
    if stop.ignore_eos:
        parameters["ignore_eos"] = True
    if request.cache_salt:
        parameters["cache_salt"] = request.cache_salt
    return parameters


def _engine_fields(text: str) -> dict[str, Any]:
    """Further fields of the engine's request.

    Raises:
        InvalidArgument: They are no JSON object, or one of them is the gateway's to set, or has what is.
    """
    if len(text) > MAX_ENGINE_FIELDS:
        raise InvalidArgument(f"have {len(text)} characters, at most {MAX_ENGINE_FIELDS} can be", field="engine_fields")
    try:
        fields = load_json(text.encode(), max_values=MAX_ENGINE_VALUES)
    except ValueError as error:
        raise InvalidArgument(f"are not read: {error}", field="engine_fields") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("must be a JSON object", field="engine_fields")
    own = sorted({*(_OWN_FIELDS & fields.keys()), *reserved_in(fields)})
    if own:
        raise InvalidArgument(f"{', '.join(own)} cannot be set there", field="engine_fields")
    return fields


def _as_written(value: float) -> float:
    """Return the shortest decimal that a single-precision field holds as this value: 0.7, not 0.699999988079071."""
    single = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in FLOAT_DIGITS)
    return next((number for number in shorter if struct.pack("<f", number) == single), value)


def loads_request(request: gateway_pb2.GatewayGetPotentialLoadsRequest, max_prompt_tokens: int) -> Request:
    """Return what a GatewayGetPotentialLoadsRequest asks about.

    Raises:
        InvalidArgument: If the role is unknown or the prompt too long.
    """
    return Request(
        model=request.model,
        tenant=request.tenant or DEFAULT_TENANT,
        prompt=Prompt(
            isl_tokens=len(request.token_ids),
            token_ids=pack_tokens(request, max_prompt_tokens),
            cache_salt=request.cache_salt,
        ),
        lora_name=request.lora_name,
        role=role_from_proto(request.role),
    )


MAX_SUMMARY = 1_000
"""Characters of why a worker was chosen, with what was missing."""


def _explanation(decision: Decision, *, in_full: bool) -> scheduler_pb2.Explanation | None:
    """Return why the worker was chosen, in its sentence what was missing."""
    why = decision.explanation
    if why is None or not why.summary or not (decision.degraded or decision.pull):
        return why
    told = scheduler_pb2.Explanation()
    told.CopyFrom(why)
    parts = [why.summary]
    if decision.pull is not None:
        parts.append(decision.pull.in_words(decision.block_size))
    if decision.degraded:
        parts.append(f"degraded: {'; '.join(decision.degraded_for(in_full=in_full))}")
    told.summary = printable("; ".join(parts), MAX_SUMMARY)[:MAX_SUMMARY]
    return told


def route_response(decision: Decision, *, in_full: bool) -> gateway_pb2.RouteResponse:
    """Return a decision as the answer of Route; `in_full`: with the addresses of upstreams that failed."""
    return gateway_pb2.RouteResponse(
        worker=rank_to_proto(decision.worker),
        overlap_blocks=decision.overlap_blocks,
        confirmed_overlap_blocks=decision.confirmed_blocks or 0,
        effective_overlap_blocks=decision.effective_overlap_blocks,
        http_endpoint=decision.endpoint,
        num_blocks=decision.blocks,
        block_size=decision.block_size,
        cost=decision.cost,
        degraded=bool(decision.degraded),
        degraded_reasons=decision.degraded_for(in_full=in_full) or None,
        explanation=_explanation(decision, in_full=in_full),
        booked=decision.booking is not None and decision.booking.scheduler is not None,
        pull=_pull(decision),
    )


def _pull(decision: Decision) -> gateway_pb2.Pull | None:
    pull = decision.pull
    if pull is None:
        return None
    return gateway_pb2.Pull(
        source=rank_to_proto(pull.source),
        address=pull.address,
        blocks=pull.blocks,
        seconds=pull.seconds,
        compute_seconds=pull.compute_seconds,
    )
