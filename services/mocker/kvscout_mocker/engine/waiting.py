"""The waiting queue of an engine, pure: in order of arrival, or of priority (vLLM's `--scheduling-policy priority`)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """A request with a place in the queue."""

    priority: int
    """Lower values go first."""
    arrival: int
    """Number of the request, in order of arrival."""


R = TypeVar("R", bound=Ranked)


def place(request: Ranked) -> tuple[int, int]:
    """Return what vLLM sorts requests by."""
    return request.priority, request.arrival


class WaitingQueue(Generic[R]):
    """Requests that wait.

    Args:
        by_priority: By priority, then arrival; else priorities have no effect.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: list[R] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> R:
        """Return the request that is next."""
        return self._requests[0]

    def add(self, request: R) -> None:
        """Queue a request."""
        self._insert(request, self._requests.append)

    def put_back(self, request: R) -> None:
        """Queue a request that was out already: in front, or where its priority and arrival say."""
        self._insert(request, lambda request: self._requests.insert(0, request))

    def take(self) -> R:
        """Remove and return the first request."""
        return self._requests.pop(0)

    def remove(self, request: R) -> None:
        """Remove a request."""
        self._requests.remove(request)

    def _insert(self, request: R, otherwise: Callable[[R], None]) -> None:
        if self._by_priority:
            insort(self._requests, request, key=place)
        else:
            otherwise(request)
