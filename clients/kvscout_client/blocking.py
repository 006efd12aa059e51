"""The blocking forms of `Router` and `Booking`: the same methods, run by a loop in a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, overload

from kvscout_client.booking import Booking
from kvscout_client.calls import RETRIES
from kvscout_client.loop_thread import LoopThread
from kvscout_client.options import RouteOptions
from kvscout_client.results import RouteDecision
from kvscout_client.router import Router
from kvscout_client.tokens import Tokens
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.worker import DEFAULT_TENANT

P = ParamSpec("P")
T = TypeVar("T")


class _Blocking:
    """An asynchronous object and the thread that runs its methods."""

    _thread: LoopThread
    _inner: Any


def _answer(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of a method."""

    @wraps(method)
    def call(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


def _stream(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return the blocking form of a method that yields; an iterator that is dropped cancels its call."""

    @wraps(method)
    def call(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        stream = method(self._inner, *args, **kwargs)

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

    return call


class BlockingBooking(_Blocking):
    """`Booking` for code without an event loop; leaving its `with` block frees it."""

    _inner: Booking

    def __init__(self, router: BlockingRouter, booking: Booking) -> None:
        self._thread, self._inner = router._thread, booking

    @property
    def decision(self) -> RouteDecision:
        """Return the decision."""
        return self._inner.decision

    @property
    def request_id(self) -> str:
        """Return the request id."""
        return self._inner.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.run(self._inner.__aexit__(kind, error, traceback))

    prefill_complete = _answer(Booking.prefill_complete)
    renew = _answer(Booking.renew)
    add_output = _answer(Booking.add_output)
    free = _answer(Booking.free)


class BlockingRouter(_Blocking):
    """`Router` for code without an event loop: its methods block their callers, of which there may be any number."""

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
            self._inner = self._thread.run(made())
        except BaseException:
            self._thread.end()
            raise

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled. Repeated calls do nothing more."""
        try:
            self._thread.run(self._inner.close())
        except ValueError:
            return  # it was closed before
        self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def route(
        self, token_ids: Tokens = (), *, request_id: None = None, **options: Unpack[RouteOptions]
    ) -> RouteDecision: ...

    @overload
    def route(self, token_ids: Tokens = (), *, request_id: str, **options: Unpack[RouteOptions]) -> BlockingBooking: ...

    @wraps(Router.route)
    def route(self, *args: Any, **kwargs: Any) -> RouteDecision | BlockingBooking:
        answer = self._thread.run(self._inner.route(*args, **kwargs))
        return BlockingBooking(self, answer) if isinstance(answer, Booking) else answer

    generate = _stream(Router.generate)
    mark_prefill_complete = _answer(Router.mark_prefill_complete)
    free = _answer(Router.free)
    renew = _answer(Router.renew)
    add_output = _answer(Router.add_output)
    active_requests = _answer(Router.active_requests)
    failures = _answer(Router.failures)
    ladders = _answer(Router.ladders)
    register_worker = _answer(Router.register_worker)
    update_worker = _answer(Router.update_worker)
    remove_worker = _answer(Router.remove_worker)
    drain_worker = _answer(Router.drain_worker)
    keep_alive = _answer(Router.keep_alive)
    list_workers = _answer(Router.list_workers)
    potential_loads = _answer(Router.potential_loads)
    busy_thresholds = _answer(Router.busy_thresholds)
    list_busy_thresholds = _answer(Router.list_busy_thresholds)
    set_busy_thresholds = _answer(Router.set_busy_thresholds)
    dump = _stream(Router.dump)
    record = _stream(Router.record)
    status = _answer(Router.status)
