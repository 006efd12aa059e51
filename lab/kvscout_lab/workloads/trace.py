"""Reads traces in Mooncake's format and turns them into sessions of one turn each.

One JSON object a line: `timestamp` (ms from the start), `input_length`, `output_length` (tokens) and `hash_ids`, one id
per 512 tokens of the prompt, where equal ids at equal positions mean equal tokens. The prompts themselves are not in
such traces; token ids are made from the hash ids, so that prompts share exactly the prefixes that the trace says.
A trace is fully open-loop: every request has its own time, whatever happened to the others.

Public traces: https://github.com/kvcache-ai/Mooncake (FAST25-release/traces).
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import Session, Turn, tokens

TOKENS_PER_HASH = 512


class TraceRequest(NamedTuple):
    """One line of a trace."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Settings of the replay of a trace."""

    limit: int = 0
    """Number of requests replayed; 0 = all."""
    duration_seconds: float = 0.0
    """Requests due later, after scaling, are left out; 0 = none are."""
    rate_scale: float = 1.0
    """Times the recorded rate: 2 replays an hour in half an hour."""
    max_output_tokens: int = 0
    """Longer outputs are cut to this; 0 = as recorded."""
    max_input_tokens: int = 0
    """Requests with longer prompts are left out; 0 = none are."""
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


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file, in the order of the file, read line by line.

    Raises:
        ConfigError: The file cannot be read or a line is not as described; names file and line.
    """
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="trace") from error


def trace_sessions(path: Path, options: TraceOptions) -> Iterator[Session]:
    """Yield the sessions of a trace, made lazily: prompts exist only while they are needed.

    Raises:
        ConfigError: As `read_trace`, or an option is out of range, or timestamps go backwards.
    """
    options.validate()
    taken = 0
    previous = first = None
    for request in read_trace(path):
        if options.max_input_tokens and request.input_length > options.max_input_tokens:
            continue
        if previous is not None and request.timestamp_ms < previous:
            raise ConfigError(f"{path}: timestamps go backwards at {request.timestamp_ms:g}", field="trace")
        previous = request.timestamp_ms
        first = request.timestamp_ms if first is None else first
        start = (request.timestamp_ms - first) / 1000 / options.rate_scale
        if options.duration_seconds and start >= options.duration_seconds:
            return
        output = max(1, request.output_length)
        turn = Turn(
            new_tokens=prompt_tokens(request.hash_ids, request.input_length, options.vocab_size),
            max_tokens=min(output, options.max_output_tokens) if options.max_output_tokens else output,
            think_seconds=0.0,
        )
        yield Session(f"trace-{taken}", start, (turn,))
        taken += 1
        if taken == options.limit:
            return


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


def _parse(line: str, where: str) -> TraceRequest:
    try:
        fields: dict[str, Any] = json.loads(line)
        request = TraceRequest(
            float(fields["timestamp"]),
            int(fields["input_length"]),
            int(fields["output_length"]),
            tuple(map(int, fields["hash_ids"])),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: not a trace request: {error!r}", field="trace") from error
    if request.input_length < 1:
        raise ConfigError(f"{where}: input_length must be at least 1", field="trace")
    if len(request.hash_ids) != -(-request.input_length // TOKENS_PER_HASH):
        raise ConfigError(
            f"{where}: {len(request.hash_ids)} hash_ids do not cover {request.input_length} tokens", field="trace"
        )
    return request
