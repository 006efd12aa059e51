"""Reads traces in Mooncake's format, and in AIPerf's form of it with sessions.

Mooncake's has one JSON object a line: `timestamp` (ms from the start), `input_length`, `output_length` (tokens) and
`hash_ids`, one id per 512 tokens of the prompt, where equal ids at equal positions mean equal tokens. The prompts
themselves are not in such traces; token ids are made from the hash ids, so that prompts share exactly the prefixes
that the trace says. Such a trace is fully open-loop: every request has its own time, whatever happened to the others.

In AIPerf's form (`aiperf synthesize agentic-code`) the first line of a session is as above and has a `session_id`. Each
further line of the session has a `delay` (ms after the answer before it) instead of a timestamp. Its `input_length` and
`hash_ids` are of what it adds to the prompts and answers before it.

Public traces: https://github.com/kvcache-ai/Mooncake (FAST25-release/traces).
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import Session, Turn, tokens

TOKENS_PER_HASH = 512
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
MAX_TOKENS: Final = 1 << 24
"""Of a prompt or an output: what a line claims is bounded before anything is made of it."""


class TraceRequest(NamedTuple):
    """One line of a trace."""

    timestamp_ms: float
    """From the start; that of its session's first line, where it continues one."""
    input_length: int
    """Tokens of the prompt; only the new ones, where it continues a session."""
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: str = ""
    delay_ms: float | None = None
    """From the answer before it, in the same session; None = it has its own time."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Settings of the replay of a trace."""

    limit: int = 0
    """Number of requests replayed; 0 = all."""
    duration_seconds: float = 0.0
    """Sessions that begin later, after scaling, are left out; 0 = none are."""
    rate_scale: float = 1.0
    """Times the recorded rate: 2 replays an hour in half an hour, with pauses half as long."""
    max_output_tokens: int = 0
    """Longer outputs are cut to this; 0 = as recorded."""
    max_input_tokens: int = 0
    """Requests with longer prompts are left out, with the rest of their session; 0 = none are."""
    vocab_size: int = 32_000

    def validate(self) -> TraceOptions:
        """Itself, if every option is in range.

        Raises:
            ConfigError: Naming the first one that is not.
        """
        for name in ("limit", "duration_seconds", "max_output_tokens", "max_input_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=name)
        if not 0 < self.rate_scale < float("inf"):
            raise ConfigError("must be a positive number", field="rate_scale")
        return self


def open_lines(path: Path) -> IO[str]:
    """Open a file of lines, compressed if its name ends with `.gz`."""
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file, in the order of the file, read line by line.

    Raises:
        ConfigError: The file cannot be read or a line is not as described; names file and line.
    """
    before: TraceRequest | None = None
    prompt = 0
    try:
        with open_lines(path) as lines:
            for number in itertools.count(1):
                line = lines.readline(MAX_LINE_BYTES)
                if not line:
                    return
                if line.strip():
                    before = _parse(line, before, f"{path}:{number}")
                    prompt = before.input_length + (0 if before.delay_ms is None else prompt)
                    if prompt > MAX_TOKENS:
                        raise ConfigError(f"{path}:{number}: input_length makes a prompt too long", field="trace")
                    prompt += before.output_length
                    yield before
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="trace") from error


def by_session(requests: Iterable[TraceRequest]) -> Iterator[list[TraceRequest]]:
    """Yield the requests that continue each other; most traces have one at a time."""
    session: list[TraceRequest] = []
    for request in requests:
        if session and request.delay_ms is None:
            yield session
            session = []
        session.append(request)
    if session:
        yield session


def trace_sessions(path: Path, options: TraceOptions) -> Iterator[Session]:
    """Yield the sessions of a trace, made lazily: prompts exist only while they are needed, one line is read ahead.

    Raises:
        ConfigError: As `read_trace`, or an option is out of range, or timestamps go backwards.
    """
    options.validate()
    taken = number = 0
    previous = first = None
    for requests in by_session(read_trace(path)):
        at = requests[0].timestamp_ms
        turns = tuple(itertools.islice(_turns(requests, options), options.limit - taken if options.limit else None))
        if not turns:
            continue
        if previous is not None and at < previous:
            raise ConfigError(f"{path}: timestamps go backwards at {at:g}", field="trace")
        previous = at
        first = at if first is None else first
        start = (at - first) / 1000 / options.rate_scale
        if options.duration_seconds and start >= options.duration_seconds:
            return
        yield Session(f"trace-{number}", start, turns)
        number += 1
        taken += len(turns)
        if taken == options.limit:
            return


def _turns(requests: Sequence[TraceRequest], options: TraceOptions) -> Iterator[Turn]:
    prompt = 0
    for request in requests:
        prompt += request.input_length
        if options.max_input_tokens and prompt > options.max_input_tokens:
            return
        output = max(1, request.output_length)
        output = min(output, options.max_output_tokens) if options.max_output_tokens else output
        yield Turn(
            new_tokens=prompt_tokens(request.hash_ids, request.input_length, options.vocab_size),
            max_tokens=output,
            think_seconds=(request.delay_ms or 0.0) / 1000 / options.rate_scale,
        )
        prompt += output


def prompt_tokens(hash_ids: Sequence[int], input_length: int, vocab_size: int) -> array[int]:
    """Return the prompt that hash ids stand for.

    Args:
        hash_ids: One id per 512 tokens, the last of them perhaps of fewer.
        input_length: Prompt length in tokens.
        vocab_size: Token ids are below it.
    """
    prompt = array("I")
    for hash_id in hash_ids:
        prompt += tokens(random.Random(hash_id), TOKENS_PER_HASH, vocab_size)
    return prompt[:input_length]


def _parse(line: str, before: TraceRequest | None, where: str) -> TraceRequest:
    """Return the request of a line.

    Args:
        line: The line.
        before: The request of the line before it, which it may continue.
        where: File and line, for errors.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        delay = float(fields["delay"]) if "delay" in fields else None
        request = TraceRequest(
            float(fields["timestamp"]) if delay is None else before.timestamp_ms if before else 0.0,
            int(fields["input_length"]),
            int(fields["output_length"]),
            tuple(map(int, fields["hash_ids"])),
            str(fields.get("session_id", "")),
            delay,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: not a trace request: {error!r}", field="trace") from error
    problem = _problem(request, before, has_timestamp="timestamp" in fields)
    if problem:
        raise ConfigError(f"{where}: {problem}", field="trace")
    return request


def _problem(request: TraceRequest, before: TraceRequest | None, *, has_timestamp: bool) -> str:
    """Return what is wrong with a request; "" = nothing is."""
    if request.delay_ms is not None:
        problem = "it has both timestamp and delay" if has_timestamp else _problem_of_later(request, before)
        if problem:
            return problem
    if not math.isfinite(request.timestamp_ms):
        return "timestamp must be a number"
    if not 1 <= request.input_length <= MAX_TOKENS:
        return f"input_length must be at least 1, and at most {MAX_TOKENS:,}"
    if not 0 <= request.output_length <= MAX_TOKENS:
        return f"output_length must be at least 0, and at most {MAX_TOKENS:,}"
    if len(request.hash_ids) != -(-request.input_length // TOKENS_PER_HASH):
        return f"{len(request.hash_ids)} hash_ids do not cover {request.input_length} tokens"
    return ""


def _problem_of_later(request: TraceRequest, before: TraceRequest | None) -> str:
    """Return what is wrong with a request as one that continues a session; "" = nothing is."""
    if not 0 <= (request.delay_ms or 0.0) < math.inf:
        return "delay must be a number from 0 up"
    if not request.session_id:
        return "it has a delay and no session_id"
    if before is None or before.session_id != request.session_id:
        return f"session_id {request.session_id[:64]!r}: the line before is of another session"
    return ""
