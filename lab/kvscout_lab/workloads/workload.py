"""Workloads: flows of turns. A prompt is a chain of *nodes*, block by block.

A *node* is a number that stands for a block and all before it, so that equal nodes are equal prefixes; token ids are
not needed. A *flow* is one conversation: its first turn is due at a time of its own, each later one some think time
after the answer before it. A trace in Mooncake's format is flows of one turn, fully open loop; sessions of the
generator that `kvscout demo` sends (`kvscout_lab.workloads.sessions`) and of AIPerf's traces are flows of several.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import Session
from kvscout_lab.workloads.trace import TOKENS_PER_HASH, TraceRequest, by_session


class Turn(NamedTuple):
    """One turn of a flow."""

    nodes: array[int]
    """Nodes of the complete blocks of prompt and output, in order."""
    prompt_tokens: int
    output_tokens: int
    """0 = it has none, as an embedding: it ends with what would be its first token."""
    think_seconds: float = 0.0
    """After the answer before it."""
    priority: int = 0
    max_tokens: int = 0
    """That its client set; 0 = none."""
    streamed: bool = True
    """Else its answer comes as a whole."""
    output_class: str = ""
    """That its gateway says."""
    adapter: int = 0
    """Number of its LoRA adapter; 0 = none."""


class Flow(NamedTuple):
    """One conversation."""

    start_seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Flows in order of their start."""

    name: str
    block_size: int
    flows: tuple[Flow, ...]

    def __post_init__(self) -> None:
        if not self.flows:
            raise ConfigError("has no requests", field="workload")

    @property
    def requests(self) -> int:
        """Turn of all flows."""
        return sum(len(flow.turns) for flow in self.flows)

    @property
    def span_seconds(self) -> float:
        """From the first start to the last."""
        return self.flows[-1].start_seconds - self.flows[0].start_seconds

    @property
    def flow_rate(self) -> float:
        """Flows a second."""
        return len(self.flows) / self.span_seconds if self.span_seconds else float(len(self.flows))


