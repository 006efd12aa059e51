"""A routed request that holds a place on its worker until it is freed."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

from kvscout_client.results import FreeOutcome, RouteDecision
from kvscout_common.errors import KvscoutError
from kvscout_common.worker import Role

if TYPE_CHECKING:
    from kvscout_client.router import Router

log = logging.getLogger("kvscout.client")


class Booking:
    """A booked request; leaving its `async with` block frees it.

    ::

        async with await router.route(token_ids, request_id="r-1") as booking:
            stream = await my_engine(booking.decision.http_endpoint, token_ids)
            await stream.first_token()
            await booking.prefill_complete()
            await stream.rest()
            await booking.free(output_tokens=stream.tokens)

    Where no scheduler answered, the request runs without being booked (`decision.booked`), and there is nothing to
    report or free.
    """

    def __init__(
        self,
        router: Router,
        decision: RouteDecision,
        *,
        request_id: str,
        model: str,
        attempt_id: int,
        role: Role = Role.AGGREGATED,
    ) -> None:
        self.decision = decision
        self.request_id = request_id
        self.model = model
        self.attempt_id = attempt_id
        self.role = role
        self._router = router
        self._freed = False

    async def prefill_complete(self) -> bool:
        """Report the first token, so that the prompt no longer counts as prefill load.

        Returns:
            False if it was reported before, or nothing is booked.

        Raises:
            NotFound: The booking is gone: freed, or its lease has ended.
        """
        if not self.decision.booked:
            return False
        return await self._router.mark_prefill_complete(
            self.request_id, model=self.model, attempt_id=self.attempt_id, role=self.role
        )

    async def renew(self, lease_seconds: int = 0) -> bool:
        """Renew the lease of the booking.

        Args:
            lease_seconds: From now; 0 = 300.

        Returns:
            False if nothing is booked, or no longer.
        """
        if not self.decision.booked:
            return False
        gone = await self._router.renew(
            [self.request_id], model=self.model, attempt_id=self.attempt_id, role=self.role, lease_seconds=lease_seconds
        )
        return not gone

    async def add_output(self, blocks: int) -> int:
        """Count generated blocks as load of the worker.

        Returns:
            Output blocks in all; 0 where nothing is booked.

        Raises:
            NotFound: The booking is gone.
            FailedPrecondition: The scheduler does not track output.
        """
        if not self.decision.booked:
            return 0
        return await self._router.add_output(
            self.request_id, blocks, model=self.model, attempt_id=self.attempt_id, role=self.role
        )

    async def free(self, output_tokens: int = 0) -> FreeOutcome:
        """End the request; repeated calls do nothing more.

        Args:
            output_tokens: That it generated, from which the scheduler learns how long outputs are; 0 = unknown.
        """
        if self._freed:
            return FreeOutcome.ALREADY_FREED
        if not self.decision.booked:
            return FreeOutcome.UNKNOWN
        outcome = await self._router.free(
            self.request_id,
            model=self.model,
            attempt_id=self.attempt_id,
            role=self.role,
            output_tokens=output_tokens,
        )
        self._freed = True
        return outcome

    async def __aenter__(self) -> Booking:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.free()
        except KvscoutError as failure:
            # The request is over, and its own error matters more; the booking ends with its lease.
            problem = f"request {self.request_id!r} could not be freed: {failure}"
            if error is None:
                log.warning("%s", problem)
            else:
                error.add_note(f"and {problem}")
