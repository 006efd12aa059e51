"""Interface between the front and the gateway: a pick for a request, and reports of its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest


class Pick(Protocol):
    """Endpoint of one request, and its booking.

    Exactly one of `ended`, `aborted` and `left` is called, once, after whatever else was; none of them waits.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """To be set, `wire.DESTINATION` among them."""
        ...

    @property
    def answer_headers(self) -> Mapping[str, str]:
        """To be set in the response, where the proxy shows it."""
        ...

    def answering(self, status: int, served: str, in_chunks: bool | None) -> None:
        """Record that an engine, or the proxy in its place, begins to answer.

        Args:
            status: HTTP status.
            served: The endpoint; "" = the proxy does not report it.
            in_chunks: Whether output comes as it is generated; None = the response does not show it.
        """
        ...

    def first_output(self, head: bytes) -> None:
        """Record the first output.

        Args:
            head: First bytes of the response.
        """
        ...

    def ended(self, account: Mapping[str, Any] | None) -> None:
        """Record the end of the response.

        Args:
            account: What the engine says of tokens (`usage`), which may be nothing; None = the proxy does not show the
                response, it may have been given up as well.
        """
        ...

    def aborted(self) -> None:
        """Record that the response breaks off: the client has gone, or the engine failed."""
        ...

    def left(self) -> None:
        """Record that the outcome of the request will not be reported."""
        ...


class Picker(Protocol):
    """Picks endpoints."""

    async def pick(self, asked: PickRequest, *, without_upstreams: bool = False) -> Pick:
        """Pick for one request. Cancelled, it has booked nothing.

        Args:
            asked: The request.
            without_upstreams: Decide by what this gateway knows, at once.

        Raises:
            KvscoutError: There is none for it.
        """
        ...
