"""Operations on requests that another replica owns: it carries them out, or they are taken over and carried out here.

::

    operation ──▶ ours, or nobody's ───────────────────────────────▶ here
              └─▶ another's ──request, 50 ms──▶ its owner ──result──▶ caller
                        └── silent, away, or no answer in time ──────▶ here: the booking is taken over first

Booking calls are not forwarded: a caller that books here has moved here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.errors
from google.protobuf.message import DecodeError

from kvscout.v1 import replication_pb2, scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_scheduler import translate
from kvscout_scheduler.operations import carry_out_here
from kvscout_scheduler.replication import Replication
from kvscout_scheduler.request import RequestKey
from kvscout_scheduler.scheduler import Scheduler

FORWARD_SECONDS = 0.05
MAX_FORWARDS = 1_024
"""Under way; beyond them requests are taken over without asking."""
HOPS = 2
"""Owners asked: the one we know, and the one that took over from it meanwhile."""

Post = Callable[[str, replication_pb2.ForwardedOperation, float], Awaitable[bytes]]

_KEYS: Mapping[str, Callable[[Any, str], RequestKey]] = {
    "prefill_complete": translate.key_from_proto,
    "free": translate.key_from_proto,
    "add_output": translate.key_from_proto,
    "renew": lambda message, tenant: translate.key_from_proto(message.requests[0], message.tenant or tenant),
}
"""Operations on a booking that is there already."""


class Forwarding:
    """Asks the owners of requests.

    Args:
        scheduler: Carries out what is not forwarded.
        replication: Knows the owners.
        post: Carries a request to a replica and its answer back; raises `nats.errors.Error`.
    """

    def __init__(self, scheduler: Scheduler, replication: Replication, post: Post) -> None:
        self.forwarded = 0
        """Operations that their owners carried out."""
        self.unanswered = 0
        """Operations that an owner did not answer in time."""
        self._scheduler = scheduler
        self._replication = replication
        self._post = post
        self._under_way = 0

    def concerns(self, operation: scheduler_pb2.LifecycleOperation, tenant: str) -> bool:
        """Whether an operation is on a request of another replica."""
        if operation.WhichOneof("operation") == "renew":
            return any(self._elsewhere(each, tenant) for each in _renewals(operation.renew))
        return self._elsewhere(operation, tenant)

    def _elsewhere(self, operation: scheduler_pb2.LifecycleOperation, tenant: str) -> bool:
        kind = operation.WhichOneof("operation")
        if kind is None or kind not in _KEYS:
            return False
        try:
            key = _KEYS[kind](getattr(operation, kind), tenant)
        except KvscoutError:
            # Whoever carries it out says what is wrong with it.
            return False
        return self.away(key)

    def away(self, key: RequestKey) -> bool:
        """Whether a request is another replica's."""
        return self._replication.ownership.elsewhere(key) is not None

    async def carry_out(
        self, operation: scheduler_pb2.LifecycleOperation, tenant: str
    ) -> scheduler_pb2.LifecycleResult:
        """Has an operation carried out by its owner, else here.

        Args:
            operation: One that `concerns` us.
            tenant: Of operations that name none.
        """
        if operation.WhichOneof("operation") == "renew":
            return await self._renew(operation, tenant)
        result = await self._ask(operation, tenant)
        if result is None:
            result = carry_out_here(self._scheduler, operation, tenant)
        result.id = operation.id
        return result

    async def _renew(self, operation: scheduler_pb2.LifecycleOperation, tenant: str) -> scheduler_pb2.LifecycleResult:
        result = scheduler_pb2.LifecycleResult(id=operation.id)
        result.renew.SetInParent()
        for index, each in enumerate(_renewals(operation.renew)):
            answer = await self._ask(each, tenant) if self._elsewhere(each, tenant) else None
            if answer is None:
                answer = carry_out_here(self._scheduler, each, tenant)
            if answer.code:
                answer.id = operation.id
                return answer
            if answer.renew.unknown:
                result.renew.unknown.append(index)
        return result

    async def _ask(
        self, operation: scheduler_pb2.LifecycleOperation, tenant: str
    ) -> scheduler_pb2.LifecycleResult | None:
        """The owner's result; None = it is to be carried out here."""
        kind = operation.WhichOneof("operation")
        assert kind is not None
        key = _KEYS[kind](getattr(operation, kind), tenant)
        forward = replication_pb2.ForwardedOperation(operation=operation, tenant=tenant)
        for _ in range(HOPS):
            owner = self._replication.ownership.elsewhere(key)
            if owner is None or not self._replication.live(owner.replica_id) or self._under_way >= MAX_FORWARDS:
                return None
            self._under_way += 1
            try:
                payload = await self._post(owner.replica_id, forward, FORWARD_SECONDS)
                answer = replication_pb2.ForwardedResult.FromString(payload)
            except (nats.errors.Error, TimeoutError, DecodeError):
                self.unanswered += 1
                return None
            finally:
                self._under_way -= 1
            if answer.owner:
                self.forwarded += 1
                return answer.result
        return None

    def answer(self, asked: replication_pb2.ForwardedOperation) -> replication_pb2.ForwardedResult:
        """Carries out what another replica forwards, unless it is yet another's."""
        kind = asked.operation.WhichOneof("operation")
        if kind not in _KEYS or self.concerns(asked.operation, asked.tenant):
            return replication_pb2.ForwardedResult(owner=False)
        result = carry_out_here(self._scheduler, asked.operation, asked.tenant)
        return replication_pb2.ForwardedResult(owner=True, result=result)


def _renewals(message: scheduler_pb2.RenewRequest) -> list[scheduler_pb2.LifecycleOperation]:
    """A renewal of several requests as one of each."""
    return [
        scheduler_pb2.LifecycleOperation(
            renew=scheduler_pb2.RenewRequest(tenant=message.tenant, requests=[ref], lease_seconds=message.lease_seconds)
        )
        for ref in message.requests
    ]
