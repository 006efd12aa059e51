"""Settings of clients beside prompts: output limits, answers that come as a whole, long answers among short ones.

Generators and traces define the requests and their times; this adds the clients' settings. Each part is drawn from a
seed of its own, so that a workload with limits has the same prompts, outputs and times as without.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import LogNormal
from kvscout_lab.workloads.workload import Flow, Turn, Workload

Sign = Literal["none", "class", "prompt"]
"""Sign by which long answers are recognised: nothing, the request's output class, or another system prompt."""
SIGNS: Final[tuple[str, ...]] = get_args(Sign)
USUAL_MAX_TOKENS: Final = ((256, 0.10), (1_024, 0.20), (4_096, 0.30), (8_192, 0.15), (32_768, 0.10), (0, 0.15))
"""Values of `max_tokens` that clients and their libraries set (0 = none), and how many do."""
SHORT_ANSWERS: Final = LogNormal(median=70, sigma=0.4, low=8, high=400)
LONG_ANSWERS: Final = LogNormal(median=2_500, sigma=0.4, low=800, high=8_000)
_OTHER_PROMPTS: Final = 1 << 40
"""Between the nodes of two families of prompts that share nothing."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Settings of the clients of a workload."""

    max_tokens: int = 0
    """That every request sets, or what it needs, rounded up to a power of two, where that is more; 0 = none."""
    usual_max_tokens: bool = False
    """Each request sets one of `USUAL_MAX_TOKENS` instead, the next larger one where its output is longer."""
    unstreamed: float = 0.0
    """Share of the requests whose answer comes as a whole: nobody sees a first token."""
    long_answers: float = 0.0
    """Share of `LONG_ANSWERS`; the others are `SHORT_ANSWERS` then. 0 = outputs as the workload has them."""
    sign: Sign = "none"
    """Sign of long answers. With `prompt`, they are those of whole flows, else of single requests."""
    classes: bool = False
    """Requests whose prompts begin with the same block say that they are of one output class."""
    sheddable: float = 0.0
    """Share of the flows whose requests have a priority below 0: they may be shed."""
    adapters: int = 0
    """LoRA adapters that flows are spread over by a Zipf law; nothing is shared between two. 0 = none are used."""
    seed: int = 0

    def validate(self) -> Clients:
        """Itself, if every setting is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for name in ("max_tokens", "adapters"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=name)
        for name in ("unstreamed", "long_answers", "sheddable"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError("must be between 0 and 1", field=name)
        if self.max_tokens and self.usual_max_tokens:
            raise ConfigError("is either one value or the usual ones", field="max_tokens")
        if self.sign not in SIGNS:
            raise ConfigError(f"is not one of {', '.join(SIGNS)}", field="sign")
        return self


def as_clients_ask(workload: Workload, clients: Clients) -> Workload:
    """Return the same workload with these settings of its clients.

    Raises:
        ConfigError: A setting is out of range; it is named.
    """
    clients.validate()
    flows = workload.flows
    if clients.long_answers:
        flows = _with_long_answers(workload, clients)
    if clients.adapters:
        draw = random.Random(f"adapters {clients.seed}")
        numbers = range(clients.adapters)
        weights = [1 / (number + 1) for number in numbers]
        flows = tuple(_adapted(flow, number) for flow in flows for number in draw.choices(numbers, weights))
    if clients.classes:
        flows = _each(flows, lambda turn: turn._replace(output_class=f"app-{turn.nodes[0] if turn.nodes else 0}"))
    if clients.max_tokens:
        flows = _each(flows, lambda turn: turn._replace(max_tokens=_enough(clients.max_tokens, turn.output_tokens)))
    if clients.usual_max_tokens:
        usual = random.Random(f"max_tokens {clients.seed}")
        flows = _each(flows, lambda turn: turn._replace(max_tokens=_usual(usual, turn.output_tokens)))
    if clients.unstreamed:
        whole = random.Random(f"unstreamed {clients.seed}")
        flows = _each(flows, lambda turn: turn._replace(streamed=whole.random() >= clients.unstreamed))
    if clients.sheddable:
        batch = random.Random(f"sheddable {clients.seed}")
        flows = tuple(
            flow._replace(turns=tuple(turn._replace(priority=-1) for turn in flow.turns))
            if batch.random() < clients.sheddable
            else flow
            for flow in flows
        )
    return replace(workload, flows=flows)


def _each(flows: Sequence[Flow], change: Callable[[Turn], Turn]) -> tuple[Flow, ...]:
    return tuple(flow._replace(turns=tuple(map(change, flow.turns))) for flow in flows)


def _enough(max_tokens: int, output: int) -> int:
    return max(max_tokens, 1 << (output - 1).bit_length()) if output > max_tokens else max_tokens


def _usual(draw: random.Random, output: int) -> int:
    ((drawn, _),) = draw.choices(USUAL_MAX_TOKENS, [weight for _, weight in USUAL_MAX_TOKENS])
    if drawn >= output or not drawn:
        return drawn
    return min((value for value, _ in USUAL_MAX_TOKENS if value >= output), default=0)


def _with_long_answers(workload: Workload, clients: Clients) -> tuple[Flow, ...]:
    draw = random.Random(f"long answers {clients.seed}")
    # Above every node there is: what comes after the first prompt of a flow is its own, and is numbered anew.
    last = max((max(turn.nodes, default=0) for flow in workload.flows for turn in flow.turns), default=0)
    size, flows = workload.block_size, []
    for flow in workload.flows:
        whole = draw.random() < clients.long_answers
        turns: list[Turn] = []
        before = tokens = 0
        nodes = array("Q")
        for turn in flow.turns:
            long = whole if clients.sign == "prompt" else draw.random() < clients.long_answers
            output = 0 if not turn.output_tokens else (LONG_ANSWERS if long else SHORT_ANSWERS).draw(draw)
            prompt = tokens + turn.prompt_tokens - before
            before, tokens = turn.prompt_tokens + turn.output_tokens, prompt + output
            if not turns:
                nodes = turn.nodes[: prompt // size]
                if long and clients.sign == "prompt":
                    nodes = array("Q", [node + _OTHER_PROMPTS for node in nodes])
            fresh = tokens // size - len(nodes)
            nodes = nodes + array("Q", range(last + 1, last + fresh + 1))
            last += fresh
            made = turn._replace(nodes=nodes, prompt_tokens=prompt, output_tokens=output)
            if clients.sign == "class":
                made = made._replace(output_class="long" if long else "short")
            turns.append(made)
        flows.append(flow._replace(turns=tuple(turns)))
    return tuple(flows)


def _adapted(flow: Flow, number: int) -> Flow:
    """Return a flow on an adapter, under which no block is that of another adapter or of the model by itself."""
    apart = 2 * (number + 1) * _OTHER_PROMPTS

    def change(turn: Turn) -> Turn:
        return turn._replace(nodes=array("Q", [node + apart for node in turn.nodes]), adapter=number + 1)

    return flow._replace(turns=tuple(map(change, flow.turns)))
