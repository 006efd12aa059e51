"""Failures of requests: counted by cause, and the last ones remembered, each with its request, worker and message.

Callers' mistakes, engines' failures, the router's, and requests that were answered all the same are remembered apart: a
caller that floods the gateway with wrong requests drives out no failure of an engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.errors import KvscoutError
from kvscout_common.observability import tracing
from kvscout_common.observability.log_lines import current_request_id
from kvscout_common.observability.recent_counts import RecentCounts
from kvscout_common.plain_text import MAX_NAME_BYTES, printable
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.engines.causes import OWNERS, Cause, Owner, cause_of
from kvscout_gateway.engines.faults import EngineFailed, failure_behind

if TYPE_CHECKING:
    from kvscout_gateway.values.decision import Decision

MAX_KEPT: Final = 512
"""Failures of one owner that are remembered."""
MAX_KEPT_BYTES: Final = 256 * 1024
"""Their size, about."""
MAX_MESSAGE: Final = 300
"""Characters."""
MAX_WORKERS: Final = 16
RECORD_BYTES: Final = 400
"""Size of one without its texts."""
_LISTED: Final = "is_listed_failure"
"""Attribute of an error that is counted."""

_MISSED: Final = {
    "policy": Cause.POLICY,
    "scheduler": Cause.SCHEDULER,
    "time": Cause.SCHEDULER,
    "indexer": Cause.INDEXER,
    "tokenizer": Cause.TOKENS,
}
"""Causes by what a decision says that was missed."""


class RequestSummary(NamedTuple):
    """Request, as far as it is known."""

    front: str
    """Path or rpc by which it came."""
    tenant: str = ""
    """"" = its caller is not known."""
    model: str = ""
    """"" = unknown."""
    request_id: str = ""
    """Request id, if the log has none; "" = unknown."""


class FailureKind(NamedTuple):
    """Key of a count."""

    cause: Cause
    answered: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, or was not answered as it should have been."""

    number: int
    at: float
    """Seconds since the Unix epoch."""
    asked: RequestSummary
    status: str
    """Status that the client got; "" = none of ours."""
    kind: FailureKind
    worker_ids: tuple[str, ...]
    message: str
    """For anyone who may see the request."""
    detail: str
    """The same with addresses."""
    trace_id: str

    @property
    def owner(self) -> Owner:
        """Return whose fault it is."""
        return OWNERS[self.kind.cause]

    @property
    def size(self) -> int:
        """Return about how many bytes it takes."""
        texts = (*self.asked, self.status, *self.worker_ids, self.message, self.detail)
        return RECORD_BYTES + sum(map(len, texts))


class FailureFilter(NamedTuple):
    """Failures that are listed."""

    tenant: str = ALL_TENANTS
    model: str = ""
    worker_id: str = ""
    cause: str = ""
    owner: Owner | None = None
    answered: bool | None = False
    """Those that were answered all the same; None = both."""
    after: int = 0
    """Only those of a higher number."""

    def takes(self, one: Failure) -> bool:
        """Return whether a failure is among them."""
        return (
            one.number > self.after
            and self.tenant in (ALL_TENANTS, one.asked.tenant)
            and self.model in ("", one.asked.model)
            and (not self.worker_id or self.worker_id in one.worker_ids)
            and self.cause in ("", one.kind.cause)
            and self.owner in (None, one.owner)
            and self.answered in (None, one.kind.answered)
        )


class _Ring:
    """The last failures of one owner; older ones are dropped."""

    def __init__(self) -> None:
        self.kept: deque[Failure] = deque()
        self._bytes = 0

    def add(self, one: Failure) -> None:
        self.kept.append(one)
        self._bytes += one.size
        while len(self.kept) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
            self._bytes -= self.kept.popleft().size


class FailureWatch:
    """Records an error that leaves the block as the failure of a request."""

    __slots__ = ("_asked", "_log")

    def __init__(self, log: FailureLog, asked: RequestSummary) -> None:
        self._log = log
        self._asked = asked

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._log.failed(self._asked, error)


