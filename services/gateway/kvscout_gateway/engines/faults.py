"""Whose fault it is that an engine did not run a request, which decides who pays for it.

::

    fault      such as                                         the request             the worker
    REQUEST    400, 413, 422; "code": 400 in a stream;         ends, INVALID_ARGUMENT  untouched
               401, 403 of the client's own key
    OVERLOAD   429; 503 with Retry-After                       tried elsewhere         left alone for that time
    REFUSED    5xx, 401, 403, 404, 3xx, errors in a stream     tried elsewhere         counts if another one runs it
    WORKER     refused or broken connection, nonsense, hung    tried elsewhere         counts
    TIME       no whole answer in time; health checks succeed  ends, DEADLINE_EXCEEDED untouched
    GATEWAY    no file descriptor, no memory left here         ends                    untouched
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from kvscout_common.http.http import FailureKind, Headers, HttpFailed

MAX_MESSAGE = 500
"""Characters of what an engine says that are passed on."""

_MISFITS = frozenset({401, 403, 404, 405, 407, 408})
"""Client errors that say nothing of the request: a key, a path or a model name that this engine does not have."""
KEY_REFUSALS = frozenset({401, 403})
"""What an engine says of the key that it is shown."""
_REPORTS = "the engine reports"
_REQUEST_TYPES = frozenset({"BadRequestError", "invalid_request_error"})


_TRANSPORT_FAILURES = {
    FailureKind.UNREACHABLE: "the worker cannot be reached",
    FailureKind.BROKEN: "the worker broke off",
    FailureKind.PROTOCOL: "the worker's answer makes no sense",
    FailureKind.RESOURCES: "no descriptors or no memory are left",
}


class Fault(Enum):
    """Whose fault a failure is."""

    REQUEST = "request"
    """Every engine would refuse it."""
    OVERLOAD = "overload"
    """The engine has too much to do; it is well otherwise."""
    REFUSED = "refused"
    """The engine answers, and does not run it: its own trouble, or a request that no engine survives."""
    WORKER = "worker"
    """The engine is gone, hangs, or talks nonsense."""
    TIME = "time"
    """The answer takes longer than it may, and nothing says that the engine is at fault: another one needs as long."""
    GATEWAY = "gateway"
    """This process has no resources left to ask with."""


class EngineFailed(Exception):
    """The engine did not run the request, or not to its end. Never reaches a client as it is: see `exchange`.

    As text it has our words alone, for logs and other services: engines quote prompts in what they say.

    Attributes:
        message: With what the engine says, for the client: it names no address.
        detail: For logs and operators: what happened at which address; "" = the message says it.
        fault: Whose fault it is.
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
    ) -> None:
        super().__init__(detail or message)
        self.detail = detail
        self.message = f"{message}: {said[:MAX_MESSAGE]}" if said else message
        self.fault = fault
        self.retry_after_seconds = retry_after_seconds
        self.answer = answer


def fault_of_status(status: int, *, retry_after: bool, clients_key: bool = False) -> Fault:
    """Whose fault an HTTP status other than 200 is.

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
    """There is no answer, or not all of it."""
    # Ports are not among our own resources: they run out for one address at a time, and another worker has its own.
    fault = Fault.GATEWAY if error.kind is FailureKind.RESOURCES else Fault.WORKER
    return EngineFailed(_TRANSPORT_FAILURES[error.kind], detail=f"{endpoint}: {error}", fault=fault)


def refused(status: int, headers: Headers, body: bytes, *, clients_key: bool = False) -> EngineFailed:
    """An answer that is no success; `clients_key` as in `fault_of_status`."""
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


def reported(error: Any) -> EngineFailed:
    """What an engine reports inside a stream, in OpenAI's shape or as plain text."""
    if not isinstance(error, dict):
        return EngineFailed(_REPORTS, said=str(error), fault=Fault.REFUSED)
    code = error.get("code")
    if isinstance(code, str) and code.isdecimal() and len(code) == 3:
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        fault = fault_of_status(code, retry_after=False)
    else:
        fault = Fault.REQUEST if error.get("type") in _REQUEST_TYPES else Fault.REFUSED
    return EngineFailed(_REPORTS, said=str(error.get("message", error)), fault=fault)
