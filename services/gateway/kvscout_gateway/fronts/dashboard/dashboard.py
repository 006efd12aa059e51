"""Dashboard: observes the installation while somebody watches, and publishes to viewers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvscout.v1 import workers_pb2
from kvscout_common import __version__
from kvscout_common.doctor.diagnosis import diagnose
from kvscout_common.doctor.gathering import Decisions, Gathering
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import Service, ServiceKind
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.worker_rpcs import WorkerRpcs
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.dashboard import document
from kvscout_gateway.fronts.dashboard.history import SPAN_SECONDS, History, Totals
from kvscout_gateway.fronts.dashboard.ladder_rows import ladders_document
from kvscout_gateway.fronts.dashboard.prefixes import heat_map
from kvscout_gateway.fronts.dashboard.savings import Possible
from kvscout_gateway.fronts.dashboard.timelines import timelines
from kvscout_gateway.fronts.dashboard.viewers import Viewers
from kvscout_gateway.fronts.grpc.ladder import ladders_of
from kvscout_gateway.fronts.grpc.status import gateway_status
from kvscout_gateway.request.failures import FailureFilter
from kvscout_gateway.request.recent import RecentRequests

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

log = logging.getLogger("kvscout.gateway")
_defects = RateLimitedLog(log, period_seconds=60.0)

LOOK_SECONDS: Final = 2.0
CACHES_LOOKS: Final = 5
"""Looks between two at ladders and prefixes, which change slowly."""
LADDER_WINDOWS: Final = (300, 3_600)
"""Seconds."""
EXAMINE_SECONDS: Final = 15.0
"""Between two examinations: each asks every engine."""
REST: Final = 4.0
"""Pause after a look, as a multiple of its duration; never longer than an examination."""
DECISIONS: Final = 20
FAILURES: Final = 50
"""Maximum number per kind: failed, and answered although something failed."""


class Dashboard:
    """Dashboard of the installation, served by one of its gateways."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        look_seconds: float = LOOK_SECONDS,
        examine_seconds: float = EXAMINE_SECONDS,
        span_seconds: float = SPAN_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Show nothing yet.

        Args:
            gateway: The one that is queried first.
            look_seconds: Between two looks.
            examine_seconds: Between two examinations by doctor.
            span_seconds: Of the history.
            wall_clock: Seconds since the Unix epoch.
        """
        self._gateway = gateway
        self._gathering = Gathering(gateway.config.security)
        self._look_seconds = look_seconds
        self._examine_seconds = examine_seconds
        self._span_seconds = span_seconds
        self._clock = wall_clock
        self._workers = WorkerRpcs(gateway.registry)
        self._history = History(self._totals())
        self._possible = Possible()
        self.viewers = Viewers()
        gateway.on_drain.append(self.viewers.close)

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name."""
        return {"dashboard history": self._sample, "dashboard": self._show}

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._span_seconds)
            self._history.add(self._totals())
            if self.viewers.count:
                self._publish_history()

    async def _show(self) -> None:
        while True:
            await self.viewers.watched.wait()
            try:
                async with self._gathering.decisions(kept=DECISIONS, explain=True) as decisions:
                    await self._show_while_watched(decisions)
            except Exception as error:
                # A page that shows nothing harms nobody; a gateway that ends with it would.
                _defects.warning("dashboard", "the dashboard restarts after an error: %r", error, error=error)
                await asyncio.sleep(self._look_seconds)
            self.viewers.forget()

    async def _show_while_watched(self, decisions: Decisions) -> None:
        self._publish_history()
        async with asyncio.TaskGroup() as group:
            looks = (self._look(decisions), self._look_at_caches(), self._examine())
            tasks = [group.create_task(look) for look in looks]
            await self.viewers.unwatched.wait()
            for task in tasks:
                task.cancel()

    async def _look(self, decisions: Decisions) -> None:
        before: Moment | None = None
        shown, ended = 0, -1
        """Number of the last failure that was published, and of the requests that had ended by then."""
        while True:
            began = time.monotonic()
            now = await self._gathering.look((), known=[await self._gateway_service()])
            decisions.follow(now.snapshot)
            self._possible.follow(decisions.last)
            self.viewers.publish("state", self._state(now, before, decisions))
            if self._gateway.failure_log.number != shown:
                shown = self._gateway.failure_log.number
                self._publish_failures()
            if self._recent.ended != ended:
                ended = self._recent.ended
                self.viewers.publish("requests", timelines(self._recent))
            before = now
            took = time.monotonic() - began
            await asyncio.sleep(min(max(self._look_seconds, REST * took), self._examine_seconds))

    async def _look_at_caches(self) -> None:
        context, catalog = self._gateway.exchanges.context, self._gateway.catalog
        while True:
            found = {
                window: ladders_document(ladders_of(context.ladders, catalog, ALL_TENANTS, "", window, by_class=True))
                for window in LADDER_WINDOWS
            }
            self.viewers.publish("ladders", {"on": context.ladders is not None, "windows": found})
            self.viewers.publish("prefixes", await heat_map(self._recent.prompts, self._gateway.indexer))
            await asyncio.sleep(min(CACHES_LOOKS * self._look_seconds, self._examine_seconds))

    async def _examine(self) -> None:
        while True:
            await self._gateway.health_checks.check_all(ALL_TENANTS)
            snapshot = await self._gathering.snapshot((), known=[await self._gateway_service()], engines=True)
            found = document.findings(diagnose(snapshot))
            self.viewers.publish("doctor", {"at": self._clock(), "findings": found})
            await asyncio.sleep(self._examine_seconds)

    def _publish_failures(self) -> None:
        log = self._gateway.failure_log
        found = [log.listed(FailureFilter(answered=answered), FAILURES)[0] for answered in (False, True)]
        self.viewers.publish("failures", document.failures(*found))

    def _publish_history(self) -> None:
        self.viewers.publish("history", list(self._history.points))

    def _state(self, now: Moment, before: Moment | None, decisions: Decisions) -> Any:
        return {
            "at": self._clock(),
            "version": __version__,
            "gateway": self._name,
            "span": self._history.unfinished(self._totals()),
            "possible": self._possible.document(),
            **document.state(now, before, decisions.last),
        }

    @property
    def _recent(self) -> RecentRequests:
        return self._gateway.exchanges.context.recent

    @property
    def _name(self) -> str:
        server = self._gateway.config.server
        # Bound to every address, several gateways would have one name.
        host = socket.gethostname() if server.host in ("", "0.0.0.0", "::") else server.host
        return f"{host}:{self._gateway.port}"

    async def _gateway_service(self) -> Service:
        """Return this gateway with its full status."""
        listed = await self._workers.ListWorkers(workers_pb2.ListWorkersRequest(tenant=ALL_TENANTS), None)
        return Service(
            self._name,
            ServiceKind.GATEWAY,
            serving=not self._gateway.leaving,
            status=gateway_status(self._gateway, ALL_TENANTS, ""),
            workers=tuple(listed.workers),
            clock_offset_seconds=0.0,
        )

    def _totals(self) -> Totals:
        gateway = self._gateway
        seen, metrics, failures = gateway.observations.total, gateway.metrics, gateway.failure_log
        return Totals(
            at=self._clock(),
            requests=gateway.exchanges.requests,
            failed=failures.ours,
            mistaken=failures.callers,
            prompt_tokens=seen.prompt_tokens,
            cached_tokens=seen.cached_tokens,
            ttft=tuple(metrics.ttft.counts),
            itl=tuple(metrics.itl.counts),
        )