class FailureLog(Collector):
    """Failures of one gateway's requests.

    Args:
        status_of: Gives the status that a front answers an error with.
        clock: Seconds since the Unix epoch.
        monotonic: Seconds.
    """

    def __init__(
        self,
        status_of: Callable[[str, BaseException], str],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status_of = status_of
        self._clock = clock
        self.counts: RecentCounts[FailureKind] = RecentCounts(monotonic)
        self.ended: RecentCounts[None] = RecentCounts(monotonic)
        """Requests that ended, or were refused."""
        self.last_messages: dict[FailureKind, str] = {}
        """With addresses."""
        self._rings = {(owner, answered): _Ring() for owner in Owner for answered in (False, True)}
        self.number = 0
        """Of the last one."""

    @property
    def ours(self) -> int:
        """Return the requests that failed by an engine's or the router's fault."""
        return self._failed(Owner.ENGINE, Owner.ROUTER)

    @property
    def callers(self) -> int:
        """Return the requests that failed by their callers' fault."""
        return self._failed(Owner.CALLER)

    def _failed(self, *owners: Owner) -> int:
        counts = self.counts.total.items()
        return sum(number for kind, number in counts if not kind.answered and OWNERS[kind.cause] in owners)

    def watch(self, asked: RequestSummary) -> FailureWatch:
        """Return a block to enter: an error that leaves it is recorded, unless it is already."""
        return FailureWatch(self, asked)

    def over(self, asked: RequestSummary, error: BaseException | None, worker_ids: Sequence[str] = ()) -> None:
        """Record the end of a request.

        Args:
            asked: The request.
            error: Why it failed; None = it did not.
            worker_ids: Workers that it was sent to.
        """
        if error is None:
            self.ended.add(None)
        else:
            self.failed(asked, error, worker_ids)

    def failed(self, asked: RequestSummary, error: BaseException, worker_ids: Sequence[str] = ()) -> None:
        """Record a request that failed; an error that is recorded already is not recorded again."""
        if getattr(error, _LISTED, False):
            return
        setattr(error, _LISTED, True)
        self.ended.add(None)
        cause = cause_of(error)
        message, detail = _texts(error)
        status = "" if cause is Cause.GONE else self._status_of(asked.front, error)
        self._record(asked, FailureKind(cause, False), status, worker_ids, message, detail)

    def leave_out(self, error: BaseException) -> None:
        """Record no failure for an error, whoever reports it."""
        setattr(error, _LISTED, True)

    def answered(
        self, asked: RequestSummary, cause: Cause, message: str, detail: str = "", worker_ids: Sequence[str] = ()
    ) -> None:
        """Record a request that was answered, but not as it should have been.

        Args:
            asked: The request.
            cause: Why.
            message: For anyone who may see the request.
            detail: The same with addresses.
            worker_ids: Workers that it was sent to.
        """
        self._record(asked, FailureKind(cause, True), "", worker_ids, message, detail)

    def degraded(self, asked: RequestSummary, decision: Decision) -> None:
        """Record a request that was answered, and placed with less knowledge than usual: once, for its first reason."""
        missed = decision.degraded_for(in_full=False)
        self.answered(
            asked,
            _MISSED[missed[0]],
            f"placed without: {', '.join(missed)}",
            "; ".join(decision.degraded),
            (decision.worker.worker_id,),
        )

    def _record(
        self,
        asked: RequestSummary,
        kind: FailureKind,
        status: str,
        worker_ids: Sequence[str],
        message: str,
        detail: str,
    ) -> None:
        self.number += 1
        self.counts.add(kind)
        message, detail = printable(message, MAX_MESSAGE), printable(detail or message, MAX_MESSAGE)
        self.last_messages[kind] = detail
        one = Failure(
            self.number,
            self._clock(),
            RequestSummary(
                printable(asked.front, MAX_NAME_BYTES),
                printable(asked.tenant, MAX_NAME_BYTES),
                printable(asked.model, MAX_NAME_BYTES),
                printable(current_request_id() or asked.request_id, MAX_NAME_BYTES),
            ),
            status,
            kind,
            tuple(dict.fromkeys(worker_ids))[:MAX_WORKERS],
            message,
            detail,
            tracing.ids().get("trace_id", ""),
        )
        self._rings[one.owner, kind.answered].add(one)

    def listed(self, wanted: FailureFilter, limit: int, before: int | None = None) -> tuple[list[Failure], int]:
        """Return failures, the newest first, and how many there are of them.

        Args:
            wanted: Which.
            limit: How many at most.
            before: Only those of lower numbers are returned; None = all.
        """
        found = [one for ring in self._rings.values() for one in ring.kept if wanted.takes(one)]
        page = [one for one in found if before is None or one.number < before]
        page.sort(key=lambda one: -one.number)
        return page[:limit], len(found)

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        labels = ["cause", "owner", "answered"]
        failures = CounterMetricFamily(
            "kvscout_failures", "Requests that failed or were not answered as they should have been", labels=labels
        )
        for (cause, answered), number in self.counts.total.items():
            failures.add_metric([cause, OWNERS[cause], "yes" if answered else "no"], number)
        yield failures


def _texts(error: BaseException) -> tuple[str, str]:
    """Return what an error says, without and with addresses; never what an engine said: it may quote prompts."""
    failed = error if isinstance(error, EngineFailed) else failure_behind(error)
    if failed is not None:
        return failed.summary, f"{failed.summary} ({failed.detail})" if failed.detail else failed.summary
    if isinstance(error, KvscoutError):
        return str(error.for_clients()), str(error)
    if cause_of(error) is Cause.GONE:
        text = str(error) or "the client went away"
        return text, text
    return "the gateway failed; its log has the details", f"{type(error).__name__}: {error}"
