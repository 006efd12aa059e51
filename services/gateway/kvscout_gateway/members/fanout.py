"""Calls that concern more than the first healthy helper: what was booked wherever it is, settings everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from kvscout.v1 import events_pb2, indexer_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import KvscoutError, NotFound
from kvscout_common.rpc.channel import stream
from kvscout_gateway.upstreams.failover import UpstreamDown, is_member_fault
from kvscout_gateway.upstreams.indexer.indexers import Indexers, Replicas
from kvscout_gateway.upstreams.scheduler.booking import Schedulers
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink

Answer = TypeVar("Answer")


class Fanout:
    """The helpers of one gateway, all of them."""

    def __init__(self, indexers: Indexers, schedulers: Schedulers, *, timeout_seconds: float) -> None:
        """Calls these.

        Args:
            indexers: By shard, each in order of preference.
            schedulers: In order of preference.
            timeout_seconds: Longest wait for each scheduler.
        """
        self._indexers = indexers
        self._schedulers = schedulers
        self._timeout = timeout_seconds

    async def mark_prefill_complete(self, ref: scheduler_pb2.RequestRef) -> scheduler_pb2.MarkPrefillCompleteResponse:
        """Reports the first token of a request that Route booked, at whichever scheduler has it.

        Raises:
            NotFound: None has it.
            UpstreamDown: None that answers has it, and not all answer.
        """
        return await self._wherever_booked(lambda stub: stub.prefill_complete, ref, lambda _: True)

    async def free(self, request: scheduler_pb2.FreeRequest) -> scheduler_pb2.FreeResponse:
        """Ends a request that Route booked, at whichever scheduler has it.

        Raises:
            UpstreamDown: None that answers has it, and not all answer.
        """
        return await self._wherever_booked(
            lambda stub: stub.free, request, lambda answer: answer.outcome != scheduler_pb2.FREE_OUTCOME_UNKNOWN
        )

    async def add_output(self, request: scheduler_pb2.AddOutputRequest) -> scheduler_pb2.AddOutputResponse:
        """Adds generated blocks to a request that Route booked, at whichever scheduler has it.

        Raises:
            NotFound: None has it.
            FailedPrecondition: The one that has it does not track output.
            UpstreamDown: None that answers has it, and not all answer.
        """
        return await self._wherever_booked(lambda stub: stub.AddOutput, request, lambda _: True)

    async def renew(self, request: scheduler_pb2.RenewRequest) -> scheduler_pb2.RenewResponse:
        """Renews leases of requests that Route booked, each at whichever scheduler has it.

        Raises:
            UpstreamDown: Some are at none that answers, and not all answer.
        """
        unknown, problem = list(range(len(request.requests))), ""
        for member in self._schedulers.preferred():
            asked = scheduler_pb2.RenewRequest(
                tenant=request.tenant,
                requests=[request.requests[index] for index in unknown],
                lease_seconds=request.lease_seconds,
            )
            try:
                answer = await member.call(lambda stub: stub.Renew, asked, self._timeout)
            except KvscoutError as error:
                if not is_member_fault(error):
                    raise
                problem = f"{member.name}: {error}"
                continue
            unknown = [unknown[position] for position in answer.unknown]
            if not unknown:
                break
        if unknown and (problem or not self._schedulers.members):
            raise UpstreamDown(problem or "no scheduler is configured", retry_after_seconds=1.0)
        return scheduler_pb2.RenewResponse(unknown=unknown)

    async def set_busy_thresholds(
        self, request: types_pb2.SetBusyThresholdsRequest
    ) -> types_pb2.SetBusyThresholdsResponse:
        """Changes thresholds on every scheduler.

        Raises:
            UpstreamDown: Some scheduler did not answer; names it. Those that did have changed.
            InvalidArgument: As the schedulers answer.
        """
        members = self._schedulers.members
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

    async def dump(self, request: indexer_pb2.DumpRequest) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        """The state of every shard, each from its first indexer that answers.

        Raises:
            UpstreamDown: None of a shard does.
            NotFound: Unknown model.
        """
        if not self._indexers.shards:
            raise UpstreamDown("no indexer is configured")
        for shard in self._indexers.shards:
            async with aclosing(self._dump_shard(shard, request)) as batches:
                async for batch in batches:
                    yield batch

    @staticmethod
    async def _dump_shard(
        shard: Replicas, request: indexer_pb2.DumpRequest
    ) -> AsyncGenerator[events_pb2.KvEventBatch, None]:
        problem = ""
        for member in shard.preferred():
            begun = False
            try:
                async for batch in stream(member.stub.Dump, request):
                    begun = True
                    yield batch
                return
            except KvscoutError as error:
                if begun or not is_member_fault(error):
                    raise
                problem = f"{member.name}: {error}"
        raise UpstreamDown(problem)

    async def _wherever_booked(
        self,
        method: Callable[[SchedulerLink], Callable[..., Awaitable[Answer]]],
        request: object,
        has_it: Callable[[Answer], bool],
    ) -> Answer:
        """Asks one scheduler after the other: the first healthy one of now may not be that of the booking."""
        unknown: Answer | NotFound | None = None
        problem = ""
        for member in self._schedulers.preferred():
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
            raise UpstreamDown(problem or "no scheduler is configured", retry_after_seconds=1.0)
        if isinstance(unknown, NotFound):
            raise unknown
        return unknown
