"""Errors in the shape of each dialect; an engine's refusal is passed on as it is."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

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
from kvscout_common.transport.statuses import status_code
from kvscout_gateway.engines.faults import EngineFailed, Payer, failure_behind
from kvscout_gateway.fronts.client_paths import UnknownPath
from kvscout_gateway.fronts.headers import JSON_HEADERS, WORKER_HEADER
from kvscout_gateway.fronts.stored_responses import ResponseNotFound
from kvscout_gateway.values.dialects import ErrorShape
from kvscout_gateway.values.prompt import PromptTooLong

log = logging.getLogger("kvscout.gateway")
_defects = RateLimitedLog(log, period_seconds=10.0)

METHOD_NOT_ALLOWED: Final = 405
STATUSES: Final[dict[type[KvscoutError], tuple[int, str, str | None]]] = {
    InvalidArgument: (400, "invalid_request_error", None),
    Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    PermissionDenied: (403, "permission_error", None),
    UnknownPath: (404, "invalid_request_error", None),
    ResponseNotFound: (404, "invalid_request_error", "previous_response_not_found"),
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
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type of each status; of another one by its hundreds: `invalid_request_error`, `api_error`."""
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


def status_of(front: str, error: BaseException) -> str:
    """Return the status that a front answers an error with.

    Args:
        front: Path of HTTP, or an rpc.
        error: What was raised.
    """
    if not front.startswith("/"):
        return status_code(error if isinstance(error, KvscoutError) else InternalError).name
    if isinstance(error, HttpRefused):
        return str(error.status)
    failed = error if isinstance(error, EngineFailed) else failure_behind(error)
    answer = _engines_own(failed) if failed is not None else None
    return str(answer[0] if answer is not None else _row_of(error)[0])


def refusal_of(
    error: Exception, *, shape: ErrorShape = ErrorShape.OPENAI, request_id: str = "", in_full: bool = False
) -> Refusal:
    """Return the answer for an error; an unexpected one is logged, and answered in general terms.

    Args:
        error: What was raised.
        shape: Of the dialect.
        request_id: "" = none is known.
        in_full: With the addresses that are in it, for operators.
    """
    failed = failure_behind(error)
    if failed is not None and (answer := _engines_own(failed)) is not None:
        status, headers, body = answer
        kept = [(name, value) for name, value in headers if name.lower() in _KEPT]
        if failed.worker_id:
            kept.append((WORKER_HEADER, failed.worker_id))
        return Refusal(status, kept, body)
    if not isinstance(error, KvscoutError):
        _defects.warning(type(error).__name__, "request %s failed: %r", request_id, error, error=error)
        error = InternalError("the gateway failed; its log has the details")
    if not in_full:
        error = error.for_clients()
    message = f"{error} ({failed.detail})" if in_full and failed is not None and failed.detail else str(error)
    status, kind, code = _row_of(error)
    headers = list(JSON_HEADERS)
    if isinstance(error, WrongMethod):
        headers.append(("Allow", ", ".join(error.known)))
    if error.retry_after_seconds is not None or status in (429, 503):
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_seconds or 1)))))
    if status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    return Refusal(status, headers, shaped(shape, status, message, kind, code=code, param=error.field))


def _engines_own(failed: EngineFailed) -> tuple[int, Headers, bytes] | None:
    """Return an engine's answer that is passed on in place of ours; None = ours is."""
    if failed.answer is None:
        return None
    status = failed.answer[0]
    passed_on = status >= 400 and (failed.rule.payer is Payer.CLIENT or status not in _OURS_TO_SETTLE)
    return failed.answer if passed_on else None


def _row_of(error: BaseException) -> tuple[int, str, str | None]:
    """Return status, OpenAI's type and code of an error."""
    status, kind, code = next(
        (STATUSES[base] for base in type(error).__mro__ if base in STATUSES), STATUSES[KvscoutError]
    )
    return (METHOD_NOT_ALLOWED if isinstance(error, WrongMethod) else status), kind, code


def refusal_of_http(refused: HttpRefused, *, shape: ErrorShape = ErrorShape.OPENAI) -> Refusal:
    """Return the answer to a request that could not be read."""
    busy = {429: "rate_limit_error", 503: "service_unavailable_error"}
    kind = busy.get(refused.status)
    headers = [*JSON_HEADERS, ("Retry-After", "1")] if kind is not None else JSON_HEADERS
    body = shaped(shape, refused.status, str(refused), kind or "invalid_request_error")
    return Refusal(refused.status, headers, body)


def shaped(
    shape: ErrorShape,
    status: int,
    message: str,
    kind: str,
    *,
    code: str | None = None,
    param: str | None = None,
) -> bytes:
    """Return the body of an error.

    Args:
        shape: Of the dialect.
        status: Of the answer.
        message: Cut at 1,000 characters.
        kind: OpenAI's type.
        code: OpenAI's code; None = the status.
        param: Field of the request that is wrong; None = none, or the message says it.
    """
    message = printable(message, 1000)
    if shape is ErrorShape.ANTHROPIC:
        other = "api_error" if status >= 500 else "invalid_request_error"
        error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
        return json.dumps({"type": "error", "error": error}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or status}}).encode()


def event_of(refusal: Refusal, shape: ErrorShape = ErrorShape.OPENAI, *, events: int = 0) -> bytes:
    """Return a refusal as the last event of a stream; it first ends an event that may have been cut off.

    Args:
        refusal: The answer that it would have been.
        shape: Of the dialect.
        events: Events before it.
    """
    try:
        document = json.loads(refusal.body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "error" not in document:
        document = json.loads(shaped(shape, 502, "the engine failed", "server_error"))
    return error_event(document["error"], shape, events=events)


def error_event(error: Any, shape: ErrorShape, *, events: int = 0) -> bytes:
    """Return an error as the last event of a stream; see `event_of`.

    Args:
        error: Its object, or text.
        shape: Of the dialect.
        events: Events before it.
    """
    document: dict[str, Any] = {"error": error}
    name = b""
    if shape is not ErrorShape.OPENAI:
        name, document = b"event: error\n", {"type": "error", "error": error}
    if shape is ErrorShape.RESPONSES:
        # Documented are the fields beside the type; the object is what OpenAI sends, and what its SDKs raise.
        fields = error if isinstance(error, dict) else {"message": str(error)}
        document |= {field: fields.get(field) for field in ("code", "message", "param")}
        document["code"] = None if document["code"] is None else str(document["code"])
        document["sequence_number"] = events
    return b"\n\n" + name + b"data: " + json.dumps(document).encode() + b"\n\n"
