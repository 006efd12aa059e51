"""Cells of `kvscout bench routers`: the load of the clients, the caches of the engines, and what goes wrong meanwhile.

All are OpenAI chat completions of text, open loop at the level of sessions: what every router reads. Lengths are a
thirtieth of a service's, so that eight simulated engines on two cores are busy and the machine is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvscout_lab.workloads.generators import Agents, agents
from kvscout_lab.workloads.sessions import LogNormal, MultiTurn, Range, multi_turn
from kvscout_lab.workloads.workload import Workload, at_rate, from_sessions

BLOCK_SIZE: Final = 16
ROOMY_BLOCKS: Final = 16_384
"""KV blocks of an engine: more than one run fills."""
TIGHT_BLOCKS: Final = 512
"""KV blocks of an engine: two or three conversations; all engines together hold a part of what comes back."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one run of a router is."""

    title: str
    make: Callable[[float, int], Workload]
    """By seconds and seed."""
    blocks: int = ROOMY_BLOCKS
    """KV blocks of each engine."""
    routers: int = 1
    """Processes of the router; sessions go to them in turn, request by request."""
    restarts: int = 0
    """Engines that restart in place at half time, and lose their caches."""
    bypasses: bool = False
    """As many sessions of the same kind go to the engines past the router, to each in turn."""


def chats(seconds: float, seed: int) -> Workload:
    """Chats of a few turns behind the system prompts of 16 apps, 1.6 sessions a second."""
    parameters = MultiTurn(
        sessions=max(2, round(seconds * 1.6)),
        sessions_per_second=1.6,
        seed=seed,
        system_prompt_tokens=Range(64, 256),
        first_message_tokens=LogNormal(median=1_500, sigma=0.6, low=256, high=5_000),
        message_tokens=Range(48, 256),
        output_tokens=Range(16, 32),
        turns=Range(3, 6),
        think_seconds=2.0,
    )
    return _with_limits(from_sessions("chats", multi_turn(parameters), BLOCK_SIZE))


def tool_agents(seconds: float, seed: int) -> Workload:
    """Sessions of agents that pause while tools run, behind long instructions that sessions of an agent share."""
    parameters = Agents(
        sessions=max(2, round(seconds * 0.8)),
        seed=seed,
        block_size=BLOCK_SIZE,
        agents=12,
        instructions=LogNormal(median=1_600, sigma=0.4, low=600, high=4_000),
        task=LogNormal(median=300, sigma=0.8, low=16, high=1_500),
        observation=LogNormal(median=160, sigma=0.8, low=16, high=800),
        turns=Range(4, 10),
        output=LogNormal(median=24, sigma=0.5, low=8, high=80),
        tool_seconds=1.5,
    )
    return _with_limits(at_rate(agents(parameters), 0.8))


def _with_limits(workload: Workload) -> Workload:
    """Return the same flows whose clients set `max_tokens` to what they get: every router's estimate is as good."""
    flows = [
        flow._replace(turns=tuple(turn._replace(max_tokens=turn.output_tokens) for turn in flow.turns))
        for flow in workload.flows
    ]
    return replace(workload, flows=tuple(flows))


CELLS: Final[Mapping[str, Cell]] = {
    "chat": Cell("chats, roomy caches", chats),
    "tight": Cell("chats, caches that evict", chats, blocks=TIGHT_BLOCKS),
    "agents": Cell("agents with tools, caches that evict", tool_agents, blocks=TIGHT_BLOCKS),
    "restarts": Cell("chats, 3 of 8 engines restart", chats, restarts=3),
    "bypass": Cell("chats, half of the traffic past the router, caches that evict", chats, TIGHT_BLOCKS, bypasses=True),
    "four": Cell("chats, four processes of the router", chats, routers=4),
}
