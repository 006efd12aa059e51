"""Routes that no engine has: faults on demand, and the true contents of the caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.engine.rank import Rank
from kvscout_mocker.faults import SHARES, Faults, crash, stall
from kvscout_mocker.server import json_body

ANSWER_SECONDS = 0.05
"""Between the answer to a request for a fault and the fault: long enough for the answer to go out."""


MAX_SLOWDOWN = 1_000.0


class FaultRoutes:
    """`/mock/…`.

    Args:
        ranks: In order of their number.
        faults: Faults of the process.
        restart: Replaces the process; its argument says if the new one has a replay socket.
    """

    def __init__(self, ranks: Sequence[Rank], faults: Faults, restart: Callable[[bool], None]) -> None:
        self._ranks = ranks
        self._faults = faults
        self._restart = restart

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes([web.get("/mock/kv_blocks", self.kv_blocks), web.post("/mock/faults", self.faults)])

    async def kv_blocks(self, _: web.Request) -> web.StreamResponse:
        """Return physical copies of each cached block by its hash, of each rank, and the number of its last batch."""
        return web.json_response(
            {
                str(rank.dp_rank): {
                    "last_seq": rank.publisher.last_seq,
                    "unpublished": rank.engine.blocks.pending_events,
                    "blocks": {str(block): copies for block, copies in rank.engine.blocks.cached_copies().items()},
                }
                for rank in self._ranks
            }
        )

    async def faults(self, http: web.Request) -> web.StreamResponse:
        """Cause the faults that the body names, after the answer: `drop_events`, `duplicate_events`, `mute_requests`,
        `fail_requests` (shares), `slowdown` (of each step, a factor), `empty_cache` (without an event, if no request
        holds a block), `stall_seconds`, `crash`, `restart` and with it `replay` (false: no replay socket)."""
        wanted = _faults(await json_body(http))
        self._faults.set_shares(**{name: wanted[name] for name in SHARES if name in wanted})
        for rank in self._ranks:
            rank.slowdown = _slowdown(wanted.get("slowdown", rank.slowdown))
            if wanted.get("empty_cache"):
                rank.engine.reset_prefix_cache(announced=False)
        loop = asyncio.get_running_loop()
        if wanted.get("crash"):
            loop.call_later(ANSWER_SECONDS, crash)
        elif wanted.get("restart"):
            loop.call_later(ANSWER_SECONDS, self._restart, wanted.get("replay", True))
        elif wanted.get("stall_seconds"):
            loop.call_later(ANSWER_SECONDS, stall, wanted["stall_seconds"])
        return web.json_response({"dropped": self._faults.dropped, "duplicated": self._faults.duplicated})


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(SHARES, (int, float)),
    "slowdown": (int, float),
    "stall_seconds": (int, float),
    "empty_cache": bool,
    "crash": bool,
    "restart": bool,
    "replay": bool,
}


def _slowdown(factor: float) -> float:
    if not 1 <= factor <= MAX_SLOWDOWN:
        raise InvalidArgument(f"must be between 1 and {MAX_SLOWDOWN:g}", field="slowdown")
    return factor


def _faults(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise InvalidArgument("is not an object", field="body")
    for name, value in body.items():
        kind = _KINDS.get(name)
        if kind is None:
            raise InvalidArgument(f"unknown, known are {', '.join(_KINDS)}", field=str(name))
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise InvalidArgument(f"{value!r} is not a valid value", field=name)
    return body
