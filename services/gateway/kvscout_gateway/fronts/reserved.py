"""Fields and headers that a client may not set: one list for every front. Pure.

Which engines run a request, where they fetch its KV blocks, on which rank, under which internal name: that is decided
here, or by an operator. Engines believe whatever a request says of it. So these fields and headers never leave the
gateway as a client sent them: an address in `kv_transfer_params` would have an engine connect to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RESERVED_FIELDS: Final = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params"),  # vLLM: where blocks and encoder outputs are fetched
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),  # SGLang
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("encoder_urls", "num_items_assigned", "need_wait_for_mm_inputs"),
        *("kv_router_hint", "routing_key", "http_worker_ipc"),
        *("rid", "request_id"),  # of another request, its end would be that one's
    }
)
"""Reserved fields of a body in JSON, or of a form."""
NESTING_FIELDS: Final = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params"})
"""Fields of a body that are objects, or lists of objects, in which engines find further fields."""
PRIORITY: Final = "priority"
"""Priority field of a body: in vLLM lower is earlier, in SGLang higher."""
RESERVED_HEADERS: Final = frozenset(
    {
        *("x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
        *("x-data-parallel-rank", "x-gateway-destination-endpoint", "x-kvscout-pick"),
    }
)
"""Those known by name: a proxy has to remove them, whether it has shown them or not."""
RESERVED_HEADER_PREFIXES: Final = ("x-data-parallel-", "x-gateway-", "x-kvscout-", "x-llm-d-", "x-smg-")
"""Prefixes of the headers by which proxies, sidecars and engines send a request somewhere."""
_DEPTH: Final = 4
"""Depth of nested objects that is searched; what is deeper is removed."""


def is_reserved_header(name: str) -> bool:
    """Return whether a header says where a request goes.

    Args:
        name: In lower case.
    """
    return name in RESERVED_HEADERS or name.startswith(RESERVED_HEADER_PREFIXES)


def changes_of(fields: Mapping[str, Any], *, max_priority: int | None) -> dict[str, Any]:
    """Return what has to change in a body so that it says nothing that is not its client's to say.

    Args:
        fields: Of the body.
        max_priority: The largest `priority`, and the negative of the smallest; None = any.

    Returns:
        Values by the names of fields of the body; None = the field goes.
    """
    changes: dict[str, Any] = {}
    for name in fields:
        if name in RESERVED_FIELDS:
            changes[name] = None
        elif name in NESTING_FIELDS:
            cleaned = _cleaned(fields[name], _DEPTH)
            if cleaned != fields[name]:
                changes[name] = cleaned
    if max_priority is not None and PRIORITY in fields:
        priority = fields[PRIORITY]
        is_number = isinstance(priority, int) and not isinstance(priority, bool)
        # An engine without priorities refuses any but 0, which is what it takes for none.
        changes[PRIORITY] = (max(-max_priority, min(priority, max_priority)) or None) if is_number else None
    return changes


def reserved_in(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that `changes_of` would change, sorted; `priority` is not among them."""
    return sorted(changes_of(fields, max_priority=None))


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, list):
        return [_cleaned(one, depth - 1) for one in value] if depth else None
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in RESERVED_FIELDS} if depth else {}
        return {name: _cleaned(one, depth - 1) if name in NESTING_FIELDS else one for name, one in kept.items()}
    return value
