"""Bases of the blocking client: a loop in a thread, and `with`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from kvscout_client.booking import Booking
from kvscout_client.calls import RETRIES
from kvscout_client.loop_thread import LoopThread
from kvscout_client.results import RouteDecision
from kvscout_client.router import Router
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.worker import DEFAULT_TENANT

T = TypeVar("T")


class BlockingRouterBase:
    """A `Router` in a thread; its methods block their callers, of which there may be many at a time."""

    def __init__(
        self,
        address: str = "localhost:7050",
        *,
        model: str = "",
        tenant: str = DEFAULT_TENANT,
        security: ClientSecurity = PLAINTEXT,
        timeout_seconds: float | None = 30.0,
        retries: int = RETRIES,
    ) -> None:
        """As `Router`."""
        self._thread = LoopThread("kvscout-router")

        async def made() -> Router:
            return Router(
                address,
                model=model,
                tenant=tenant,
                security=security,
                timeout_seconds=timeout_seconds,
                retries=retries,
            )

        try:
            self._router = self._thread.run(made())
        except BaseException:
            self._thread.end()
            raise

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled. Repeated calls do nothing more."""
        try:
            self._thread.run(self._router.close())
        except ValueError:
            return  # it was closed before
        self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def _each(self, stream: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of a stream; an iterator that is dropped cancels its call."""

        async def following() -> list[T]:
            try:
                return [await anext(stream)]
            except StopAsyncIteration:
                return []

        try:
            while items := self._thread.run(following()):
                yield items[0]
        finally:
            with suppress(ValueError):  # the router was closed, which has ended the call
                self._thread.run(stream.aclose())


class BlockingBookingBase:
    """A `Booking`; leaving its `with` block frees it."""

    def __init__(self, router: BlockingRouterBase, booking: Booking) -> None:
        self._answer = router._answer
        self._booking = booking

    @property
    def decision(self) -> RouteDecision:
        """Return the decision."""
        return self._booking.decision

    @property
    def request_id(self) -> str:
        """Return the request id."""
        return self._booking.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._answer(self._booking.__aexit__(kind, error, traceback))
