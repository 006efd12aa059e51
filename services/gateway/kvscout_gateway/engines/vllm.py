"""vLLM, and what speaks as it does: `/v1/completions` with token ids in and out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvscout_common.transport.http import Dialect, HttpRequest
from kvscout_gateway.engines.adapter import Address, Changes, Usage

TOKENS_A_TURN = 16_384
"""Of a prompt, written at a time: about a millisecond, after which others have their turn."""
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


class VllmAdapter:
    """See `EngineAdapter`."""

    dialect = Dialect.OPENAI
    account = "usage"

    def __init__(self, own_headers: Callable[[], Iterable[tuple[str, str]]] = tuple) -> None:
        """Speaks to engines of one key.

        Args:
            own_headers: What each request carries besides, such as that key.
        """
        self._own_headers = own_headers

    def headers(self, to: Address) -> list[tuple[str, str]]:
        """See `EngineAdapter`."""
        headers = [("Content-Type", "application/json"), ("X-Request-Id", to.request_id), *self._own_headers()]
        if to.dp_rank is not None:
            headers.append(("X-data-parallel-rank", str(to.dp_rank)))
        return headers

    async def completion(
        self, to: Address, token_ids: memoryview, parameters: Mapping[str, Any], changes: Changes
    ) -> HttpRequest:
        """See `EngineAdapter`."""
        rest = without_none({**parameters, "model": to.model, **_STREAMED, **changes})
        return HttpRequest(
            f"{to.endpoint}/v1/completions", headers=self.headers(to), body=await body_of("prompt", token_ids, rest)
        )

    def usage(self, account: Mapping[str, Any]) -> Usage | None:
        """See `EngineAdapter`."""
        prompt = account.get("prompt_tokens")
        details = account.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return usage_of(prompt, cached)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that there are."""
    return {name: value for name, value in fields.items() if value is not None}


def usage_of(prompt_tokens: object, cached_tokens: object) -> Usage | None:
    """What an engine says, if it is numbers."""
    if not isinstance(prompt_tokens, int):
        return None
    return Usage(prompt_tokens, cached_tokens if isinstance(cached_tokens, int) else None)


async def body_of(field: str, token_ids: memoryview, rest: Mapping[str, Any]) -> bytes:
    """A JSON object of token ids and other fields.

    Args:
        field: The name of the token ids.
        token_ids: u32 each.
        rest: At least one field.
    """
    written: list[str] = []
    for start in range(0, len(token_ids), TOKENS_A_TURN):
        if start:
            await asyncio.sleep(0)
        # A list of integers prints as JSON, and several times as fast as json.dumps writes it.
        written.append(str(token_ids[start : start + TOKENS_A_TURN].tolist())[1:-1])
    return f'{{"{field}": [{", ".join(written)}], {json.dumps(rest)[1:]}'.encode()
