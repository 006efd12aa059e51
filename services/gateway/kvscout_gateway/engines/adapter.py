"""What differs from engine to engine: how a request is written, and how its answer is read.

::

    ClientRequest ──write──▶ HttpRequest ──▶ engine ──▶ HttpAnswer ──relay──▶ client
     (of a front)    │                                      │
                     └───────────── EngineAdapter ──────────┘ dialect

A request has a few attempts at most (`plan`); what an attempt changes in the client's request are fields of its body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvscout_common.http.http import Dialect, Form, HttpRequest

Changes: TypeAlias = Mapping[str, Any]
"""Fields of a body that an attempt sets; None = it has no such field."""
UNCHANGED: Changes = {}


class Address(NamedTuple):
    """Where an attempt goes, and what the engine is told of that."""

    endpoint: str
    """Its URL, without a path."""
    model: str
    """The name under which it serves what was asked for: the adapter's, or the model's."""
    request_id: str
    dp_rank: int | None
    """None = the engine has one rank, and is told nothing."""
    lora_name: str = ""
    """`model`, if that is an adapter."""


def common_headers(to: Address) -> list[tuple[str, str]]:
    """What the engines that there are agree on."""
    headers = [("Content-Type", "application/json"), ("X-Request-Id", to.request_id)]
    if to.dp_rank is not None:
        headers.append(("X-data-parallel-rank", str(to.dp_rank)))
    return headers


class EngineAdapter(Protocol):
    """One kind of engine."""

    dialect: Dialect
    """Of what it answers to a `completion`."""

    def headers(self, to: Address) -> list[tuple[str, str]]:
        """What every request to it carries, whatever its body."""

    async def completion(
        self, to: Address, token_ids: memoryview, parameters: Mapping[str, Any], changes: Changes
    ) -> HttpRequest:
        """Token ids to be continued, as a stream.

        Args:
            to: Where it goes.
            token_ids: Of the prompt, u32 each.
            parameters: Sampling and stop parameters, named as vLLM names them.
            changes: What the attempt changes.
        """


class ClientRequest(Protocol):
    """What a client wants run, as its front has it."""

    @property
    def form(self) -> Form:
        """What becomes of an answer that is a stream of events."""

    @property
    def max_tokens(self) -> int | None:
        """The output ends with so many; None = the engine knows when."""

    @property
    def whole_answer(self) -> bool:
        """The answer comes as a whole when it is complete, and no stream."""

    @property
    def with_key(self) -> bool:
        """The engine is shown the client's own key, if it has one."""

    @property
    def demands_tool_call(self) -> bool:
        """The output has to be a tool call: some engines refuse a request whose output ends before it is one."""

    def dialect(self, adapter: EngineAdapter) -> Dialect:
        """Of what the engine answers to it."""

    async def write(self, adapter: EngineAdapter, to: Address, changes: Changes) -> HttpRequest:
        """The request of an attempt. Long ones are written in slices, between which others have their turn."""

    def settle(self) -> None:
        """The client has output: it is not written again, and what it was written from need not be kept."""


@dataclass(slots=True)
class TokenRequest:
    """Token ids to be continued: the client's own words are those of no engine."""

    token_ids: bytes
    """Little-endian u32, four bytes a token."""
    parameters: Mapping[str, Any]
    """Sampling and stop parameters, named as vLLM names them."""
    form: Form = Form.PIECES
    whole_answer: bool = False
    with_key: bool = False
    demands_tool_call: bool = False

    @property
    def max_tokens(self) -> int | None:
        """See `ClientRequest`."""
        return self.parameters.get("max_tokens")

    def dialect(self, adapter: EngineAdapter) -> Dialect:
        """See `ClientRequest`."""
        return adapter.dialect

    async def write(self, adapter: EngineAdapter, to: Address, changes: Changes) -> HttpRequest:
        """See `ClientRequest`."""
        return await adapter.completion(to, memoryview(self.token_ids).cast("I"), self.parameters, changes)

    def settle(self) -> None:
        """See `ClientRequest`."""
        self.token_ids = b""
