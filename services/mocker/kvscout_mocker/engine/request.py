"""One request inside an engine and the tokens that it gets, pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

import xxhash

from kvscout_mocker.tokens.sequence import BlockTable, Sequence
from kvscout_mocker.tokens.tokenizer import RESERVED_TOKENS


class Finish(StrEnum):
    """Reason why a request ended, in the engines' words."""

    LENGTH = "length"
    STOP = "stop"
    ERROR = "error"


class RequestState(Enum):
    """State of a request."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    """Has its blocks, and another engine's tokens are on their way into them."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine."""

    request_id: str
    sequence: Sequence
    max_tokens: int
    seed: int = 0
    report_prefix: bool = False
    """Emit a Stored event for the blocks it hits too (`kv_cache_report_mode: full`)."""
    finish: Finish = Finish.LENGTH
    """Finish reason after `max_tokens` tokens."""
    fails_after: int | None = None
    """Tokens with which it fails; None: it does not fail."""
    receives: bool = False
    """Another engine computed its prompt. False once that has come, or is given up."""
    holds: bool = False
    """It computes for another engine: its blocks stay when it is done, until they are released."""
    priority: int = 0
    """Lower values go first, if the engine looks at priorities."""
    arrival: int = field(init=False, default=0)
    """Number of the request in its engine."""
    prompt_tokens: int = field(init=False)
    prompt_digest: int = field(init=False)
    table: BlockTable = field(init=False, default_factory=BlockTable)
    state: RequestState = field(init=False, default=RequestState.WAITING)
    computed_tokens: int = field(init=False, default=0)
    cached_tokens: int | None = field(init=False, default=None)
    """Prompt tokens hit when it was first admitted; None before."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.sequence)
        self.prompt_digest = xxhash.xxh3_64_intdigest(self.sequence.tokens.tobytes())

    @property
    def output_tokens(self) -> int:
        """Return tokens generated so far."""
        return len(self.sequence) - self.prompt_tokens

    def next_token(self, vocab_size: int) -> int:
        """Return the next token: a function of prompt, position and seed alone, never an end of sequence."""
        key = self.prompt_digest.to_bytes(8, "little") + self.output_tokens.to_bytes(4, "little")
        return RESERVED_TOKENS + xxhash.xxh3_64_intdigest(key, self.seed) % (vocab_size - RESERVED_TOKENS)


class Output(NamedTuple):
    """One generated token."""

    request: Request
    token: int | None
    """None: the request failed."""
    finish: Finish | None
    """Given with the last one."""


class ChoiceDelta(NamedTuple):
    """Tokens that one choice of a request got since the last read; all of them in a whole answer."""

    choice: int
    tokens: list[int]
    first: int
    """Position of the first of them in the choice."""
    finish_reason: str | None
    """Given with the last ones."""
