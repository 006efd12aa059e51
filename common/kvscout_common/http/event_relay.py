"""A stream of server-sent events on its way from an engine to a client. Pure: bytes in, bytes out, and a report.

A line that begins with `data:` is an event: engines write each document as one line, and no client waits for more.
"""

from __future__ import annotations

import json

from kvscout.v1 import gateway_pb2
from kvscout_common.http.chunk_documents import Documents, NoDocument, Noticed, load
from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.http import MAX_EVENT_BYTES, MAX_ID_CHARACTERS, MAX_WITHHELD_BYTES, Form, StreamReport

MAX_FINISH_REASON = 64
"""Characters of an engine's own word that are passed on."""

_DONE = b"[DONE]"
_FINISH = {
    "stop": gateway_pb2.FINISH_REASON_STOP,
    "length": gateway_pb2.FINISH_REASON_LENGTH,
    "abort": gateway_pb2.FINISH_REASON_ABORT,
}


class EventRelay:
    """One stream, in chunks of any size.

    Args:
        form: What becomes of it.
        dialect: Of its documents.
        max_tokens: Tokens at which the output ends; None = with what the engine sends.
        report: Is kept up to date.
    """

    def __init__(self, form: Form, dialect: Dialect, max_tokens: int | None, report: StreamReport) -> None:
        self._messages = form is Form.MESSAGES
        self._drops_usage = form is Form.WITHOUT_USAGE
        self._documents = Documents(dialect, one_choice=self._messages)
        self._max_tokens = max_tokens
        self._tokens = 0
        self._texts = 0
        """Chunks of text that came without token ids."""
        self._finished = False
        self.report = report
        self.over = False
        """Nothing more is to be passed on."""
        self.failure = ""
        """Why it ended before its end."""
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._withheld = bytearray()
        self._speaking = False
        """Something has come that a client waits for."""
        self._drops_blank = False
        self._message: gateway_pb2.GenerateResponse | None = None

    def feed(self, data: bytes, now: float) -> bytes:
        """Take the next bytes; return what is to be passed on: bytes, or a message; b"" = nothing yet."""
        if b"\n" not in data:
            self._hold(data)
            return b""
        head, _, tail = data.rpartition(b"\n")
        self._line.append(head)
        lines = b"".join(self._line).split(b"\n")
        self._line.clear()
        self._line_bytes = 0
        for line in lines:
            self._take(line + b"\n", now)
            if self.over:
                break
        else:
            if tail:
                self._hold(tail)
        return self._passed_on()

    def end(self, now: float) -> bytes:
        """End the body; return what is still to be passed on of it."""
        rest = b"".join(self._line)
        self._line.clear()
        if rest and not self.over:
            self._take(rest, now)
        self._speaking = self._speaking or not self.over
        self.over = True
        return self._passed_on()

    def _passed_on(self) -> bytes:
        if self._messages:
            message, self._message = self._message, None
            passed = b"" if message is None else message.SerializeToString()
        elif self._speaking or len(self._withheld) > MAX_WITHHELD_BYTES:
            passed = bytes(self._withheld)
            self._withheld.clear()
        else:
            passed = b""
        self.report.passed += len(passed)
        return passed

    def _hold(self, data: bytes) -> None:
        self._line.append(data)
        self._line_bytes += len(data)
        if self._line_bytes > MAX_EVENT_BYTES:
            self._line.clear()
            self._fail(f"an event of over {MAX_EVENT_BYTES >> 20} MiB")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.over = True

    def _take(self, line: bytes, now: float) -> None:
        blank, self._drops_blank = self._drops_blank and not line.strip(b"\r\n"), False
        if blank:
            return
        if line.startswith(b"data:"):
            payload = line[5:].strip(b" \t\r\n")
            if payload == _DONE:
                self._done()
            elif payload and not self._event(payload, now):
                return
        if not self._messages:
            self._withheld += line

    def _done(self) -> None:
        self._speaking = self.report.done = True
        self.over = self._messages

    def _event(self, payload: bytes, now: float) -> bool:
        """False: the line is not passed on."""
        report = self.report
        report.events += 1
        try:
            found = self._documents.read(load(payload))
        except NoDocument as error:
            if self._messages:
                self._fail(f"an event that is not a completion chunk: {error}")
            self._speaking = True
            return True
        if found.error is not None:
            return self._reported(found)
        if found.wrong and self._messages:
            self._fail("an event that is not a completion chunk: a field of it has the wrong type")
            return False
        over = self._beyond(found)
        if over:
            report.overrun = report.done = self.over = True
            if not self._cut(found, over):
                return False
        self._account(found, now)
        if self._messages:
            self._add(found)
        if found.is_end:
            self._done()
        self._speaking = self._speaking or not found.empty
        if self._drops_usage and found.only_usage:
            self._drops_blank = True
            return False
        return True

    def _reported(self, found: Noticed) -> bool:
        self.report.error = _json(found.error)
        if self._messages or not (self._speaking or self.report.passed):
            self.over = True
            return False
        return True

    def _beyond(self, found: Noticed) -> int:
        """Return the number of its tokens that are past the end."""
        self._tokens += len(found.token_ids)
        # Each stands for a token at least, but for what was held back and comes with the end.
        self._texts += bool((found.text or found.other_output) and not found.token_ids and not found.finish)
        if self._finished and self._messages and (found.token_ids or found.text):
            return max(1, len(found.token_ids))
        if self._max_tokens is None or not found.has_output:
            return 0
        return max(0, max(self._tokens, self._texts) - self._max_tokens)

    def _cut(self, found: Noticed, over: int) -> bool:
        """Leaves out what is past the end; false: all of it."""
        if not self._messages or self._finished:
            return False
        del found.token_ids[max(0, len(found.token_ids) - over) :]
        found.text, found.other_output, found.finish = "", False, "length"
        return True

    def _account(self, found: Noticed, now: float) -> None:
        report = self.report
        if not report.answer_id and len(found.answer_id) <= MAX_ID_CHARACTERS:
            report.answer_id = _utf8(found.answer_id)
        if found.has_output:
            report.outputs += 1
            report.tokens += len(found.token_ids) or 1
            report.first_output_at = report.first_output_at or now
            report.last_output_at = now
        if self._documents.usage is not None:
            report.prompt_tokens, report.cached_tokens, report.output_tokens = self._documents.usage
        if found.finish:
            self._finished = True
            report.finish = _utf8(found.finish)
        if found.has_output or found.finish or found.usage is not None:
            report.progress_at = now

    def _add(self, found: Noticed) -> None:
        if not (found.token_ids or found.text or found.finish or found.usage is not None):
            return
        message = self._message = self._message or gateway_pb2.GenerateResponse()
        message.token_ids.extend(found.token_ids)
        message.text += _utf8(found.text)
        if found.finish:
            message.finish_reason = _FINISH.get(found.finish, gateway_pb2.FINISH_REASON_OTHER)
            message.engine_finish_reason = _utf8(found.finish[:MAX_FINISH_REASON])
        if found.usage is not None:
            _set_usage(message.usage, found.usage)


def _set_usage(message: gateway_pb2.Usage, usage: Usage) -> None:
    message.prompt_tokens, message.completion_tokens = usage.prompt_tokens, usage.output_tokens
    if usage.cached_tokens is None:
        message.ClearField("cached_tokens")
    else:
        message.cached_tokens = usage.cached_tokens


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _utf8(text: str) -> str:
    """Return the text, with a question mark for each lone surrogate: JSON can carry them, messages cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
