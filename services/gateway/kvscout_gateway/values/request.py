"""A request of a client, whichever front it came through.

::

    Request.body ──write──▶ HttpRequest ──▶ engine ──▶ HttpAnswer ──relay──▶ client
                    │                                      │
                    └──────────── EngineAdapter ───────────┘ dialect
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from operator import attrgetter
from typing import Any, Final, Protocol

from kvscout.v1 import types_pb2
from kvscout_common.errors import DeadlineExceeded
from kvscout_common.http.dialect import Dialect
from kvscout_common.http.http import Form, HttpRequest
from kvscout_common.observability import tracing
from kvscout_common.worker import Role
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import COMPLETIONS, ApiDialect
from kvscout_gateway.values.output import UNKNOWN, Output
from kvscout_gateway.values.prompt import Prompt
from kvscout_gateway.values.session import UNKNOWN_SESSION, Session

NO_FIELDS: Final[Mapping[str, Any]] = {}


class DeadlinePassed(DeadlineExceeded):
    """The deadline of a request passed: no peer is at fault."""

    answered = True


class EngineAdapter(Protocol):
    """One kind of engine."""

    dialect: Dialect
    """Dialect of its answer to a `completion`."""

    async def completion(
        self, to: Decision, request: Request, parameters: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> HttpRequest:
        """Write a request for the prompt's token ids to be continued, as a stream.

        Args:
            to: Where it goes.
            request: Whose prompt.
            parameters: Sampling and stop parameters, named as vLLM names them.
            fields: What the attempt sets in the body; None = the body has no such field.
        """


class RequestBody(Protocol):
    """Body of a client's request, as its front has it."""

    @property
    def form(self) -> Form:
        """Return what becomes of an answer that is a stream of events."""

    @property
    def max_tokens(self) -> int | None:
        """Return the length at which the output ends; None = the engine knows when."""

    @property
    def whole_answer(self) -> bool:
        """Return whether the answer comes as a whole when it is complete, not as a stream."""

    @property
    def with_key(self) -> bool:
        """Return whether the engine is shown the client's own key, if it has one."""

    @property
    def demands_tool_call(self) -> bool:
        """Return whether the output has to be a tool call: some engines refuse one whose output ends before that."""

    def dialect(self, adapter: EngineAdapter) -> Dialect:
        """Return the dialect of the engine's answer."""

    async def write(
        self, adapter: EngineAdapter, to: Decision, request: Request, fields: Mapping[str, Any]
    ) -> HttpRequest:
        """Write the request of an attempt. Long ones are written in slices, between which other tasks run."""

    def settle(self) -> None:
        """Release what is written from."""


@dataclass(slots=True)
class TokenBody:
    """The prompt's token ids, to be continued: the client's own words are those of no engine."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Sampling and stop parameters, named as vLLM names them."""
    form: Form = Form.MESSAGES
    whole_answer: bool = False
    with_key: bool = False
    demands_tool_call: bool = False

    @property
    def max_tokens(self) -> int | None:
        """See `RequestBody`."""
        return self.parameters.get("max_tokens")

    def dialect(self, adapter: EngineAdapter) -> Dialect:
        """See `RequestBody`."""
        return adapter.dialect

    async def write(
        self, adapter: EngineAdapter, to: Decision, request: Request, fields: Mapping[str, Any]
    ) -> HttpRequest:
        """See `RequestBody`."""
        return await adapter.completion(to, request, self.parameters, fields)

    def settle(self) -> None:
        """See `RequestBody`."""


def new_request_id() -> str:
    """Return a unique request id."""
    return f"gen-{os.urandom(16).hex()}"


# What each request makes is not frozen, which would make it three times as dear; it is not changed all the same.
@dataclass(slots=True)
class Request:
    """A request of a client: what is to run, and the requirements on its worker."""

    model: str
    tenant: str
    prompt: Prompt
    body: RequestBody = field(default_factory=TokenBody)
    """Body that is sent to an engine."""
    api: ApiDialect = COMPLETIONS
    """Dialect of that."""
    front: str = ""
    """Path or rpc by which it came."""
    lora_name: str = ""
    role: Role = Role.AGGREGATED
    request_id: str = ""
    """"" = query only."""
    attempt_id: int = 0
    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    """Workers that are tried first; the others, if none of these takes it."""
    pinned: str = ""
    pinned_rank: int | None = None
    required_labels: Mapping[str, str] = field(default_factory=dict)
    override: types_pb2.RouterConfigOverride | None = None
    priority: int = 0
    """In a scheduler's queue, higher first; below 0, the request may be shed."""
    caller: str = ""
    """Name of the token by which it came; "" = the tenant has the fair share."""
    fairness_id: str = ""
    deadline: float = inf
    """Time from which its output is useless, on `time.monotonic`."""
    ttft_target_seconds: float = inf
    itl_target_seconds: float = inf
    """Its own targets; inf = those of the scheduler."""
    output: Output = UNKNOWN
    session: Session = UNKNOWN_SESSION
    explain: bool = False
    lease_seconds: int = 0
    remote_prefill: bool = False
    """Another worker computes the prompt: none of it is charged to this one."""
    undivided: str = ""
    """Reason why one worker has to compute prompt and output; "" = two may."""
    owned: bool = False
    """This gateway runs the request itself, and holds its booking; else a caller does, who has a lease."""
    unreported: bool = False
    """Whoever has it run reports nothing of its attempts but their end."""
    queue_wait_seconds: float | None = None
    """Longest wait in line at a scheduler; None = as for all."""
    running: bool = False
    """It is on the worker that it is pinned to already, whatever that has room for: it is booked there as one that was
    not sent there now."""
    fallback_reason: str = ""
    """Reason why no upstream is called, and round-robin picks the worker; "" = they are called."""

    def of_attempt(self, attempt_id: int, lease_seconds: int) -> Request:
        """Return the request of an attempt that this gateway runs itself."""
        # `dataclasses.replace` asks for every field by name, which costs four times as much.
        made = Request(*_fields_of(self))
        made.attempt_id, made.lease_seconds, made.owned = attempt_id, lease_seconds, True
        return made

    def trace(self) -> None:
        """Add the request to the span that runs now, if there are traces."""
        if tracing.enabled():
            tracing.current().record(tenant=self.tenant, model=self.model, request_id=self.request_id)

    def seconds_left(self) -> float:
        """Return the time until its deadline.

        Raises:
            DeadlinePassed: It has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the request's deadline has passed")
        return left

    def settle(self) -> None:
        """Release what engines are sent: the client has output, nothing is written again."""
        self.body.settle()
        self.prompt.settle()


_fields_of: Final = attrgetter(*(one.name for one in fields(Request)))
