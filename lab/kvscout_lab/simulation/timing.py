"""Duration of an engine's step, in whole picoseconds: sums of steps are exact, in whatever order they are added.

::

    linear    = prefill_token · prompt tokens                                      and all else that is computed
    gpu       = base + linear                                                      base: the weights are read
              | max(base, prefill_token · (prompt tokens + decoding requests))     overlapped: … while layers compute
    attention = Σ over chunks of prompts: max(context_token · (before + n), pair · (n · before + n (n + 1) / 2))
                                                                                   n tokens behind `before` others
    step      = gpu + attention + request · decoding requests + context_token · Σ their contexts
                + host + host_request · requests of the batch

A decoding request reads the keys and values of its whole context in each step, so `context_token` counts every context
in full, also where requests share blocks: sharing saves memory, not reading. By default prompts have no attention and
the host takes no time, so that a step is a sum of four terms; `engines_known` has engines that have all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvscout_common.errors import ConfigError

PICOSECONDS = 1_000_000_000_000
"""A second's."""


def picoseconds(seconds: float) -> int:
    """Return a time in whole picoseconds."""
    return round(seconds * PICOSECONDS)


def seconds(time: int) -> float:
    """Picoseconds as seconds."""
    return time / PICOSECONDS


@dataclass(frozen=True, slots=True)
class StepTime:
    """The rates of an engine; the defaults are about those of a model of 70B on eight large accelerators."""

    base_ms: float = 8.0
    prefill_us_per_token: float = 50.0
    decode_us_per_request: float = 50.0
    context_ns_per_token: float = 15.0
    attention_ps_per_pair: float = 0.0
    """Picoseconds of a prompt token and each token before it; 0 = a prompt's attention takes no time of its own."""
    overlapped: bool = False
    """Weights are read while the layers compute: whichever takes longer counts."""
    host_ms: float = 0.0
    """Between two steps, on the host: no accelerator makes it shorter."""
    host_us_per_request: float = 0.0
    """And for each request of the batch."""

    def validate(self) -> StepTime:
        """Itself, if every rate is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"must be a finite number of at least 0, not {value}", field=field.name)
        if not self.base_ms > 0:
            raise ConfigError("must be above 0", field="base_ms")
        return self

    def rates(self, prefill_speed: float = 1.0, decode_speed: float = 1.0) -> Rates:
        """In picoseconds.

        Args:
            prefill_speed: Divides what prompts take.
            decode_speed: Divides all else but the host's time.
        """
        return Rates(
            base=round(self.base_ms * 1e9 / decode_speed),
            prefill_token=round(self.prefill_us_per_token * 1e6 / prefill_speed),
            request=round(self.decode_us_per_request * 1e6 / decode_speed),
            context_token=round(self.context_ns_per_token * 1e3 / decode_speed),
            pair=round(self.attention_ps_per_pair / prefill_speed),
            overlapped=self.overlapped,
            host=round(self.host_ms * 1e9),
            host_request=round(self.host_us_per_request * 1e6),
        )


class Rates(NamedTuple):
    """Rates of one worker, in picoseconds; see `StepTime`."""

    base: int
    prefill_token: int
    request: int
    context_token: int
    pair: int
    overlapped: bool
    host: int
    host_request: int

    def attention(self, before: int, tokens: int) -> int:
        """Return the attention time of a chunk after `before` tokens; 0 where it takes no time of its own."""
        if not self.pair:
            return 0
        pairs = tokens * before + tokens * (tokens + 1) // 2
        return max(self.pair * pairs, self.context_token * (before + tokens))

    def step(self, prompt_tokens: int, requests: int, contexts: int, attention: int, batch: int) -> int:
        """Return the length of a step.

        Args:
            prompt_tokens: Prompt tokens of all chunks.
            requests: That decode.
            contexts: Σ theirs, in tokens.
            attention: Σ of all chunks.
            batch: Requests, computed prompts among them.
        """
        if self.overlapped:
            gpu = max(self.base, self.prefill_token * (prompt_tokens + requests))
        else:
            gpu = self.base + self.prefill_token * prompt_tokens
        reading = self.request * requests + self.context_token * contexts
        return gpu + reading + attention + self.host + self.host_request * batch

    def alone(self, before: int, tokens: int, budget: int) -> int:
        """At least what a prompt takes that has an engine to itself.

        Args:
            before: Tokens of it that are cached.
            tokens: The others.
            budget: Tokens of a step.
        """
        took = 0
        while tokens > 0:
            chunk = min(tokens, budget)
            decoded = tokens == 1 and self.request < self.prefill_token
            took += self.step(chunk - decoded, int(decoded), 0, self.attention(before, chunk), 1)
            before, tokens = before + chunk, tokens - chunk
        return took