class Nodes:
    """Numbers prefixes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}
        self._last = 0

    def of(self, parent: int, block: object) -> int:
        """Return the node of a block behind another node; 0 = behind nothing. Equal arguments, equal nodes."""
        key = (parent, block)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self.fresh()
        return number

    def fresh(self) -> int:
        """Return a node that nothing else has."""
        self._last += 1
        return self._last

    def chain(self, blocks: Iterable[object]) -> array[int]:
        """Nodes of a prompt that begins with these blocks."""
        nodes, parent = array("Q"), 0
        for block in blocks:
            parent = self.of(parent, block)
            nodes.append(parent)
        return nodes

    def extend(self, nodes: array[int], length: int) -> array[int]:
        """`nodes` and fresh ones behind them, `length` in all; cut where there are more."""
        return nodes[:length] + array("Q", [self.fresh() for _ in range(length - len(nodes))])


def from_trace(name: str, requests: Iterable[TraceRequest], limit: int = 0) -> Workload:
    """Return the sessions of a trace, each at its own time, in blocks of 512 tokens.

    What the last hash id stands for is shared only where it is a whole block, as in an engine. What was generated is in
    later prompts of its session alone: a trace without sessions does not say which of its blocks hold it.

    Args:
        name: Name of the workload.
        requests: In order of time.
        limit: Number of requests; 0 = all.
    """
    nodes, flows = Nodes(), []
    first = None
    for session in by_session(islice(requests, limit or None)):
        opening = session[0]
        first = opening.timestamp_ms if first is None else first
        chain = nodes.chain(opening.hash_ids[: opening.input_length // TOKENS_PER_HASH])
        tokens, turns = 0, []
        for request in session:
            prompt, output = tokens + request.input_length, max(1, request.output_length)
            tokens = prompt + output
            # Behind an answer everything is this session's own.
            chain = nodes.extend(chain, tokens // TOKENS_PER_HASH)
            turns.append(Turn(chain, prompt, output, (request.delay_ms or 0.0) / 1000))
        flows.append(Flow((opening.timestamp_ms - first) / 1000, tuple(turns)))
    return Workload(name, TOKENS_PER_HASH, tuple(flows))


def from_sessions(name: str, sessions: Iterable[Session], block_size: int) -> Workload:
    """Conversations of the generator of `kvscout demo`; each prompt contains the replies before it.

    Args:
        name: Name of the workload.
        sessions: In order of their start.
        block_size: Tokens a block.
    """
    nodes = Nodes()
    return Workload(
        name,
        block_size,
        tuple(Flow(session.start_seconds, tuple(_turns(nodes, session, block_size))) for session in sessions),
    )


def _turns(nodes: Nodes, session: Session, size: int) -> Iterator[Turn]:
    opening = session.turns[0].new_tokens
    data, width = opening.tobytes(), size * opening.itemsize
    # What is said later is this conversation's own: only an opening can begin as another one does.
    chain = nodes.chain(data[at : at + width] for at in range(0, len(data) - width + 1, width))
    tokens = 0
    for turn in session.turns:
        prompt = tokens + len(turn.new_tokens)
        tokens = prompt + turn.max_tokens
        chain = nodes.extend(chain, tokens // size)
        yield Turn(chain, prompt, turn.max_tokens, turn.think_seconds)


def at_rate(workload: Workload, flows_per_second: float, seed: int = 0) -> Workload:
    """Return the same flows in the same order and rhythm, at another mean rate.

    Args:
        workload: Its flows.
        flows_per_second: The rate.
        seed: Of the Poisson process by which flows arrive that all begin at once, and so have no rhythm.
    """
    if not 0 < flows_per_second < float("inf"):
        raise ConfigError("must be a positive number", field="rate")
    if not workload.span_seconds:
        rng = random.Random(seed)
        return _restarted(workload, list(accumulate(rng.expovariate(flows_per_second) for _ in workload.flows)))
    factor = workload.flow_rate / flows_per_second
    return _restarted(workload, [flow.start_seconds * factor for flow in workload.flows])


@dataclass(frozen=True, slots=True)
class Burst:
    """Flows at the same mean rate, most of them in bursts."""

    factor: float
    """Rate within a burst, in mean rates; at most 1 / share."""
    period_seconds: float = 30.0
    """Time from burst to burst."""
    share: float = 0.2
    """Share of the time that is burst."""

    def validate(self) -> Burst:
        """Itself, if it is in range.

        Raises:
            ConfigError: Naming the field.
        """
        if not 0 < self.share < 1:
            raise ConfigError("must be above 0 and below 1", field="share")
        if not 1 <= self.factor <= 1 / self.share:
            raise ConfigError(f"must be between 1 and {1 / self.share:g}", field="factor")
        if not 0 < self.period_seconds < float("inf"):
            raise ConfigError("must be a positive number", field="period_seconds")
        return self


def in_bursts(workload: Workload, burst: Burst) -> Workload:
    """Return the same flows in the same order, each period's share of them moved into its beginning."""
    period, share, early = burst.period_seconds, burst.share, burst.factor * burst.share
    starts = []
    for flow in workload.flows:
        # The part of a period's flows that have come, turned into the part of the period after which they have.
        periods, come = divmod(flow.start_seconds / period, 1.0)
        gone = come / burst.factor if come < early else share + (come - early) * (1 - share) / (1 - early)
        starts.append((periods + gone) * period)
    return _restarted(workload, starts)


def led(workload: Workload, seconds: float) -> Workload:
    """Return the same flows, the first one `seconds` earlier: its prompt is computed when the others come."""
    first, *others = (flow.start_seconds for flow in workload.flows)
    return _restarted(workload, [first, *(start + seconds for start in others)])


def _restarted(workload: Workload, starts: Sequence[float]) -> Workload:
    flows = tuple(flow._replace(start_seconds=start) for flow, start in zip(workload.flows, starts, strict=True))
    return replace(workload, flows=flows)
