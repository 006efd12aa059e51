"""Sessions of turns, and the generator of multi-turn conversations.

A *session* is one conversation. Its first turn is due at a time fixed in advance; each later turn is due
`think_seconds` after the answer before it was complete, and its prompt is everything said so far: the earlier
prompts, the model's own replies and the new tokens of the user.

The generator models a chat service in front of one model::

    app 0 ─ system prompt 0 ─┬─ session: context + question, reply, question, reply, …
                             └─ session: …
    app 1 ─ system prompt 1 ─── …

* Several *apps* share the model. Each has one system prompt; apps are chosen by a Zipf law, so that a few are busy.
* A session opens with a long message (a document, code, retrieved passages) and goes on with shorter ones.
* Sessions arrive by a Poisson process that does not know how the system is doing: open loop at session level. Within
  a session the user waits for the reply, as users do, so a slow system shifts later turns but is never spared one:
  every run of a seed sends the same sessions with the same turns.

Everything is a function of the parameters; the same seed gives the same tokens and times.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvscout_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    new_tokens: array[int]
    """Tokens that the prompt adds to the history, u32 token ids (`array("I")`); never empty."""
    max_tokens: int
    """Tokens to generate; the engine ignores its end-of-sequence token."""
    think_seconds: float
    """From the end of the reply before it to this turn; 0 in the first."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation."""

    session_id: str
    start_seconds: float
    """Due time of its first turn, from the start of the run."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Integers drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One value."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Integers with a long tail: log-normal, cut to `low`..`high`."""

    median: int
    sigma: float
    """Standard deviation of the logarithm."""
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One value."""
        return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Parameters of the multi-turn generator.

    The defaults are a chat service scaled to what a laptop can drive in half a minute: about 280 requests, 10 a second
    at the peak, prompts of 3,400 tokens on average and 9,000 at most. Think times are those of a conversation of a few
    minutes, compressed.
    """

    sessions: int = 50
    sessions_per_second: float = 2.5
    """Mean arrival rate of sessions (Poisson)."""
    seed: int = 0
    apps: int = 16
    app_skew: float = 1.0
    """Zipf exponent of the apps' popularity; 0 = all alike."""
    system_prompt_tokens: Range = Range(64, 256)
    """Length of an app's system prompt."""
    turns: Range = Range(3, 8)
    """Requests of a session."""
    first_message_tokens: LogNormal = LogNormal(median=2048, sigma=0.6, low=256, high=6144)
    """New tokens of a session's first turn, after the system prompt."""
    message_tokens: Range = Range(48, 384)
    """New tokens of each later turn."""
    output_tokens: Range = Range(16, 32)
    """Tokens generated a turn."""
    think_seconds: float = 1.5
    """Mean think time (exponential, at most four times the mean)."""
    vocab_size: int = 32_000
    """Token ids are below it."""

    def validate(self) -> MultiTurn:
        """Itself, if every parameter is in range.

        Raises:
            ConfigError: Naming the first one that is not.
        """
        for name in ("sessions", "apps"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if not (self.sessions_per_second > 0 and math.isfinite(self.sessions_per_second)):
            raise ConfigError("must be a positive number", field="sessions_per_second")
        for name in ("app_skew", "think_seconds"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError("must not be negative", field=name)
        if not 2 <= self.vocab_size <= 65_536:
            raise ConfigError("must be between 2 and 65,536", field="vocab_size")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, LogNormal) and not (0 < value.low <= value.median <= value.high and value.sigma >= 0):
                raise ConfigError(f"{value} has no values from 1 up", field=field.name)
            lowest = 0 if field.name == "system_prompt_tokens" else 1
            if isinstance(value, Range) and not lowest <= value.low <= value.high:
                raise ConfigError(f"{value.low}..{value.high} is not a range from {lowest} up", field=field.name)
        return self


def multi_turn(parameters: MultiTurn) -> Iterator[Session]:
    """Yield the sessions of a parameter set, in order of their start.

    Raises:
        ConfigError: A parameter is out of range.
    """
    parameters.validate()
    rng = random.Random(parameters.seed)
    system_prompts = [
        tokens(rng, parameters.system_prompt_tokens.draw(rng), parameters.vocab_size) for _ in range(parameters.apps)
    ]
    popularity = [1.0 / (rank + 1) ** parameters.app_skew for rank in range(parameters.apps)]
    start = 0.0
    for number in range(parameters.sessions):
        start += rng.expovariate(parameters.sessions_per_second)
        (app,) = rng.choices(range(parameters.apps), popularity)
        turns = tuple(
            _turn(parameters, rng, system_prompts[app], first=index == 0) for index in range(parameters.turns.draw(rng))
        )
        yield Session(f"session-{number}", start, turns)


def tokens(rng: random.Random, count: int, vocab_size: int) -> array[int]:
    """Return random token ids below `vocab_size` (at most 65,536), as `array("I")`."""
    return array("I", (word % vocab_size for word in memoryview(rng.randbytes(2 * count)).cast("H")))


def _turn(parameters: MultiTurn, rng: random.Random, system_prompt: array[int], *, first: bool) -> Turn:
    length = (parameters.first_message_tokens if first else parameters.message_tokens).draw(rng)
    message = tokens(rng, length, parameters.vocab_size)
    think = 0.0
    if not first and parameters.think_seconds > 0:
        think = min(rng.expovariate(1 / parameters.think_seconds), 4 * parameters.think_seconds)
    return Turn(
        new_tokens=system_prompt + message if first else message,
        max_tokens=parameters.output_tokens.draw(rng),
        think_seconds=think,
    )
