"""vLLM, and what speaks as it does: `/v1/completions` with token ids in and out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from kvscout_common.http.http import Dialect, HttpRequest
from kvscout_common.http.token_json import write_tokens
from kvscout_gateway.engines.adapter import Address, Changes, common_headers

TOKENS_A_TURN = 16_384
"""Of a prompt, written at a time: about a millisecond without the extension, after which others have their turn."""
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class VllmAdapter:
    """See `EngineAdapter`."""

    dialect = Dialect.OPENAI

    def headers(self, to: Address) -> list[tuple[str, str]]:
        """See `EngineAdapter`."""
        return common_headers(to)

    async def completion(
        self, to: Address, token_ids: memoryview, parameters: Mapping[str, Any], changes: Changes
    ) -> HttpRequest:
        """See `EngineAdapter`."""
        # Or log probabilities would name tokens by their texts, which are not unique.
        named = {"return_tokens_as_token_ids": True} if "logprobs" in parameters else {}
        rest = without_none({**parameters, **named, "model": to.model, **_STREAMED, **changes})
        return HttpRequest(
            f"{to.endpoint}/v1/completions", headers=self.headers(to), body=await body_of("prompt", token_ids, rest)
        )


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that there are."""
    return {name: value for name, value in fields.items() if value is not None}


async def body_of(field: str, token_ids: memoryview, rest: Mapping[str, Any]) -> bytes:
    """A JSON object of token ids and other fields.

    Args:
        field: The name of the token ids.
        token_ids: u32 each.
        rest: At least one field.
    """
    written: list[bytes] = []
    for start in range(0, len(token_ids), TOKENS_A_TURN):
        if start:
            await asyncio.sleep(0)
        written.append(write_tokens(token_ids[start : start + TOKENS_A_TURN].tobytes()))
    return b'{"%s": [%s], %s' % (field.encode(), b",".join(written), json.dumps(rest)[1:].encode())
