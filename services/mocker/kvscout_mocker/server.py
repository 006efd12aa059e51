"""HTTP of the engines: applications, JSON bodies, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kvscout_common.errors import InternalError, InvalidArgument, KvscoutError, NotFound, ResourceExhausted, Unavailable

Document = dict[str, Any]

MAX_BODY_BYTES = 64 * 1024 * 1024
_STATUS: dict[type[KvscoutError], tuple[int, str]] = {
    InvalidArgument: (400, "BadRequestError"),
    NotFound: (404, "NotFoundError"),
    ResourceExhausted: (503, "ServiceUnavailableError"),
    Unavailable: (503, "ServiceUnavailableError"),
    InternalError: (500, "InternalServerError"),
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application() -> web.Application:
    """Return an aiohttp application without routes that answers errors as vLLM does."""
    return web.Application(middlewares=[_openai_errors], client_max_size=MAX_BODY_BYTES)


async def json_body(http: web.Request) -> object:
    """Return the body of a request.

    Raises:
        InvalidArgument: It is not JSON.
    """
    try:
        body: object = json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is not JSON: {error}", field="body") from None
    return body


def error_document(error: KvscoutError) -> Document:
    """Return an error of the tree in OpenAI's shape, for a body or for an event within a stream."""
    status, kind = status_of(error)
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": status}}


def status_of(error: KvscoutError) -> tuple[int, str]:
    """Return the HTTP status of an error and what vLLM calls its kind."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def retry_headers(error: KvscoutError) -> dict[str, str]:
    """Return the headers that say when to try again."""
    retry = error.retry_after_seconds
    return {} if retry is None else {"Retry-After": str(max(1, round(retry)))}


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        # The client disconnected during a write: there is nobody to report to, and nothing has failed.
        raise asyncio.CancelledError from None
    except web.HTTPException as error:
        kind = error.reason.replace(" ", "") + "Error"
        document = {"error": {"message": error.reason, "type": kind, "param": None, "code": error.status}}
        return web.json_response(document, status=error.status)
    except tuple(_STATUS) as error:
        return web.json_response(error_document(error), status=status_of(error)[0], headers=retry_headers(error))
