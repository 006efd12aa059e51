"""Bytes that a process keeps of requests that others send: one limit for all of them, and a share for each tenant.

What is charged is given back when its charge is released or collected, so that it lasts as long as the bytes do. The
extension has the same (`ByteBudget`, `ByteCharge`) for what it reads itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.http.http import Charge
from kvscout_common.transport import Transport, chosen

SHARE = 2
"""Divisor of the whole that gives the share of one tenant."""
PROCESS_FULL = (503, "the server holds as many bytes of requests as it may (--request-memory-bytes)")
TENANT_FULL = (429, "the tenant holds its share of the bytes of requests (half of --request-memory-bytes)")


class Budget(Protocol):
    """See the module. Any thread may use it."""

    @property
    def limit(self) -> int:
        """Return the bytes that may be held at once."""

    @property
    def held(self) -> int:
        """Return the bytes that are held now."""

    @property
    def refused(self) -> tuple[int, int]:
        """Charges refused until now: by the limit of the process, by that of a tenant."""

    def charge(self, tenant: str | None = None, copies: int = 1) -> Charge:
        """Return a charge of nothing yet.

        Args:
            tenant: Whose share it counts for; None = nobody's.
            copies: Bytes charged for each byte that comes.
        """


class ReferenceBudget:
    """See `Budget`.

    Args:
        limit: Bytes of all tenants together.
        share: Bytes of each.
    """

    def __init__(self, limit: int, share: int) -> None:
        self.limit = limit
        self._share = share
        # Charges may be collected in any thread, also while this one is in here.
        self._lock = threading.RLock()
        self._tenants: Counter[str] = Counter()
        self._refused = [0, 0]
        self.held = 0

    @property
    def refused(self) -> tuple[int, int]:
        """See `Budget`."""
        return self._refused[0], self._refused[1]

    def charge(self, tenant: str | None = None, copies: int = 1) -> ReferenceCharge:
        """See `Budget`."""
        return ReferenceCharge(self, tenant, copies)

    def take(self, tenant: str | None, amount: int, *, keep: bool) -> tuple[int, str] | None:
        """Charge bytes, if there is room for them.

        Args:
            tenant: See `charge`.
            amount: Bytes.
            keep: False = only look whether there is.
        """
        with self._lock:
            if self.held + amount > self.limit:
                self._refused[0] += 1
                return PROCESS_FULL
            if tenant is not None and self._tenants[tenant] + amount > self._share:
                self._refused[1] += 1
                return TENANT_FULL
            if keep:
                self._add(tenant, amount)
            return None

    def give_back(self, tenant: str | None, amount: int) -> None:
        """Return bytes that are held no more."""
        with self._lock:
            self._add(tenant, -amount)

    def _add(self, tenant: str | None, amount: int) -> None:
        self.held += amount
        if tenant is not None:
            self._tenants[tenant] += amount
            if not self._tenants[tenant]:
                del self._tenants[tenant]


class ReferenceCharge:
    """See `Charge`."""

    def __init__(self, budget: ReferenceBudget, tenant: str | None, copies: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._copies = copies
        self.bytes = 0

    def grow(self, bytes: int, /) -> tuple[int, str] | None:
        """See `Charge`."""
        refusal = self._budget.take(self._tenant, bytes * self._copies, keep=True)
        if refusal is None:
            self.bytes += bytes * self._copies
        return refusal

    def look(self, bytes: int, /) -> tuple[int, str] | None:
        """See `Charge`."""
        return self._budget.take(self._tenant, bytes * self._copies, keep=False)

    def release(self) -> None:
        """See `Charge`."""
        given, self.bytes = self.bytes, 0
        if given:
            self._budget.give_back(self._tenant, given)

    def __del__(self) -> None:
        self.release()


def make_budget(limit: int) -> Budget:
    """Return a budget in bytes for what the chosen transport reads."""
    if chosen() is Transport.NATIVE:
        # Imported here: the extension may not be there.
        from kvscout_common.transport.native_core import ByteBudget

        return ByteBudget(limit, limit // SHARE)
    return ReferenceBudget(limit, limit // SHARE)


class BudgetCollector(Collector):
    """Bytes held of a budget, for Prometheus."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        budget = self._budget
        yield GaugeMetricFamily(
            "kvscout_request_memory_bytes",
            "Bytes charged for received requests, see --request-memory-bytes",
            budget.held,
        )
        yield GaugeMetricFamily(
            "kvscout_request_memory_limit_bytes",
            "Limit of the bytes charged for requests, see --request-memory-bytes",
            budget.limit,
        )
        refused = CounterMetricFamily(
            "kvscout_request_memory_refusals", "Requests refused because there was no room for them", labels=["full"]
        )
        for full, count in zip(("process", "tenant"), budget.refused, strict=True):
            refused.add_metric([full], count)
        yield refused
