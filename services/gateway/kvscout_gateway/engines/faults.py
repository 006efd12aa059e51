"""Failures of engines: the one table of who pays for each, and how they are distinguished.

A new kind of failure is a member of `Fault` and a row of `RULES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from kvscout_common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.http.http import FailureKind, Headers, HttpFailed

MAX_MESSAGE = 500
"""Characters of what an engine says that are passed on."""

_MISFITS = frozenset({401, 403, 404, 405, 407, 408})
"""Client errors that say nothing of the request: a key, a path or a model name that this engine does not have."""
KEY_REFUSALS = frozenset({401, 403})
"""Statuses by which an engine refuses the API key."""
_REPORTS = "the engine reports"


_TRANSPORT_FAILURES = {
    FailureKind.UNREACHABLE: "the worker cannot be reached",
    FailureKind.BROKEN: "the worker broke off",
    FailureKind.PROTOCOL: "the worker's answer makes no sense",
    FailureKind.RESOURCES: "the gateway has no resources left: no descriptors or no memory are left",
}


class Fault(Enum):
    """Cause of a failure."""

    REQUEST = "request"
    """Every engine would refuse it: 400, 413, 422, also in a stream; 401 and 403 of a client's own key."""
    OVERLOAD = "overload"
    """The engine has too much to do, and is well otherwise: 429, or 503 with Retry-After."""
    REFUSED = "refused"
    """The engine answers, and does not run it, for its own trouble or because no engine survives it: 5xx, 401, 403,
    404, 3xx, errors in a stream."""
    WORKER = "worker"
    """The engine is gone, hangs, or talks nonsense: a connection that is refused or breaks."""
    TIME = "time"
    """The answer takes longer than it may, and nothing says that the engine is at fault: another one needs as long."""
    GATEWAY = "gateway"
    """This process has no resources left to ask with: file descriptors, memory."""
    BALANCER = "balancer"
    """The load balancer that is shadowed cannot be reached, or breaks off: there is no other one."""


_REPORTED: Final[Mapping[str, Fault]] = {
    **dict.fromkeys(("BadRequestError", "invalid_request_error", "invalid_prompt"), Fault.REQUEST),
    **dict.fromkeys(("rate_limit_error", "overloaded_error", "rate_limit_exceeded"), Fault.OVERLOAD),
}
"""Types and codes of errors in a stream that say whose they are."""


class Payer(Enum):
    """Party that a failure is charged to."""

    CLIENT = "client"
    WORKER = "worker"
    GATEWAY = "gateway"
    NOBODY = "nobody"


class Ejection(Enum):
    """Effect of a failure on the outlier detector (`health`)."""

    NEVER = "never"
    BACKOFF = "backoff"
    """It gets no requests for the time that it names."""
    COUNTS = "counts"
    COUNTS_IF_OTHERS_RUN_IT = "counts if others run it"
    """It counts if another worker runs the request, or if this one had begun to."""


class Rule(NamedTuple):
    """Consequences of a fault."""

    payer: Payer
    retried: bool
    """It is tried on another worker, as long as the client has nothing of an answer."""
    ejection: Ejection
    error: type[KvscoutError]
    """Error that ends the request; `statuses` has its gRPC code, `refusals` its HTTP status, and the picker's."""
    field: str | None = None


RULES: Final[Mapping[Fault, Rule]] = {
    Fault.REQUEST: Rule(Payer.CLIENT, False, Ejection.NEVER, InvalidArgument, "request"),
    Fault.OVERLOAD: Rule(Payer.NOBODY, True, Ejection.BACKOFF, ResourceExhausted),
    Fault.REFUSED: Rule(Payer.WORKER, True, Ejection.COUNTS_IF_OTHERS_RUN_IT, Unavailable),
    Fault.WORKER: Rule(Payer.WORKER, True, Ejection.COUNTS, Unavailable),
    Fault.TIME: Rule(Payer.NOBODY, False, Ejection.NEVER, DeadlineExceeded),
    Fault.GATEWAY: Rule(Payer.GATEWAY, False, Ejection.NEVER, ResourceExhausted),
    Fault.BALANCER: Rule(Payer.NOBODY, False, Ejection.NEVER, Unavailable),
}


