"""SGLang's own API: `/generate`, with token ids in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvscout_common.http.http import HttpRequest
from kvscout_gateway.engines.vllm import body_of, common_headers, without_none
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import SGLANG
from kvscout_gateway.values.request import Request

_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
        )
    },
}
"""vLLM's names of sampling parameters, and SGLang's."""


class SglangAdapter:
    """See `EngineAdapter`."""

    dialect = SGLANG

    async def completion(
        self, to: Decision, request: Request, parameters: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> HttpRequest:
        """See `EngineAdapter`."""
        known = {*_SAMPLING, "cache_salt", "logprobs"}
        sampling = {theirs: parameters[ours] for ours, theirs in _SAMPLING.items() if ours in parameters}
        rest = {
            **{name: value for name, value in parameters.items() if name not in known},
            "rid": request.request_id,
            "stream": True,
            "sampling_params": sampling,
            "lora_path": to.lora_name or None,
            "extra_key": parameters.get("cache_salt"),
            # What it was called before, and since: either is passed over by releases that do not know it.
            "data_parallel_rank": to.rank_header,
            "routed_dp_rank": to.rank_header,
            **_logprobs(parameters),
            **fields,
        }
        body = await body_of("input_ids", request.prompt.token_ids, without_none(rest))
        return HttpRequest(f"{to.endpoint}/generate", headers=common_headers(to, request.request_id), body=body)


def _logprobs(parameters: Mapping[str, Any]) -> dict[str, Any]:
    wanted = parameters.get("logprobs")
    return {} if wanted is None else {"return_logprob": True, "top_logprobs_num": wanted}
