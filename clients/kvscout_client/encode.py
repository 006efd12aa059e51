"""Arguments of calls → protobuf."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kvscout.v1 import gateway_pb2, types_pb2
from kvscout_client.tokens import Tokens, token_list
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import MmItem

WithTokens = TypeVar(
    "WithTokens",
    gateway_pb2.RouteRequest,
    gateway_pb2.GenerateRequest,
    gateway_pb2.GatewayGetPotentialLoadsRequest,
)


def mm_items(items: Iterable[MmItem]) -> list[types_pb2.MultimodalItem]:
    """Return multimodal items as protobuf."""
    return [types_pb2.MultimodalItem(id=item.id, offset=item.offset, length=item.length) for item in items]


def hashes(block_hashes: Iterable[int]) -> list[int]:
    """Return block hashes as a list.

    Raises:
        InvalidArgument: One is no u64.
    """
    listed = list(block_hashes)
    try:
        if all(0 <= one < 1 << 64 for one in listed):
            return listed
    except TypeError:
        pass  # not numbers
    raise InvalidArgument("must be integers from 0 to 2^64 − 1", field="block_hashes")


def engine_json(fields: Mapping[str, Any]) -> str:
    """Return fields of the engine's own request as JSON.

    Raises:
        InvalidArgument: A value has no JSON form.
    """
    try:
        return json.dumps(dict(fields), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"must be values of JSON: {error}", field="engine_fields") from error


def filled(request: WithTokens, token_ids: Tokens) -> WithTokens:
    """Add the tokens of a prompt to a request, and return it.

    Raises:
        InvalidArgument: They are no u32 token ids.
    """
    try:
        request.token_ids.extend(token_list(token_ids))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"must be integers from 0 to 2^32 − 1: {error}", field="token_ids") from error
    return request