class EngineFailed(Exception):
    """The engine did not run the request, or not to its end. Never reaches a client as it is: see `exchange`.

    As text it has our words alone, for logs and other services: engines quote prompts in what they say.

    Attributes:
        summary: Our words alone, without an address.
        message: With what the engine says, for the client: it names no address.
        detail: For logs and operators: what happened at which address; "" = the message says it.
        fault: Whose fault it is.
        unreachable: There was no connection: the engine cannot have begun with the request.
        retry_after_seconds: When a later try may succeed, as the engine says.
        answer: What it answered instead of running it: status, headers, body; None = it did not.
    """

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        said: str = "",
        fault: Fault = Fault.WORKER,
        retry_after_seconds: float | None = None,
        answer: tuple[int, Headers, bytes] | None = None,
        unreachable: bool = False,
    ) -> None:
        super().__init__(detail or message)
        self.summary = message
        self.detail = detail
        self.message = f"{message}: {said[:MAX_MESSAGE]}" if said else message
        self.fault = fault
        self.retry_after_seconds = retry_after_seconds
        self.answer = answer
        self.unreachable = unreachable
        self.worker_id = ""
        """Worker of the engine, where it is known."""

    @property
    def rule(self) -> Rule:
        """Return the row of its fault."""
        return RULES[self.fault]

    def error(self, suffix: str = "") -> KvscoutError:
        """Return the error for the client."""
        rule = self.rule
        # Where a later try may succeed.
        wait = (self.retry_after_seconds or 1.0) if rule.error in (ResourceExhausted, Unavailable) else None
        return rule.error(self.message + suffix, field=rule.field, retry_after_seconds=wait)

    def final_error(self, *, passed: bool) -> KvscoutError | None:
        """Return what ends the request now; None = it can be tried elsewhere.

        Args:
            passed: The client has something of the answer.
        """
        if not self.rule.retried:
            return self.error()
        return InternalError(f"failed after its first token: {self.message}") if passed else None


def failed_everywhere(failures: Sequence[EngineFailed], suffix: str = "") -> KvscoutError:
    """Return the error of a request that no worker ran: the one that all of them gave, else `Unavailable`.

    Args:
        failures: In the order of the attempts, at least one.
        suffix: Of the message.
    """
    if len({failure.rule.error for failure in failures}) > 1:
        return Unavailable(failures[-1].message + suffix, retry_after_seconds=1.0)
    error = failures[-1].error(suffix)
    waits = [one.retry_after_seconds for one in failures if one.retry_after_seconds is not None]
    error.retry_after_seconds = min(waits) if waits and isinstance(error, ResourceExhausted) else 1.0
    return error


def failure_behind(error: BaseException) -> EngineFailed | None:
    """Return the failure of an engine behind an error; None = no engine is behind it."""
    return error.__cause__ if isinstance(error.__cause__, EngineFailed) else None


def fault_of_status(status: int, *, retry_after: bool, clients_key: bool = False) -> Fault:
    """Return the fault of an HTTP status other than 200.

    Args:
        status: Of the answer, or the code of an error inside a stream.
        retry_after: It came with a Retry-After.
        clients_key: The engine was shown the client's own key, or none because the client has none.
    """
    if clients_key and status in KEY_REFUSALS:
        return Fault.REQUEST
    if status == 429 or (status == 503 and retry_after):
        return Fault.OVERLOAD
    if 400 <= status < 500 and status not in _MISFITS:
        return Fault.REQUEST
    return Fault.REFUSED


def transport_failure(endpoint: str, error: HttpFailed) -> EngineFailed:
    """Return the failure of a connection: there is no answer, or not all of it."""
    # Ports are not among our own resources: they run out for one address at a time, and another worker has its own.
    fault = Fault.GATEWAY if error.kind is FailureKind.RESOURCES else Fault.WORKER
    return EngineFailed(
        _TRANSPORT_FAILURES[error.kind],
        detail=f"{endpoint}: {error}",
        fault=fault,
        unreachable=error.kind is FailureKind.UNREACHABLE,
    )


def refused(status: int, headers: Headers, body: bytes, *, clients_key: bool = False) -> EngineFailed:
    """Return the failure of an answer that is no success; `clients_key` as in `fault_of_status`."""
    text = body.decode(errors="replace")
    try:
        document = json.loads(text)
        text = str(document.get("error", document).get("message", text))
    except (ValueError, AttributeError, RecursionError):
        pass  # not OpenAI's error shape: the text itself says it
    retry_after = next((value for name, value in headers if name.lower() == "retry-after"), "")
    return EngineFailed(
        f"engine answered {status}",
        said=text,
        fault=fault_of_status(status, retry_after=bool(retry_after), clients_key=clients_key),
        retry_after_seconds=float(retry_after) if retry_after.isdecimal() else None,
        answer=(status, headers, body),
    )


def not_streamed(body: bytes) -> EngineFailed:
    """Return the failure of an engine that answered a streamed call with one JSON document."""
    text = body.decode(errors="replace")
    try:
        document = json.loads(text)
        if isinstance(document, dict) and document.get("error"):
            return reported(document["error"])
    except (ValueError, RecursionError):
        pass  # it is shown as it is
    return EngineFailed("the engine answered a streamed call with a JSON document", said=text, fault=Fault.REFUSED)


def reported(error: Any) -> EngineFailed:
    """Return what an engine reports inside a stream, in OpenAI's shape or as plain text."""
    if not isinstance(error, dict):
        return EngineFailed(_REPORTS, said=str(error), fault=Fault.REFUSED)
    code = error.get("code")
    if isinstance(code, str) and code.isdecimal() and len(code) == 3:
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        fault = fault_of_status(code, retry_after=False)
    else:
        named = (name for name in (error.get("type"), code) if isinstance(name, str))
        fault = next((_REPORTED[name] for name in named if name in _REPORTED), Fault.REFUSED)
    return EngineFailed(_REPORTS, said=str(error.get("message", error)), fault=fault)
