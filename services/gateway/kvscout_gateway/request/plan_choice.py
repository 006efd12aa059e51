"""Which plan a request gets: that which the registered workers of its model allow, at this moment."""

from __future__ import annotations

from kvscout_common.errors import InvalidArgument
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import EngineKind, Role, WorkerSpec
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.request.disaggregated import Disaggregated
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.plan import Aggregated, Handover, Plan
from kvscout_gateway.request.sglang_handover import SglangHandover
from kvscout_gateway.request.vllm_handover import VllmHandover
from kvscout_gateway.values.request import Request


class PlanChoice:
    """Prefill and decode are apart for a model from its first decode worker on, until the last one is gone.

    Without a prefill worker the same plan says who else can compute the prompt.
    """

    def __init__(
        self, catalog: Catalog, metrics: GatewayMetrics, warnings: RateLimitedLog, *, conditional: bool
    ) -> None:
        """Choose plans.

        Args:
            catalog: The registered workers.
            metrics: Counts the paths that requests took.
            warnings: Of engines that hand nothing over.
            conditional: See `Disaggregated`.
        """
        self._catalog = catalog
        self._vllm, self._sglang = VllmHandover(warnings), SglangHandover()
        self._aggregated = Aggregated()
        self._disaggregated = Disaggregated(catalog, metrics, self._handover, conditional=conditional)

    def plan_of(self, request: Request) -> Plan:
        """Return the plan for a request.

        Raises:
            InvalidArgument: It is pinned to a worker that only computes prompts for others.
        """
        pinned = self._catalog.tenant(request.tenant).specs.get(request.pinned)
        if pinned is not None and pinned.role is Role.PREFILL:
            raise InvalidArgument(f"{request.pinned!r} is a prefill worker: it answers nobody", field="worker_id")
        if pinned is not None:
            return self._disaggregated if pinned.role is Role.DECODE else self._aggregated
        return self._disaggregated if Role.DECODE in self._catalog.serving(request).routable_roles else self._aggregated

    def _handover(self, decode: WorkerSpec | None) -> Handover:
        return self._sglang if decode is not None and decode.engine is EngineKind.SGLANG else self._vllm
