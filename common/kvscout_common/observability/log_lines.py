"""Log records as lines of bounded length that are nothing but text, with a limit a second for each kind.

Records quote what clients, engines and neighbours sent. Whatever that is, it writes no line of its own, moves no
cursor of a terminal and fills no disk; here, so that no place that logs has to think of it.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kvscout_common.observability import tracing
from kvscout_common.plain_text import printable

MAX_ARGUMENT_CHARACTERS = 256
"""Largest text that is filled into a message: the length of the longest id."""
MAX_MESSAGE_CHARACTERS = 2_048
MAX_TRACEBACK_CHARACTERS = 16_384
BURST_LINES = 50
"""From one place in the code, after a time without any."""
LINES_PER_SECOND = 1.0
"""From there on."""


_request_id: ContextVar[str] = ContextVar("kvscout_request_id", default="")


class about_request:
    """Context manager that marks records that are logged inside as about a request."""

    __slots__ = ("_before", "_request_id")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        self._before = _request_id.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        _request_id.reset(self._before)


def current_request_id() -> str:
    """Return the id of the request that records are about now; "" = they are about none."""
    return _request_id.get()


class BoundedFormatter(logging.Formatter):
    """Formats records whose message and traceback are `printable`, as they come."""

    def format(self, record: logging.LogRecord) -> str:
        bounded = copy.copy(record)
        bounded.msg, bounded.args = self._message(record), None
        return super().format(bounded)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei)
        if len(lines) > MAX_TRACEBACK_CHARACTERS:
            # The error itself stands at the end.
            lines = f"{lines[: MAX_TRACEBACK_CHARACTERS // 4]}\n…\n{lines[-MAX_TRACEBACK_CHARACTERS * 3 // 4 :]}"
        return "\n".join(printable(line, MAX_MESSAGE_CHARACTERS) for line in lines.split("\n"))

    @staticmethod
    def _message(record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            arguments = tuple(
                printable(value, MAX_ARGUMENT_CHARACTERS) if isinstance(value, str) else value for value in record.args
            )
            try:
                message = str(record.msg) % arguments if arguments else str(record.msg)
            except (TypeError, ValueError) as error:
                # A number of 5,000 digits, say. logging would print a traceback of its own, each time.
                message = f"{record.msg} ({error})"
        else:
            message = record.getMessage()
        more: int = getattr(record, "suppressed", 0)
        suffix = f" (… {more:,} more suppressed)" if more else ""
        return printable(message, MAX_MESSAGE_CHARACTERS) + suffix


class JsonFormatter(BoundedFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
        }
        if request_id := _request_id.get():
            entry["request_id"] = printable(request_id, MAX_ARGUMENT_CHARACTERS)
        entry |= tracing.ids()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class RateFilter(logging.Filter):
    """Lets a number of records of each place in the code pass, and has the next one that passes say how many did not.

    A record that says that it is `unlimited` passes. Thread-safe, as handlers call their filters outside of their lock.
    Bounded by the size of the code.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], tuple[float, float, int]] = {}
        """Lines that may be written, when that was so, and records suppressed since the last one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if getattr(record, "unlimited", False):
            return True
        place = (record.pathname, record.lineno)
        now = self._clock()
        with self._lock:
            left, then, suppressed = self._places.get(place, (float(BURST_LINES), now, 0))
            left = min(float(BURST_LINES), left + (now - then) * LINES_PER_SECOND)
            if left < 1:
                self._places[place] = (left, now, suppressed + 1)
                return False
            self._places[place] = (left - 1, now, 0)
        if suppressed:
            record.suppressed = suppressed
        return True


class GoneClientFilter(logging.Filter):
    """Drops the traceback that grpcio logs as an error whenever a client goes away as its call's status is written.

    Clients may do that at any moment; calls that end with nobody waiting are of no interest to an operator.
    """

    LOGGER = "grpc._cython.cygrpc"

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        kind = record.exc_info[0] if record.exc_info else None
        return record.name != self.LOGGER or kind is None or kind.__name__ != "ExecuteBatchError"
