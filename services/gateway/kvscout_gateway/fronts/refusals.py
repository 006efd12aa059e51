"""Errors in OpenAI's format; an engine's refusal is passed on as it is."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from kvscout_common.http.http import Headers, HttpRefused
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.plain_text import printable
from kvscout_gateway.engines.faults import Payer, failure_behind
from kvscout_gateway.fronts.client_paths import UnknownPath
from kvscout_gateway.fronts.headers import JSON_HEADERS
from kvscout_gateway.values.prompt import PromptTooLong

log = logging.getLogger("kvscout.gateway")
_defects = RateLimitedLog(log, period_seconds=10.0)

METHOD_NOT_ALLOWED: Final = 405
STATUSES: Final[dict[type[KvscoutError], tuple[int, str, str | None]]] = {
    InvalidArgument: (400, "invalid_request_error", None),
    Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    PermissionDenied: (403, "permission_error", None),
    UnknownPath: (404, "invalid_request_error", None),
    NotFound: (404, "invalid_request_error", "model_not_found"),
    PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    # No 409: clients' libraries would send the same again.
    AlreadyExists: (400, "invalid_request_error", None),
    FailedPrecondition: (400, "invalid_request_error", None),
    ResourceExhausted: (429, "rate_limit_error", "overloaded"),
    Cancelled: (499, "cancelled", None),
    KvscoutError: (500, "server_error", None),
    Unimplemented: (501, "server_error", None),
    Unavailable: (503, "service_unavailable_error", None),
    DeadlineExceeded: (504, "timeout_error", None),
}
"""Status, OpenAI's type and code of each error; of a class that is not here, its nearest base counts."""
_OURS_TO_SETTLE: Final = frozenset({401, 403, 407})
"""Statuses about the gateway's own key: a client would take them for its own key's."""
_KEPT: Final = frozenset({"content-type", "retry-after", "www-authenticate"})
"""Headers of an engine's refusal."""


class WrongMethod(InvalidArgument):
    """The path is known, but not with this method.

    Args:
        known: The methods that it has.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(known)
        super().__init__(f"only {' and '.join(self.known)} is for this path")


class Refusal(NamedTuple):
    """An answer that says what went wrong."""

    status: int
    headers: Headers
    body: bytes


def refusal_of(error: Exception, *, request_id: str = "", in_full: bool = False) -> Refusal:
    """Return the answer for an error; an unexpected one is logged, and answered in general terms.

    Args:
        error: What was raised.
        request_id: "" = none is known.
        in_full: With the addresses that are in it, for operators.
    """
    failed = failure_behind(error)
    if failed is not None and failed.answer is not None:
        status, headers, body = failed.answer
        if status >= 400 and (failed.rule.payer is Payer.CLIENT or status not in _OURS_TO_SETTLE):
            kept = [(name, value) for name, value in headers if name.lower() in _KEPT]
            return Refusal(status, kept, body)
    if not isinstance(error, KvscoutError):
        _defects.warning(type(error).__name__, "request %s failed: %r", request_id, error, error=error)
        error = InternalError("the gateway has failed; its log says how")
    if not in_full:
        error = error.for_clients()
    message = f"{error} ({failed.detail})" if in_full and failed is not None and failed.detail else str(error)
    status, kind, code = next(STATUSES[base] for base in type(error).__mro__ if base in STATUSES)
    headers = list(JSON_HEADERS)
    if isinstance(error, WrongMethod):
        status = METHOD_NOT_ALLOWED
        headers.append(("Allow", ", ".join(error.known)))
    if error.retry_after_seconds is not None or status in (429, 503):
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_seconds or 1)))))
    if status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    return Refusal(status, headers, shaped(status, message, kind, code=code, param=error.field))


def refusal_of_http(refused: HttpRefused) -> Refusal:
    """Return the answer to a request that could not be read."""
    busy = {429: "rate_limit_error", 503: "service_unavailable_error"}
    kind = busy.get(refused.status)
    headers = [*JSON_HEADERS, ("Retry-After", "1")] if kind is not None else JSON_HEADERS
    return Refusal(refused.status, headers, shaped(refused.status, str(refused), kind or "invalid_request_error"))


def shaped(status: int, message: str, kind: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error object."""
    error = {"message": printable(message, 1000), "type": kind, "param": param, "code": code or status}
    return json.dumps({"error": error}).encode()


def event_of(refusal: Refusal) -> bytes:
    """Return a refusal as the last event of a stream; it first ends an event that may have been cut off."""
    try:
        document = json.loads(refusal.body)
    except (ValueError, RecursionError):
        document = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": 502}}
    return b"\n\ndata: " + json.dumps(document).encode() + b"\n\n"
