"""/v1/models: the models and adapters of a tenant's workers, each in the words of an engine that serves it."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterable
from typing import Any, Final

from kvscout_common.errors import NotFound
from kvscout_common.http.http import HttpCall, HttpFailed, HttpRequest
from kvscout_common.http.json_scan import load_json
from kvscout_common.known_names import or_known
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.fronts.access import Caller
from kvscout_gateway.fronts.body import respond_json
from kvscout_gateway.fronts.client_paths import model_named
from kvscout_gateway.members.catalog import Catalog, TenantView

ASK_SECONDS: Final = 1.0
KEPT_SECONDS: Final = 30.0
"""Seconds for which an engine's answer is cached."""
MAX_ASKED: Final = 32
"""Engines at once; further models get a card of our own."""
MAX_PAGE_BYTES: Final = 1024 * 1024
MAX_PAGE_VALUES: Final = 20_000
MAX_TENANTS: Final = 256


class Models:
    """Lists the models that are served."""

    def __init__(self, catalog: Catalog, engines: Engines) -> None:
        self._catalog = catalog
        self._engines = engines
        self._kept: dict[str, tuple[float, TenantView, list[dict[str, Any]]]] = {}

    async def answer(self, call: HttpCall, caller: Caller) -> None:
        """Answer with all models, or with the one that the path names."""
        cards, name = await self.cards(caller.tenant), model_named(call.path)
        if not name:
            await respond_json(call, {"object": "list", "data": cards})
            return
        found = next((card for card in cards if card["id"] == name), None)
        if found is None:
            known = or_known(name, (card["id"] for card in cards))
            raise NotFound(f"the model {name!r} does not exist{known}", field="model")
        await respond_json(call, found)

    async def cards(self, tenant: str) -> list[dict[str, Any]]:
        """Return one card for each model and adapter, base models first."""
        view, now = self._catalog.tenant(tenant), time.monotonic()
        kept = self._kept.get(tenant)
        if kept is not None and kept[1] is view and now < kept[0]:
            return kept[2]
        chosen = [random.choice(able) for serving in view.models.values() if (able := _reachable(serving.specs))]
        reported: dict[str, dict[str, Any]] = {}
        for cards in await asyncio.gather(*(self._ask(spec) for spec in chosen[:MAX_ASKED])):
            reported.update((card["id"], card) for card in cards)
        names: list[tuple[str, str | None]] = [(name, None) for name in sorted(view.models)]
        names += [(name, base) for name, base in sorted(view.base_of.items()) if name not in view.models]
        cards = [reported.get(name) or _card(name, base) for name, base in names]
        if len(self._kept) >= MAX_TENANTS:
            self._kept.clear()
        self._kept[tenant] = (now + KEPT_SECONDS, view, cards)
        return cards

    async def _ask(self, spec: WorkerSpec) -> list[dict[str, Any]]:
        engines = self._engines
        headers = (("X-Request-Id", f"models-{uuid.uuid4().hex}"), *engines.own_headers())
        request = HttpRequest(f"{spec.http_endpoint}/v1/models", method="GET", headers=headers)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await engines.client.send(request, connect_seconds=engines.timeouts.connect_seconds)
                try:
                    page = await answer.read(MAX_PAGE_BYTES)
                finally:
                    answer.abort()
            found = load_json(page, max_values=MAX_PAGE_VALUES)["data"] if answer.status == 200 else []
            return [card for card in found if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (HttpFailed, TimeoutError, ValueError, TypeError, LookupError):
            return []  # our own words will do


def _reachable(specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
    return [spec for spec in specs if spec.http_endpoint]


def _card(name: str, base: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvscout", "root": base or name, "parent": base}
