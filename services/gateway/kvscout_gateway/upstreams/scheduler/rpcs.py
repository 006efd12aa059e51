"""Unary rpcs of the schedulers: bookings of callers who have a lease, settings, and queries that any one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import KvscoutError, NotFound
from kvscout_gateway.upstreams.failover import UpstreamDown, is_member_fault
from kvscout_gateway.upstreams.interfaces import Answer, Rpc
from kvscout_gateway.upstreams.scheduler.link import RETRY_SECONDS, Schedulers


class SchedulerRpcs:
    """Rpcs of a list of schedulers.

    Args:
        peers: The schedulers, in order of preference.
        timeout_seconds: Longest wait for an answer.
    """

    def __init__(self, peers: Schedulers, *, timeout_seconds: float) -> None:
        self.peers = peers
        self._timeout = timeout_seconds

    async def call(self, method: Rpc[Answer], request: object) -> Answer:
        """Call an rpc of the first scheduler that answers.

        Raises:
            UpstreamDown: None does.
            KvscoutError: As the first one does.
        """
        answer, _ = await self.peers.call(method, request, timeout_seconds=self._timeout)
        return answer

    async def call_booked(
        self, method: Rpc[Answer], request: object, has_it: Callable[[Answer], bool] = lambda answer: True
    ) -> Answer:
        """Call an rpc about a request that Route booked, at whichever scheduler has it.

        Args:
            method: Takes a stub, gives its rpc.
            request: The rpc's request.
            has_it: Returns, from an answer, whether the scheduler knows the request; NotFound says that it does not.

        Raises:
            NotFound: None has it.
            UpstreamDown: None that answers has it, and not all answer.
        """
        unknown: Answer | NotFound | None = None
        problem = ""
        for member in self.peers.preferred():
            try:
                answer = await member.call(method, request, self._timeout)
            except NotFound as error:
                unknown = error
            except KvscoutError as error:
                if not is_member_fault(error):
                    raise
                problem = f"{member.name}: {error}"
            else:
                if has_it(answer):
                    return answer
                unknown = answer
        if problem or unknown is None:
            raise UpstreamDown(problem or "no scheduler is configured", retry_after_seconds=RETRY_SECONDS)
        if isinstance(unknown, NotFound):
            raise unknown
        return unknown

    async def renew(self, request: scheduler_pb2.RenewRequest) -> scheduler_pb2.RenewResponse:
        """Renew leases of requests that Route booked, each at whichever scheduler has it.

        Raises:
            UpstreamDown: Some are at none that answers, and not all answer.
        """
        unknown, problem = list(range(len(request.requests))), ""
        for member in self.peers.preferred():
            rest = scheduler_pb2.RenewRequest(
                tenant=request.tenant,
                requests=[request.requests[index] for index in unknown],
                lease_seconds=request.lease_seconds,
            )
            try:
                answer = await member.call(lambda stub: stub.Renew, rest, self._timeout)
            except KvscoutError as error:
                if not is_member_fault(error):
                    raise
                problem = f"{member.name}: {error}"
                continue
            unknown = [unknown[position] for position in answer.unknown]
            if not unknown:
                break
        if unknown and (problem or not self.peers.members):
            raise UpstreamDown(problem or "no scheduler is configured", retry_after_seconds=RETRY_SECONDS)
        return scheduler_pb2.RenewResponse(unknown=unknown)

    async def set_busy_thresholds(
        self, request: types_pb2.SetBusyThresholdsRequest
    ) -> types_pb2.SetBusyThresholdsResponse:
        """Change thresholds on every scheduler.

        Raises:
            UpstreamDown: Some scheduler did not answer; names it. Those that did have changed.
            InvalidArgument: As the schedulers answer.
        """
        members = self.peers.members
        answers = await asyncio.gather(
            *(member.call(lambda stub: stub.SetBusyThresholds, request, self._timeout) for member in members),
            return_exceptions=True,
        )
        changed: types_pb2.SetBusyThresholdsResponse | None = None
        down: list[str] = []
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                changed = changed or answer
            elif isinstance(answer, KvscoutError) and is_member_fault(answer):
                down.append(f"{member.name}: {answer}")
            else:
                raise answer
        if changed is None or down:
            raise UpstreamDown(f"not changed everywhere: {'; '.join(down) or 'no scheduler is configured'}")
        return changed
