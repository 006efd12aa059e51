"""The gateway's parts, put together: what the servicer calls and what runs beside it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import FailedPrecondition, KvscoutError
from kvscout_common.http.byte_budget import make_budget
from kvscout_common.http.factory import connect
from kvscout_common.http.http import Charge
from kvscout_common.identity.pem import MAX_PEM_BYTES
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.followed_file import read_file
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.registry import Registry
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.rpc.service_info import about, service_info, shown
from kvscout_common.worker import ALL_TENANTS, EngineKind, WorkerSpec
from kvscout_gateway.catalog import Catalog
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.engines.engine_key import EngineKey
from kvscout_gateway.engines.faults import EngineFailed
from kvscout_gateway.engines.health import WorkerHealth
from kvscout_gateway.engines.health_checks import HealthChecks
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.engines.sglang import SglangAdapter
from kvscout_gateway.engines.timeouts import Liveness
from kvscout_gateway.engines.vllm import VllmAdapter
from kvscout_gateway.fronts.shadow.report import ShadowReport
from kvscout_gateway.members.fanout import Fanout
from kvscout_gateway.members.membership import Membership
from kvscout_gateway.members.registration import Registration, problem
from kvscout_gateway.metrics import (
    BlindCollector,
    GatewayMetrics,
    ObservationCollector,
    ReportCollector,
    ShadowCollector,
    StreamCollector,
)
from kvscout_gateway.request.attempt import AttemptContext
from kvscout_gateway.request.exchange import MAX_TRIES, Exchanges
from kvscout_gateway.request.plan_choice import PlanChoice
from kvscout_gateway.request.routing import RoutingFlow
from kvscout_gateway.tokens.sources import Tokens
from kvscout_gateway.upstreams.failover import Failover, Member
from kvscout_gateway.upstreams.indexer.check import IndexerCheck
from kvscout_gateway.upstreams.indexer.indexers import Indexers
from kvscout_gateway.upstreams.indexer.overlaps import OverlapQuery
from kvscout_gateway.upstreams.indexer.reporter import Reporter
from kvscout_gateway.upstreams.scheduler.attachment import Attachment
from kvscout_gateway.upstreams.scheduler.booking import Schedulers
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink
from kvscout_gateway.upstreams.scheduler.placing import Placing
from kvscout_gateway.values.placement import Placement

log = logging.getLogger("kvscout.gateway")
_SYSTEM_RANDOM = random.SystemRandom()

SETTINGS_SECONDS = 5.0
"""How often the scheduler's settings are read."""
CLOSE_SECONDS = 2.0
"""Longest wait at the end for what was cancelled to be freed."""
MAX_REPORTS = 256
"""Reports of workers that are left out, under way; more are dropped: this gateway leaves them out all the same."""


