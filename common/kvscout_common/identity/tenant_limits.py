"""Limits of what one tenant may have at once at one service, whatever others have.

::

    tokens file ──limits──▶ TenantLimits ◀──require, take── who books, registers, takes a request or a stream

What is counted is counted where it lives (bookings, workers) or here, while it is held (requests, streams). A tenant
that is at its limit is refused with the limit's name and its own use; others notice nothing. Callers of tenant "*" are
services, which act for tenants: what they ask for counts for the tenant that they name, their streams for nobody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.errors import ConfigError, ResourceExhausted

EVERY_OTHER: Final = "*"
"""In the file: each tenant that has no entry, and what an entry leaves out."""
MAX_LIMIT: Final = 1 << 31
RETRY_SECONDS: Final = 1.0


class Limit(StrEnum):
    """Kind of a limit."""

    REQUESTS = "requests"
    """Running requests of a gateway."""
    BOOKINGS = "bookings"
    """Active bookings of a scheduler."""
    STREAMS = "streams"
    """Calls that stay open for as long as their caller likes."""
    WORKERS = "workers"
    """Registered workers."""


TenantTable = Mapping[str, Mapping[Limit, int]]
"""By tenant."""


class TenantLimits(Collector):
    """Limits of the tenants of one service; none until some are set."""

    def __init__(self) -> None:
        self._table: TenantTable = {}
        self._held: dict[Limit, defaultdict[str, int]] = {
            Limit.REQUESTS: defaultdict(int),
            Limit.STREAMS: defaultdict(int),
        }
        self._refused: Counter[tuple[str, Limit]] = Counter()
        self.use: dict[Limit, Callable[[], Mapping[str, int]]] = {
            limit: lambda held=held: held  # type: ignore[misc]  # mypy does not infer the default
            for limit, held in self._held.items()
        }
        """Usage of each tenant, by who counts it."""

    def set(self, table: TenantTable) -> None:
        """Set the limits; usage above them stays."""
        self._table = table

    def of(self, tenant: str, limit: Limit) -> int | None:
        """Return a tenant's limit; None = it has none."""
        for name in (tenant, EVERY_OTHER):
            found = self._table.get(name, {}).get(limit)
            if found is not None:
                return found
        return None

    def require(self, limit: Limit, tenant: str, used: int) -> None:
        """Raise unless there is room for one more.

        Args:
            limit: Of what.
            tenant: Whose.
            used: What it has.

        Raises:
            ResourceExhausted: It has all that it may have.
        """
        allowed = self.of(tenant, limit) if self._table else None
        if allowed is None or used < allowed:
            return
        self._refused[tenant, limit] += 1
        raise ResourceExhausted(
            f"tenant {tenant!r} has {used} {limit}, its limit is {allowed}",
            field=f"limits.{limit}",
            cause="limit",
            # Somebody has to remove a worker first.
            retry_after_seconds=None if limit is Limit.WORKERS else RETRY_SECONDS,
        )

    def take(self, limit: Limit, tenant: str) -> None:
        """Take one request or stream, until it is given back.

        Raises:
            ResourceExhausted: As `require`.
        """
        held = self._held[limit]
        self.require(limit, tenant, held.get(tenant, 0))
        held[tenant] += 1

    def give_back(self, limit: Limit, tenant: str) -> None:
        """Give back one that was taken."""
        held = self._held[limit]
        held[tenant] -= 1
        if not held[tenant]:
            del held[tenant]

    @contextmanager
    def hold(self, limit: Limit, tenant: str) -> Iterator[None]:
        """Take and give back around a block.

        Raises:
            ResourceExhausted: As `require`.
        """
        self.take(limit, tenant)
        try:
            yield
        finally:
            self.give_back(limit, tenant)

    def collect(self) -> Iterable[Metric]:
        """Return limits, their usage and refusals."""
        labels = ["tenant", "limit"]
        limits = GaugeMetricFamily("kvscout_tenant_limit", "Limit of what a tenant may use at once", labels=labels)
        used = GaugeMetricFamily("kvscout_tenant_used", "Current use of a limited resource by a tenant", labels=labels)
        refused = CounterMetricFamily("kvscout_tenant_refusals", "Calls refused for a tenant's limit", labels=labels)
        for limit, use in self.use.items():
            now = use()
            for tenant in sorted({*self._table, *now} - {EVERY_OTHER}):
                allowed = self.of(tenant, limit)
                if allowed is not None:
                    limits.add_metric([tenant, limit], allowed)
                    used.add_metric([tenant, limit], now.get(tenant, 0))
        for (tenant, limit), count in sorted(self._refused.items()):
            refused.add_metric([tenant, limit], count)
        return (limits, used, refused)


def read_limits(entries: Any) -> TenantTable:
    """Return the table of a tokens file's list `limits`.

    Raises:
        ConfigError: It is none; names the entry.
    """
    if not isinstance(entries, list):
        raise ConfigError("must be a list", field="limits")
    table: dict[str, Mapping[Limit, int]] = {}
    for number, entry in enumerate(entries):
        where = f"limits.{number}"
        if not isinstance(entry, dict) or not entry.keys() <= {"tenant", *Limit}:
            raise ConfigError(f"has a key other than tenant, {', '.join(Limit)}", field=where)
        tenant = entry.get("tenant")
        if not isinstance(tenant, str) or not tenant:
            raise ConfigError('must name a tenant, or "*" for every other one', field=f"{where}.tenant")
        if tenant in table:
            raise ConfigError(f"the tenant {tenant!r} twice", field=where)
        for name in entry.keys() - {"tenant"}:
            value = entry[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
                raise ConfigError("must be a whole number of at least 0", field=f"{where}.{name}")
        table[tenant] = {limit: entry[limit] for limit in Limit if limit in entry}
    return table
