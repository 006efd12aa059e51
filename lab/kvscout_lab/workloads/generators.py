"""Workloads that are made: each a function of its parameters, the same seed the same requests at the same times.

* `conversations`: the sessions of `kvscout demo`'s generator, at the scale of a service.
* `agents`: tools and instructions of thousands of tokens, shared by all sessions of an agent; few agents are popular.
* `shared_prompt`: one system prompt before everything, short questions, long answers.
* `long_agents`: the same with contexts of 20,000 to 120,000 tokens, and more turns.
* `coding_agents`: instructions of 20,000 tokens, dozens of turns, pauses while tools run, and subagents.
* `agentic_code`: sessions that NVIDIA's AIPerf made, from a file; only their arrivals are drawn here.
* `embeddings`: short texts, many a second, and no output.
* `documents`: questions about documents, several about each, behind one short system prompt; with few requests a
  second and caches that hold a part of the documents each, it shows whether idle workers share them out.

`agents` was made to resemble what is published of Mooncake's trace of tools and agents (mean input about 8,600 tokens,
mean output about 180, 59 % of the input seen before); it is not that trace. That, and the synthetic one, are replayed
from their files.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import LogNormal, MultiTurn, Range, multi_turn
from kvscout_lab.workloads.trace import TraceRequest, read_trace
from kvscout_lab.workloads.workload import Flow, Nodes, Turn, Workload, at_rate, from_sessions, from_trace

AGENTIC_CODE: Final = Path(__file__).with_name("agentic_code.jsonl.gz")
"""Sessions of `aiperf synthesize agentic-code`; `make agentic-trace` makes the file again."""


def conversations(sessions: int, seed: int = 0, block_size: int = 64) -> Workload:
    """Multi-turn chats: system prompts of 16 apps, a document first, then questions.

    Args:
        sessions: Number of sessions.
        seed: Seed of all draws.
        block_size: Tokens a block.
    """
    parameters = MultiTurn(
        sessions=sessions,
        seed=seed,
        system_prompt_tokens=Range(256, 1_024),
        first_message_tokens=LogNormal(median=6_144, sigma=0.8, low=512, high=32_768),
        message_tokens=Range(64, 768),
        output_tokens=Range(32, 224),
        think_seconds=2.0,
    )
    return from_sessions("conversations", multi_turn(parameters), block_size)


@dataclass(frozen=True, slots=True)
class Agents:
    """Parameters of `agents`."""

    sessions: int = 1_000
    seed: int = 0
    block_size: int = 64
    agents: int = 48
    skew: float = 1.0
    """Zipf exponent of their popularity."""
    instructions: LogNormal = LogNormal(median=3_600, sigma=0.5, low=1_000, high=16_000)
    """Tokens of an agent's tools and instructions."""
    task: LogNormal = LogNormal(median=2_600, sigma=1.0, low=64, high=32_000)
    """New tokens of a session's first turn."""
    observation: LogNormal = LogNormal(median=500, sigma=0.9, low=32, high=8_000)
    """New tokens of each later turn: what a tool said."""
    turns: Range = Range(1, 2)
    output: LogNormal = LogNormal(median=130, sigma=0.8, low=8, high=1_500)
    tool_seconds: float = 2.0
    """Mean time that a tool takes."""