class Gateway:
    """One gateway: stateless but for what is in flight and what was seen of the workers."""

    body_copies = 4
    """Bytes of memory that each byte of a body over HTTP counts as: as it came, as text, what it says, as it leaves."""

    def __init__(self, config: GatewayConfig, metrics: CollectorRegistry) -> None:
        self.config = config
        self.started = time.monotonic()
        self.registry = Registry(time.monotonic)
        self.nats = config.nats.link("kvscout-gateway") if config.nats is not None else None
        self.backends = Backends(self.registry, config.server, self.nats)
        self.backends.discover()
        self.catalog = Catalog(self.registry)
        self.metrics = GatewayMetrics(metrics, self.catalog.serves)
        self.indexers = Indexers(config.indexers, config.security)
        self.schedulers: Schedulers = Failover(
            "scheduler", config.schedulers, SchedulerLink, config.security, probe=SchedulerLink.get_status
        )
        self.registration = Registration(self.registry, [], shared=self.nats is not None)
        self.reporter = Reporter(self.indexers, resync=self._resync)
        self.bookings = Bookings(
            self.schedulers,
            self.metrics,
            lease_seconds=config.lease_seconds,
            timeout_seconds=config.scheduler_timeout_seconds,
        )
        self.attachment = Attachment(
            self.schedulers,
            self.bookings,
            timeout_seconds=config.scheduler_timeout_seconds,
            resync=self._resync,
        )
        self.routing = RoutingFlow(
            self.catalog,
            OverlapQuery(self.indexers, timeout_seconds=config.indexer_timeout_seconds, resync=self._resync),
            self.reporter,
            self.schedulers,
            self.metrics,
            placing=Placing(
                self.schedulers,
                self.bookings,
                timeout_seconds=config.scheduler_timeout_seconds,
                queue_wait_seconds=config.queue_wait_seconds,
                resync=self._resync,
                draw_attempt=_draw_attempt,
            ),
            scheduler_timeout_seconds=config.scheduler_timeout_seconds,
        )
        ca = (
            read_file(config.engine_ca, flag="engine_ca", max_bytes=MAX_PEM_BYTES)
            if config.engine_ca is not None
            else None
        )
        self.engine_key = EngineKey(config.engine_key_file)
        self.engines = Engines(
            connect(ca=ca),
            config.timeouts,
            client_write_seconds=config.client_write_seconds,
            own_headers=lambda: self.engine_key.headers,
        )
        self.fanout = Fanout(self.indexers, self.schedulers, timeout_seconds=config.scheduler_timeout_seconds)
        self.observations = Observations(lambda tenant, worker_id: worker_id in self.catalog.tenant(tenant).specs)
        self.health = WorkerHealth()
        self.health_checks = HealthChecks(
            self.engines.client,
            self.health,
            lambda: [entry.spec for entry in self.registry.entries(ALL_TENANTS)],
            self._has_output_within,
            self._lost,
            period_seconds=config.health_check_seconds,
        )
        self.indexer_check = IndexerCheck(self.indexers, self.observations)
        self.membership = Membership(
            self.indexers,
            self.schedulers,
            registration=self.registration,
            reporter=self.reporter,
            check=self.indexer_check,
            attachment=self.attachment,
        )
        self._reports: set[asyncio.Task[None]] = set()
        self._warnings = RateLimitedLog(log, period_seconds=10.0)
        vllm = VllmAdapter()
        plans = PlanChoice(
            self.catalog, self.metrics, RateLimitedLog(log, period_seconds=10.0), conditional=config.conditional_disagg
        )
        self.exchanges = Exchanges(
            AttemptContext(
                routing=self.routing,
                bookings=self.bookings,
                engines=self.engines,
                adapters={EngineKind.VLLM: vllm, EngineKind.MOCK: vllm, EngineKind.SGLANG: SglangAdapter()},
                observations=self.observations,
                health=self.health,
                metrics=self.metrics,
            ),
            plan=plans.plan_of,
            report_failure=self._report_failure,
            draw_attempt=_draw_attempt,
            migration_limit=config.migration_limit,
            max_in_flight=config.max_in_flight,
            lease_seconds=config.lease_seconds,
            limits=self.registry.limits,
        )
        self.budget = make_budget(config.server.request_memory_bytes)
        """Of requests that are not passed on yet."""
        self.shadow_report = ShadowReport()
        """Empty unless this gateway shadows."""
        self.leaving = False
        """It has been told to stop; requests may still be taken."""
        self.on_drain: list[Callable[[], object]] = []
        """Called when nothing new is taken any more, by whom something would wait for longer than it has to."""
        self.tokens = Tokens(self, metrics)
        metrics.register(
            ObservationCollector(self.observations, self.catalog.model_of, lambda: self.exchanges.in_flight)
        )
        metrics.register(ReportCollector(self.reporter))
        metrics.register(StreamCollector(self.schedulers))
        metrics.register(BlindCollector(self.indexer_check))
        if config.shadow is not None:
            metrics.register(ShadowCollector(self.shadow_report))
        self.registry.listen(self)

    def charge(self, tenant: str) -> Charge:
        """What is charged for a request's body and what is made of it here; nothing yet."""
        return self.budget.charge(tenant, self.body_copies)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Nothing: observations are made when first needed."""

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Nothing: what was seen of the worker stays true."""

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Forgets what was seen of it."""
        self.observations.forget(spec.tenant, spec.worker_id)
        self.health.forget(spec.tenant, spec.worker_id)

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What runs beside the server, by name."""
        return {
            **self.backends.tasks,
            **({"nats": self.nats.run} if self.nats is not None else {}),
            "membership": self.membership.run,
            **({"health-checks": self.health_checks.run} if self.config.health_check_seconds else {}),
            "renew": self.bookings.renew,
            "attachment": self.attachment.run,
            "scheduler-settings": self._follow_settings,
            **({"engine-key": self.engine_key.file.watch} if self.engine_key.file is not None else {}),
        }

    async def warm(self) -> None:
        """Waits until workers and helpers have been heard of, in bounded time."""
        await self.backends.warm()
        await self.membership.read.wait()  # a lookup takes LOOKUP_SECONDS at most

    def reachable(self, tenant: str, workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Those of some workers that can be asked something over HTTP, and should be: none that fail or drain."""
        out = self.health.ejected(tenant, lambda: workers)
        return [w for w in workers if w.http_endpoint and not w.draining and w.worker_id not in out]

    def require_deciding(self) -> None:
        """Nothing, where this gateway decides where requests run.

        Raises:
            FailedPrecondition: It shadows another balancer.
        """
        if self.config.shadow is not None:
            raise FailedPrecondition(
                f"with --shadow {self.config.shadow.balancer} decides: only what comes over HTTP is passed on to it"
            )

    def leave(self) -> None:
        """Says from now on that it is going to stop."""
        self.leaving = True

    async def drain(self) -> None:
        """Refuses new requests; waits until none is in flight and every Free is delivered."""
        self.leave()
        self.exchanges.draining = True
        for let_go in self.on_drain:
            let_go()
        await self.exchanges.idle.wait()
        await self.bookings.settle()

    async def close(self) -> None:
        """Delivers what can be delivered still, and closes every connection."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.drain()
                if self._reports:
                    await asyncio.wait(self._reports)
        except TimeoutError:
            log.warning("stopped with requests that no scheduler was told to free")
        await self.tokens.close()
        await self.attachment.close()
        await self.engines.close()
        await self.indexers.close()
        await self.schedulers.close()
        if self.nats is not None:
            await self.nats.close()

    def info(self) -> types_pb2.ServiceInfo:
        """What this process is, with what an operator should know."""
        members = [about(member.name, why) for member in self.registration.members if (why := problem(member))]
        return service_info(
            self.started,
            draining=self.leaving,
            warnings=[
                *members,
                *self.membership.warnings(),
                *self.indexer_check.warnings(),
                *self.health.warnings(),
                *self.backends.warnings(),
                *self.tokens.parity.warnings(),
            ],
            nats=self.backends.nats(),
        )

    def upstream_statuses(self) -> list[gateway_pb2.HelperStatus]:
        """The state of every indexer and scheduler."""
        statuses = [
            gateway_pb2.HelperStatus(
                kind=value_of(gateway_pb2.HelperKind, member.kind),
                address=member.address,
                healthy=not (member.last_error or sync.error),
                last_error=member.last_error or "".join(shown([problem(sync)])),
                calls=member.calls,
                failures=member.failures,
                pending_registrations=sync.pending,
            )
            for member, sync in ((member, self.membership.sync(member)) for member in self.membership.members)
        ]
        # The indexers come first.
        for status, told in zip(statuses, self.reporter.replicas, strict=False):
            if told.member.shard is not None:
                status.shard_index, status.shard_count = told.member.shard.index, told.member.shard.count
            status.decisions_delivered = told.delivered
            status.decisions_lost = told.lost
            status.decisions_waiting = len(told.queue)
            status.decisions_problem = "; ".join(shown(told.problems()))
        for status, scheduler in zip(statuses[len(self.indexers.members) :], self.schedulers.members, strict=True):
            link = scheduler.stub
            status.stream_connected = link.stream is not None
            status.stream_connects = link.connects
            status.stream_operations = link.operations
            status.stream_messages = link.messages
            status.rebooked = link.rebooked
            status.waiting_in_line = link.stream.waiting if link.stream is not None else 0
        return statuses

    def _has_output_within(self, spec: WorkerSpec, seconds: float) -> bool:
        """Whether one of a worker's ranks has put out something in the last so many seconds."""
        since = asyncio.get_running_loop().time() - seconds
        return any(liveness.last_beat() > since for liveness in self._livenesses(spec))

    def _lost(self, spec: WorkerSpec, problem: str, asked_at: float) -> None:
        """A worker does not answer its health checks: nothing waits for it that it has put out nothing for since."""
        livenesses = self._livenesses(spec)
        if all(liveness.last_beat() <= asked_at for liveness in livenesses):
            for liveness in livenesses:
                liveness.lose(problem, asked_at)

    def _livenesses(self, spec: WorkerSpec) -> list[Liveness]:
        seen = (self.observations.by_rank.get((spec.tenant, rank)) for rank in spec.ranks)
        return [one.liveness for one in seen if one is not None]

    def _resync(self, member: Member[Any]) -> None:
        self.membership.resync(member)

    async def _follow_settings(self) -> None:
        """Reads the scheduler's weight: at 0 the indexer need not be asked."""
        while True:
            try:
                status, _ = await self.schedulers.call(
                    lambda stub: stub.GetStatus,
                    types_pb2.GetStatusRequest(tenant="*"),
                    timeout_seconds=self.config.scheduler_timeout_seconds,
                )
                self.routing.overlap_score_weight = status.overlap_score_weight
            except KvscoutError as error:
                log.debug("scheduler settings not read: %s", error)
            await asyncio.sleep(SETTINGS_SECONDS)

    def _report_failure(self, tenant: str, placement: Placement, error: EngineFailed, ejection_seconds: float) -> None:
        """A worker failed; that it is left out for it concerns the other gateways, too."""
        who = f"{placement.worker.worker_id}/{placement.worker.dp_rank}"
        self._warnings.warning((tenant, placement.worker), "worker %s failed: %s", who, error)
        if not ejection_seconds:
            return
        log.warning("worker %s gets no requests for %g s", who, ejection_seconds)
        if len(self._reports) >= MAX_REPORTS:
            return
        request = scheduler_pb2.ReportFailureRequest(
            tenant=tenant,
            worker=rank_to_proto(placement.worker),
            reason=str(error),
            cooldown_seconds=ejection_seconds,
        )
        task = asyncio.get_running_loop().create_task(self._deliver_failure(request))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _deliver_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        try:
            await self.schedulers.call(
                lambda stub: stub.ReportFailure, request, timeout_seconds=self.config.scheduler_timeout_seconds
            )
        except KvscoutError as error:
            log.warning("failure of %s not reported: %s", request.worker.worker_id, error)


def _draw_attempt() -> int:
    return _SYSTEM_RANDOM.randrange(1, 1 << 55) * MAX_TRIES
