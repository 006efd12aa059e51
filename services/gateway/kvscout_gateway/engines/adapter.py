"""Headers that every kind of engine is sent."""

from __future__ import annotations

from kvscout_gateway.values.placement import Placement


def common_headers(to: Placement, request_id: str) -> list[tuple[str, str]]:
    """Return the headers of a request to an engine, whatever its body is."""
    headers = [("Content-Type", "application/json"), ("X-Request-Id", request_id)]
    if to.rank_header is not None:
        headers.append(("X-data-parallel-rank", str(to.rank_header)))
    return headers