def agents(parameters: Agents = Agents()) -> Workload:
    """Sessions of agents, one flow each."""
    rng, nodes = random.Random(parameters.seed), Nodes()
    instructions = [parameters.instructions.draw(rng) for _ in range(parameters.agents)]
    popularity = [1.0 / (rank + 1) ** parameters.skew for rank in range(parameters.agents)]
    size = parameters.block_size
    flows, start = [], 0.0
    for _ in range(parameters.sessions):
        start += rng.expovariate(1.0)
        (agent,) = rng.choices(range(parameters.agents), popularity)
        chain = nodes.chain([("agent", agent)] * (instructions[agent] // size))
        tokens = instructions[agent]
        turns = []
        for number in range(parameters.turns.draw(rng)):
            prompt = tokens + (parameters.observation if number else parameters.task).draw(rng)
            output = parameters.output.draw(rng)
            tokens = prompt + output
            chain = nodes.extend(chain, tokens // size)
            think = rng.expovariate(1 / parameters.tool_seconds) if number else 0.0
            turns.append(Turn(chain, prompt, output, think))
        flows.append(Flow(start, tuple(turns)))
    return Workload("agents", size, tuple(flows))


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Parameters of `shared_prompt`."""

    requests: int = 2_000
    seed: int = 0
    block_size: int = 64
    prompt_tokens: int = 8_192
    """Tokens of the system prompt that all share."""
    question: LogNormal = LogNormal(median=160, sigma=0.7, low=16, high=2_000)
    output: LogNormal = LogNormal(median=250, sigma=0.6, low=16, high=1_000)


def shared_prompt(parameters: SharedPrompt = SharedPrompt()) -> Workload:
    """Return questions behind one system prompt, one flow each."""
    if parameters.prompt_tokens < 0:
        raise ConfigError("must not be negative", field="prompt_tokens")
    rng, nodes = random.Random(parameters.seed), Nodes()
    system = nodes.chain(["system"] * (parameters.prompt_tokens // parameters.block_size))

    def turn() -> Turn:
        prompt = parameters.prompt_tokens + parameters.question.draw(rng)
        output = parameters.output.draw(rng)
        return Turn(nodes.extend(system, (prompt + output) // parameters.block_size), prompt, output)

    return _single_turns("shared-prompt", parameters, rng, turn)


@dataclass(frozen=True, slots=True)
class Documents:
    """Parameters of `documents`."""

    requests: int = 1_000
    seed: int = 0
    block_size: int = 16
    documents: int = 48
    """Number of documents; questions are spread evenly."""
    prompt_tokens: int = 256
    """Tokens of the system prompt that all share."""
    document: int = 1_024
    """Tokens of each."""
    question: Range = Range(32, 96)
    output: Range = Range(8, 24)


def documents(parameters: Documents = Documents()) -> Workload:
    """Return questions about one of some documents each, one flow each."""
    rng, nodes = random.Random(parameters.seed), Nodes()
    size = parameters.block_size
    system, body = parameters.prompt_tokens // size, parameters.document // size

    def turn() -> Turn:
        about = rng.randrange(parameters.documents)
        chain = nodes.chain([*["system"] * system, *[about] * body])
        prompt = (system + body) * size + parameters.question.draw(rng)
        output = parameters.output.draw(rng)
        return Turn(nodes.extend(chain, (prompt + output) // size), prompt, output)

    return _single_turns("documents", parameters, rng, turn)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Parameters of `embeddings`."""

    requests: int = 6_000
    seed: int = 0
    block_size: int = 16
    text: LogNormal = LogNormal(median=180, sigma=0.8, low=8, high=2_000)
    instruction_tokens: int = 32
    """That all begin with."""


def embeddings(parameters: Embeddings = Embeddings()) -> Workload:
    """Return texts to embed, one flow each."""
    rng, nodes = random.Random(parameters.seed), Nodes()
    instruction = nodes.chain(["instruction"] * (parameters.instruction_tokens // parameters.block_size))

    def turn() -> Turn:
        prompt = parameters.instruction_tokens + parameters.text.draw(rng)
        chain = nodes.extend(instruction, prompt // parameters.block_size)
        return Turn(chain, prompt, 0, output_class="embeddings")

    return _single_turns("embeddings", parameters, rng, turn)


def _single_turns(
    name: str, parameters: SharedPrompt | Documents | Embeddings, rng: random.Random, turn: Callable[[], Turn]
) -> Workload:
    """Return flows of one turn each, which arrive by a Poisson process of one a second."""
    flows, start = [], 0.0
    for _ in range(parameters.requests):
        start += rng.expovariate(1.0)
        flows.append(Flow(start, (turn(),)))
    return Workload(name, parameters.block_size, tuple(flows))


def long_agents(sessions: int, seed: int = 0, block_size: int = 64) -> Workload:
    """Agents whose contexts have 20,000 to 120,000 tokens: code bases and long transcripts.

    Args:
        sessions: Number of sessions.
        seed: Seed of all draws.
        block_size: Tokens a block.
    """
    made = agents(
        Agents(
            sessions=sessions,
            seed=seed,
            block_size=block_size,
            agents=16,
            instructions=LogNormal(median=16_000, sigma=0.4, low=8_000, high=32_000),
            task=LogNormal(median=24_000, sigma=0.6, low=8_000, high=80_000),
            observation=LogNormal(median=2_000, sigma=0.8, low=128, high=8_000),
            turns=Range(2, 5),
            output=LogNormal(median=250, sigma=0.7, low=16, high=2_000),
        )
    )
    return replace(made, name="long-agents")


@dataclass(frozen=True, slots=True)
class CodingAgents:
    """Parameters of `coding_agents`."""

    sessions: int = 100
    seed: int = 0
    block_size: int = 64
    instructions: int = 20_000
    """Tokens that all sessions begin with: tools and instructions."""
    project: LogNormal = LogNormal(median=4_000, sigma=0.8, low=500, high=20_000)
    """New tokens of the first turn: what is known of the project, and the task."""
    observation: LogNormal = LogNormal(median=800, sigma=1.2, low=32, high=16_000)
    """New tokens of each later turn: what tools said."""
    turns: Range = Range(8, 40)
    output: LogNormal = LogNormal(median=160, sigma=0.8, low=16, high=2_000)
    pauses: tuple[tuple[float, float], ...] = ((0.75, 2.0), (0.17, 15.0), (0.08, 90.0))
    """Kinds of pauses between turns, their share and mean seconds: a file is read, tests run, somebody is asked."""
    subagents: float = 1.0
    """Mean number of subagents of a session, of the same instructions without a third of them, and fewer turns."""
    subagent_turns: Range = Range(3, 12)


def coding_agents(parameters: CodingAgents = CodingAgents()) -> Workload:
    """Sessions of coding agents and of their subagents, one flow each."""
    rng, nodes, size = random.Random(parameters.seed), Nodes(), parameters.block_size
    flows: list[Flow] = []

    def flow(start: float, kind: str, instructions: int, turns: int) -> Flow:
        chain = nodes.chain([kind] * (instructions // size))
        tokens, made = instructions, []
        for number in range(turns):
            prompt = tokens + (parameters.observation if number else parameters.project).draw(rng)
            output = parameters.output.draw(rng)
            tokens = prompt + output
            chain = nodes.extend(chain, tokens // size)
            made.append(Turn(chain, prompt, output, _pause(rng, parameters) if number else 0.0))
        return Flow(start, tuple(made))

    start = 0.0
    for _ in range(parameters.sessions):
        start += rng.expovariate(1.0)
        flows.append(flow(start, "main", parameters.instructions, parameters.turns.draw(rng)))
        for _ in range(round(rng.expovariate(1 / parameters.subagents)) if parameters.subagents else 0):
            begins, turns = start + rng.expovariate(1.0), parameters.subagent_turns.draw(rng)
            flows.append(flow(begins, "subagent", parameters.instructions * 2 // 3, turns))
    return Workload("coding-agents", size, tuple(sorted(flows, key=lambda each: each.start_seconds)))


def _pause(rng: random.Random, parameters: CodingAgents) -> float:
    ((_, mean),) = rng.choices(parameters.pauses, [share for share, _ in parameters.pauses])
    return rng.expovariate(1 / mean)


def agentic_code(requests: int, seed: int = 0) -> Workload:
    """Return a part of AIPerf's sessions, with arrivals of a Poisson process: in the file all begin at once.

    Args:
        requests: Turns of all sessions.
        seed: Seed of the arrivals; each has other sessions, one part after the other while there are any.
    """
    part = part_of_trace(list(read_trace(AGENTIC_CODE)), requests, seed)
    return at_rate(from_trace("agentic-code", part), 1.0, seed)


def part_of_trace(whole: list[TraceRequest], requests: int, part: int) -> list[TraceRequest]:
    """Return so many requests of a trace, from the first session on that begins in the part.

    Args:
        whole: The trace.
        requests: Of the part.
        part: Its number; behind the last part comes the first.
    """
    begin = part % max(1, len(whole) // requests) * requests
    begun = itertools.dropwhile(lambda request: request.delay_ms is not None, whole[begin:])
    return list(itertools.islice(begun, requests))


GENERATED: Final = (
    "conversations", "agents", "long-agents", "shared-prompt", "documents", "embeddings", "coding-agents",
    "agentic-code",
)  # fmt: skip
"""Names of what `generate` makes."""


def generate(name: str, requests: int, seed: int = 0, shared_tokens: int = 8_192) -> Workload:
    """Return the workload of a name, with about `requests` requests.

    Args:
        name: One of `GENERATED`.
        requests: Turns of all flows; of `agentic-code` at most as many as its file has.
        seed: Seed of all draws.
        shared_tokens: Tokens of the system prompt of `shared-prompt`.

    Raises:
        ConfigError: There is none of that name.
    """
    if name == "conversations":
        return conversations(max(1, round(requests / 5.5)), seed)
    if name == "agents":
        return agents(Agents(sessions=max(1, round(requests / 1.5)), seed=seed))
    if name == "long-agents":
        return long_agents(max(1, round(requests / 3.5)), seed)
    if name == "coding-agents":
        return coding_agents(CodingAgents(sessions=max(1, round(requests / 31.5)), seed=seed))
    if name == "agentic-code":
        return agentic_code(requests, seed)
    if name == "documents":
        return documents(Documents(requests=requests, seed=seed))
    if name == "embeddings":
        return embeddings(Embeddings(requests=requests, seed=seed))
    if name == "shared-prompt":
        return shared_prompt(SharedPrompt(requests=requests, seed=seed, prompt_tokens=shared_tokens))
    raise ConfigError(f"{name!r} is not one of {', '.join(GENERATED)}", field="workload")
