"""vLLM, and what speaks as it does: `/v1/completions` with token ids in and out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kvscout_common.http.http import HttpRequest
from kvscout_common.http.json_scan import write_tokens
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import OPENAI
from kvscout_gateway.values.request import Request

TOKENS_A_TURN = 16_384
"""Tokens of a prompt that are written at once: about a millisecond without the extension, then other tasks run."""
SOURCE_HEADER = "x-kv-cache-source-host-port"
"""Header with the engine to fetch blocks from, for sidecars that speak to engines of other kinds."""
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class VllmAdapter:
    """See `EngineAdapter`."""

    dialect = OPENAI

    async def completion(
        self, to: Decision, request: Request, parameters: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> HttpRequest:
        """See `EngineAdapter`."""
        # Or log probabilities would name tokens by their texts, which are not unique.
        named = {"return_tokens_as_token_ids": True} if "logprobs" in parameters else {}
        rest = without_none({**parameters, **named, "model": to.engine_model, **_STREAMED, **fields})
        return HttpRequest(
            f"{to.endpoint}/v1/completions",
            headers=common_headers(to, request.request_id),
            body=await body_of("prompt", request.prompt.token_ids, rest),
        )


def common_headers(to: Decision, request_id: str) -> list[tuple[str, str]]:
    """Return the headers of a request to an engine of any kind, whatever its body is."""
    headers = [("Content-Type", "application/json"), ("X-Request-Id", request_id)]
    if to.rank_header is not None:
        headers.append(("X-data-parallel-rank", str(to.rank_header)))
    if to.pull is not None:
        headers.append((SOURCE_HEADER, to.pull.address))
    return headers


def pull_fields(to: Decision, request_id: str) -> dict[str, Any]:
    """Return the fields by which vLLM fetches blocks from another engine; none if it had better compute them."""
    if to.pull is None:
        return {}
    source = {"remote_host": to.pull.host, "remote_port": to.pull.port, "kv_request_id": request_id}
    return {"kv_transfer_params": {"remote_kv_source": source}}


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


async def body_of(field: str, token_ids: bytes, rest: Mapping[str, Any]) -> bytes:
    """Return a JSON object of token ids and other fields.

    Args:
        field: The name of the token ids.
        token_ids: u32, four bytes a token.
        rest: At least one field.
    """
    written: list[bytes] = []
    for start in range(0, len(token_ids), 4 * TOKENS_A_TURN):
        if start:
            await asyncio.sleep(0)
        written.append(write_tokens(token_ids[start : start + 4 * TOKENS_A_TURN]))
    return b'{"%s": [%s], %s' % (field.encode(), b",".join(written), json.dumps(rest)[1:].encode())
