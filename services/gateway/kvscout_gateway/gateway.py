"""The gateway's parts, put together: what the servicer calls and what runs beside it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Gauge

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import FailedPrecondition
from kvscout_common.http.byte_budget import make_budget
from kvscout_common.http.factory import connect
from kvscout_common.http.http import Charge
from kvscout_common.identity.pem import MAX_PEM_BYTES
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.followed_file import read_file
from kvscout_common.registry.backends import Backends
from kvscout_common.registry.pod_selection import POOL
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.rpc.service_info import service_info
from kvscout_common.worker import ALL_TENANTS, EngineKind, WorkerSpec
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.engines.engine_key import EngineKey
from kvscout_gateway.engines.faults import EngineFailed
from kvscout_gateway.engines.health import WorkerHealth
from kvscout_gateway.engines.health_checks import HealthChecks
from kvscout_gateway.engines.judge import Judge
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.engines.sglang import SglangAdapter
from kvscout_gateway.engines.vllm import VllmAdapter
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.refusals import status_of
from kvscout_gateway.fronts.sessions import Sessions
from kvscout_gateway.fronts.shadow.report import ShadowReport
from kvscout_gateway.fronts.stored_responses import StoredResponses
from kvscout_gateway.fronts.terms import Terms
from kvscout_gateway.ladder.ladders import Ladders
from kvscout_gateway.ladder.metrics import LadderMetrics
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.members.membership import Membership
from kvscout_gateway.members.registration import Registration
from kvscout_gateway.request.attempt import AttemptContext
from kvscout_gateway.request.exchange import Exchanges
from kvscout_gateway.request.failures import FailureLog
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.plan_choice import PlanChoice
from kvscout_gateway.request.recent import RecentRequests
from kvscout_gateway.request.recording import Recording
from kvscout_gateway.request.routing import RoutingFlow
from kvscout_gateway.tokens.sources import Tokens
from kvscout_gateway.upstreams.indexer.remote import RemoteIndexer
from kvscout_gateway.upstreams.interfaces import Indexer, Scheduler
from kvscout_gateway.upstreams.scheduler.remote import RemoteScheduler
from kvscout_gateway.values.booking import draw_attempt
from kvscout_gateway.values.decision import Decision

if TYPE_CHECKING:
    from kvscout_gateway.fronts.kubernetes_objectives import KubernetesObjectives

log = logging.getLogger("kvscout.gateway")

CLOSE_SECONDS = 2.0
"""Longest wait at the end for what was cancelled to be freed."""


class LocalIndexer(Indexer, Protocol):
    """An indexer of this process."""

    def status(self) -> gateway_pb2.HelperStatus:
        """Return its state."""


class LocalScheduler(Scheduler, Protocol):
    """A scheduler of this process."""

    def status(self) -> gateway_pb2.HelperStatus:
        """Return its state."""


def cluster_objectives(config: GatewayConfig) -> KubernetesObjectives | None:
    """Return what follows the objectives of the selected InferencePools; None = no pool is selected.

    Raises:
        ConfigError: A selection is wrong, or there is no way to the Kubernetes API.
    """
    pools = [text for text in config.server.workers_k8s if text.strip().startswith(POOL)]
    if not pools:
        return None
    # Imported where it is used, as the sources of workers are.
    from kvscout_gateway.fronts.kubernetes_objectives import KubernetesObjectives

    return KubernetesObjectives(pools, config.server.kubeconfig)


class Gateway:
    """One gateway: stateless but for what is in flight and what was seen of the workers.

    Args:
        config: Checked.
        metrics: Registry of its metrics.
        backends: The workers, and NATS; their owner runs and closes them.
        indexer: Indexer of this process; None = those of the configuration, behind rpcs.
        scheduler: Scheduler of this process; None = those of the configuration, behind rpcs.
    """

    body_copies = 4
    """Bytes of memory that each byte of a body over HTTP counts as: as it came, as text, what it says, as it leaves."""
    port = 0
    """Port of its gRPC server; 0 = not bound yet."""

    def __init__(
        self,
        config: GatewayConfig,
        metrics: CollectorRegistry,
        backends: Backends,
        *,
        indexer: LocalIndexer | None = None,
        scheduler: LocalScheduler | None = None,
    ) -> None:
        self.config = config
        self.started = time.monotonic()
        self.registry, self.backends = backends.registry, backends
        self.catalog = Catalog(self.registry)
        self.registration = Registration(self.registry, shared=backends.link is not None)
        self.metrics = GatewayMetrics(metrics, self.catalog.serves)
        self.observations = Observations(self.catalog.model_of)
        self._remote: list[RemoteIndexer | RemoteScheduler] = []
        """Upstreams behind rpcs."""
        self._local = [upstream for upstream in (indexer, scheduler) if upstream is not None]
        if indexer is None:
            remote_indexer = RemoteIndexer(
                config.indexers,
                config.security,
                timeout_seconds=config.indexer_timeout_seconds,
                served=self.observations.eventful,
                reports=self.observations.reports_cached_tokens,
                caches=self.observations.caches,
                resync=self.registration.resync,
            )
            self._remote.append(remote_indexer)
        if scheduler is None:
            remote_scheduler = RemoteScheduler(
                config.schedulers,
                config.security,
                timeout_seconds=config.scheduler_timeout_seconds,
                queue_wait_seconds=config.queue_wait_seconds,
                resync=self.registration.resync,
            )
            self._remote.append(remote_scheduler)
        self.indexer: Indexer = remote_indexer if indexer is None else indexer
        self.scheduler: Scheduler = remote_scheduler if scheduler is None else scheduler
        self.membership = Membership(self._remote, self.registration)
        self.routing = RoutingFlow(
            self.catalog, self.indexer, self.scheduler, self.metrics, token_seconds=self._token_seconds
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
        self.health = WorkerHealth()
        self.health_checks = HealthChecks(
            self.engines.client,
            self.health,
            self._specs,
            self.observations,
            period_seconds=config.health_check_seconds,
        )
        self.judge = Judge(self.health, self.observations, self.indexer.no_events, self._specs, self.catalog.spec_of)
        self._warnings = RateLimitedLog(log, period_seconds=10.0)
        vllm = VllmAdapter()
        plans = PlanChoice(
            self.catalog, self.metrics, RateLimitedLog(log, period_seconds=10.0), conditional=config.conditional_disagg
        )
        self.failure_log = FailureLog(status_of)
        self.exchanges = Exchanges(
            AttemptContext(
                routing=self.routing,
                scheduler=self.scheduler,
                engines=self.engines,
                adapters={EngineKind.VLLM: vllm, EngineKind.MOCK: vllm, EngineKind.SGLANG: SglangAdapter()},
                observations=self.observations,
                health=self.health,
                metrics=self.metrics,
                recording=Recording(time.perf_counter),
                recent=RecentRequests(time.perf_counter),
                ladders=Ladders(self.catalog, self.observations.reports) if config.ladder else None,
            ),
            plan=plans.plan_of,
            report_failure=self._report_failure,
            failure_log=self.failure_log,
            draw_attempt=draw_attempt,
            migration_limit=config.migration_limit,
            max_in_flight=config.max_in_flight,
            lease_seconds=config.lease_seconds,
            limits=self.registry.limits,
        )
        self.budget = make_budget(config.server.request_memory_bytes)
        """Bytes of requests that are not passed on yet."""
        self.shadow_report = ShadowReport()
        """Empty unless this gateway shadows."""
        self.leaving = False
        """It is going to stop; requests may still be taken."""
        self.on_drain: list[Callable[[], object]] = []
        """Called when nothing new is taken any more, by whom something would wait for longer than it has to."""
        self.tokens = Tokens(
            self.catalog,
            self.engines,
            self.engine_key,
            metrics,
            reachable=self.health.reachable,
            tokenizers=config.tokenizers,
            finds_tokenizers=config.finds_tokenizers,
            renderers=config.renderers,
            cache_bytes=config.tokenizer_cache_bytes,
            timeout_seconds=config.tokenize_timeout_seconds,
            connect_seconds=config.timeouts.connect_seconds,
        )
        sessions = Sessions(without=config.no_session_sources, affinity=config.session_affinity)
        self.cluster_objectives = cluster_objectives(config)
        followed = self.cluster_objectives.objectives if self.cluster_objectives is not None else {}
        self.front_context = FrontContext(
            self.catalog,
            self.tokens,
            self.exchanges,
            config.max_prompt_tokens,
            config.client_paths,
            sessions,
            StoredResponses(self.catalog, self.engines, sessions),
            Terms(self.catalog, ChainMap(dict(config.objectives), followed)),
            config.response_headers,
            self.charge,
        )
        for collector in (
            self.observations,
            self.judge,
            self.failure_log,
            LadderMetrics(self.exchanges.context.ladders),
            *self._remote,
        ):
            metrics.register(collector)
        in_flight = Gauge("kvscout_requests_in_flight", "Requests running", registry=metrics)
        in_flight.set_function(lambda: self.exchanges.in_flight)
        if config.shadow is not None:
            metrics.register(self.shadow_report)
        self.registry.listen(self)

    def charge(self, tenant: str) -> Charge:
        """Return the charge for a request's body and its copies; nothing yet."""
        return self.budget.charge(tenant, self.body_copies)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Do nothing: observations are made when first needed."""

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Do nothing: observations of the worker stay true."""

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Forget the observations of a worker."""
        self.observations.forget(spec.tenant, spec.worker_id)
        self.health.forget(spec.tenant, spec.worker_id)

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return the tasks that run beside the server, by name."""
        return {
            "membership": self.membership.run,
            "speeds": self.judge.run,
            **({"health-checks": self.health_checks.run} if self.config.health_check_seconds else {}),
            **{name: task for upstream in self._remote for name, task in upstream.tasks().items()},
            **({"objectives": self.cluster_objectives.run} if self.cluster_objectives is not None else {}),
            **({"engine-key": self.engine_key.file.watch} if self.engine_key.file is not None else {}),
        }

    def bound(self, port: int) -> None:
        """Take the port that its gRPC server has got."""
        self.port = port

    async def warm(self) -> None:
        """Wait until workers and upstreams are known, in bounded time."""
        await self.backends.warm()
        await self.membership.read.wait()  # a lookup takes LOOKUP_SECONDS at most

    def require_deciding(self) -> None:
        """Raise unless this gateway decides where requests run.

        Raises:
            FailedPrecondition: It shadows another balancer.
        """
        if self.config.shadow is not None:
            raise FailedPrecondition(
                f"with --shadow {self.config.shadow.balancer} decides: only what comes over HTTP is passed on to it"
            )

    def upstream_statuses(self) -> list[gateway_pb2.HelperStatus]:
        """Return the state of every indexer and scheduler."""
        return [*(upstream.status() for upstream in self._local), *self.membership.statuses()]

    def leave(self) -> None:
        """Report from now on that it is going to stop."""
        self.leaving = True

    async def drain(self) -> None:
        """Refuse new requests; wait until none is in flight."""
        self.leave()
        self.exchanges.draining = True
        for let_go in self.on_drain:
            let_go()
        await self.exchanges.idle.wait()

    async def close(self) -> None:
        """Deliver what can still be delivered, and close every connection."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.drain()
        except TimeoutError:
            log.warning("stopped with requests that were not freed at any scheduler")
        await self.tokens.close()
        await self.engines.close()
        for upstream in self._remote:
            await upstream.close()

    def info(self) -> types_pb2.ServiceInfo:
        """Return what this process is, with warnings for operators."""
        return service_info(
            self.started,
            draining=self.leaving,
            warnings=[
                *self.registration.warnings(),
                *self.membership.warnings(),
                *self.indexer.warnings(),
                *self.health.warnings(),
                *self.backends.warnings(),
                *self.tokens.warnings(),
                *(self.cluster_objectives.warnings() if self.cluster_objectives is not None else ()),
            ],
            nats=self.backends.nats(),
        )

    def _token_seconds(self, tenant: str, model: str) -> float:
        """Return the time in which a prompt token is computed; 0 = unknown."""
        ladders = self.exchanges.context.ladders
        return ladders.seconds_per_token(tenant, model) if ladders is not None else 0.0

    def _specs(self) -> list[WorkerSpec]:
        return [entry.spec for entry in self.registry.entries(ALL_TENANTS)]

    def _report_failure(self, tenant: str, decision: Decision, error: EngineFailed, ejection_seconds: float) -> None:
        """Log a worker's failure, and report an ejection to the other gateways."""
        self.health_checks.failed(tenant, decision.worker.worker_id)
        who = f"{decision.worker.worker_id}/{decision.worker.dp_rank}"
        self._warnings.warning((tenant, decision.worker), "worker %s failed: %s", who, error)
        if not ejection_seconds:
            return
        log.warning("worker %s is in cool-down for %g s", who, ejection_seconds)
        self.scheduler.report_failure(
            scheduler_pb2.ReportFailureRequest(
                tenant=tenant,
                worker=rank_to_proto(decision.worker),
                reason=str(error),
                cooldown_seconds=ejection_seconds,
            )
        )
