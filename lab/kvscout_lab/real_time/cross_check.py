"""The laboratory beside the real thing: the same requests simulated, and sent through a stack of processes.

Engines are slow, so that the machine's own work does not count: an empty step takes 40 ms. What is compared is the hit
rate and the order of the policies, not their milliseconds. Requests come over HTTP, as clients send them.

One run is one draw: who comes a few milliseconds earlier gets another worker, and its later turns find other caches.
The simulated runs differ in that, so that their range says what a stack may do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple

from rich.table import Table

from kvscout_lab.cells.cells import Contender, Experiment
from kvscout_lab.cells.measures import Measures, Objective
from kvscout_lab.real_time.apis import MAX_BOUND, Api, Completions, Messages, Responses
from kvscout_lab.real_time.record import Replay
from kvscout_lab.simulation.cluster import Cluster, Latencies
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.clients import Clients, as_clients_ask
from kvscout_lab.workloads.generators import Agents, agents
from kvscout_lab.workloads.sessions import LogNormal, MultiTurn, Range, Session, multi_turn
from kvscout_lab.workloads.workload import Burst, Flow, Turn, Workload, at_rate, from_sessions, in_bursts

DRAWS: Final = 8
ENGINES: Final = 16
BLOCK_SIZE: Final = 16
BLOCKS: Final = 2_560
"""Blocks of each engine: 41,000 tokens, more than the longest bound and its prompt."""
BATCHED_TOKENS: Final = 2_048
STEP: Final = StepTime(
    base_ms=40.0, prefill_us_per_token=1_100.0, decode_us_per_request=1_400.0, context_ns_per_token=1_400.0
)
LATE_SECONDS: Final = 0.02
"""By so much a stack's clients may be late."""
WARM_UP: Final = 0.1
"""Share of the requests that do not count, the first to arrive."""
BOUNDED: Final = Clients(max_tokens=MAX_BOUND)
SHORT: Final = LogNormal(median=10, sigma=0.4, low=3, high=40)
LONG: Final = LogNormal(median=130, sigma=0.4, low=50, high=400)


def conversations(seconds: float, seed: int, *, long_answers: float = 0.0) -> Workload:
    """Chats of some turns at a thirtieth of a service's scale; 5 a second for `seconds` seconds."""
    parameters = MultiTurn(
        sessions=max(1, round(seconds * 4.5)),
        sessions_per_second=4.5,
        seed=seed,
        system_prompt_tokens=Range(64, 256),
        turns=Range(2, 6),
        first_message_tokens=LogNormal(median=900, sigma=0.7, low=64, high=4_096),
        message_tokens=Range(16, 128),
        output_tokens=Range(12, 48),
        think_seconds=2.0,
    )
    draw = Random(f"answers {seed}")

    def answered(session: Session) -> Session:
        lengths = [LONG if draw.random() < long_answers else SHORT for _ in session.turns]
        turns = [replace(turn, max_tokens=one.draw(draw)) for turn, one in zip(session.turns, lengths, strict=True)]
        return replace(session, turns=tuple(turns))

    sessions = multi_turn(parameters)
    return from_sessions("conversations", map(answered, sessions) if long_answers else sessions, BLOCK_SIZE)


def small_agents(seconds: float, seed: int) -> Workload:
    """Sessions of agents at a sixth of the laboratory's scale; 10 a second for `seconds` seconds."""
    parameters = Agents(
        sessions=max(1, round(seconds * 10.0)),
        seed=seed,
        block_size=BLOCK_SIZE,
        agents=32,
        instructions=LogNormal(median=600, sigma=0.5, low=150, high=2_500),
        task=LogNormal(median=350, sigma=0.9, low=16, high=3_000),
        observation=LogNormal(median=80, sigma=0.8, low=16, high=800),
        output=LogNormal(median=24, sigma=0.7, low=4, high=160),
        tool_seconds=1.5,
    )
    return at_rate(agents(parameters), 10.0)


def tool_agents(seconds: float, seed: int) -> Workload:
    """Sessions of agents that call a tool in each turn, one session every two seconds: 4 to 12 turns each."""
    parameters = Agents(
        sessions=max(1, round(seconds * 0.5)),
        seed=seed,
        block_size=BLOCK_SIZE,
        agents=16,
        instructions=LogNormal(median=1_200, sigma=0.4, low=400, high=3_000),
        task=LogNormal(median=200, sigma=0.8, low=16, high=1_500),
        observation=LogNormal(median=140, sigma=0.8, low=16, high=800),
        turns=Range(4, 12),
        output=LogNormal(median=24, sigma=0.6, low=4, high=120),
        tool_seconds=1.5,
    )
    return at_rate(agents(parameters), 0.5)


@dataclass(frozen=True, slots=True)
class RealCell:
    """One cell that can be run in real time."""

    make: Callable[[float, int], Workload]
    """By seconds and seed."""
    clients: Clients = BOUNDED
    burst: Burst | None = None
    decode_speed: float = 1.0
    """Speed of the first engine, in multiples of the others' speed."""
    engines: int = ENGINES
    api: Callable[[], Api] = Completions
    """Of the stack's clients, for one session."""

    def workload(self, seconds: float, seed: int) -> Workload:
        """Return the workload of about `seconds` seconds."""
        made = as_clients_ask(self.make(seconds, seed), replace(self.clients, seed=seed))
        return made if self.burst is None else in_bursts(made, self.burst)


CELLS: Final[Mapping[str, RealCell]] = {
    "bounded-conversations": RealCell(conversations),
    "bounded-agents": RealCell(small_agents, Clients(max_tokens=32_768)),
    "long-answers": RealCell(lambda seconds, seed: conversations(seconds, seed, long_answers=0.3)),
    "unstreamed": RealCell(small_agents, Clients(max_tokens=MAX_BOUND, unstreamed=0.3)),
    "slow-decoder": RealCell(conversations, decode_speed=1 / 3),
    "bursts": RealCell(small_agents, burst=Burst(factor=5.0, period_seconds=15.0)),
    "agents-messages": RealCell(tool_agents, Clients(max_tokens=32_768), engines=8, api=Messages),
    "agents-responses": RealCell(tool_agents, Clients(max_tokens=32_768), engines=8, api=Responses),
}


class Outcome(NamedTuple):
    """One policy in one cell. Times are seconds."""

    policy: str
    simulated: tuple[Measures, ...]
    """One a draw."""
    hit_rate: float
    """Hit rate of the stack, as are the fields that follow."""
    ttft: float
    itl: float
    errors: int
    requests: int
    cores: float | None
    """CPU that the stack and its driver used; near the machine's number, times say more of the machine than of the
    policy. None = the system does not report it."""

    @property
    def simulated_hit_rate(self) -> float:
        """Return the mean over the draws, as the next one."""
        return fmean(each.hit_rate for each in self.simulated)

    @property
    def simulated_ttft(self) -> float:
        """See above."""
        return fmean(each.ttft.mean for each in self.simulated)

    def as_json(self) -> dict[str, Any]:
        """For JSON, times in milliseconds."""
        ttfts = [each.ttft.mean for each in self.simulated]
        hits = [each.hit_rate for each in self.simulated]
        return {
            "policy": self.policy,
            "hit_rate": {
                "laboratory": self.simulated_hit_rate,
                "range": [min(hits), max(hits)],
                "stack": self.hit_rate,
            },
            "ttft_ms": {
                "laboratory": 1000 * self.simulated_ttft,
                "range": [1000 * min(ttfts), 1000 * max(ttfts)],
                "stack": 1000 * self.ttft,
            },
            "itl_ms": {
                "laboratory": 1000 * fmean(each.itl.mean for each in self.simulated),
                "stack": 1000 * self.itl,
            },
            "requests": self.requests,
            "errors": self.errors,
            "cores": self.cores,
        }


class Checked(NamedTuple):
    """One cell."""

    cell: str
    outcomes: tuple[Outcome, ...]

    @property
    def hit_rate_difference(self) -> float:
        """Return the largest one between laboratory and stack, over the policies."""
        return max(abs(each.hit_rate - each.simulated_hit_rate) for each in self.outcomes)

    @property
    def orders(self) -> tuple[list[str], list[str]]:
        """Return the policies by mean TTFT, in the laboratory and on the stack."""
        by_laboratory = sorted(self.outcomes, key=lambda each: each.simulated_ttft)
        by_stack = sorted(self.outcomes, key=lambda each: each.ttft)
        return [each.policy for each in by_laboratory], [each.policy for each in by_stack]

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        by_laboratory, by_stack = self.orders
        return {
            "cell": self.cell,
            "hit_rate_difference": self.hit_rate_difference,
            "same_order": by_laboratory == by_stack,
            "policies": [each.as_json() for each in self.outcomes],
        }


def simulated(cell: RealCell, workload: Workload, contender: Contender) -> tuple[Measures, ...]:
    """Simulate a policy, with other draws and delays each time: a stack is one such run."""
    engine = EngineSettings(
        block_size=BLOCK_SIZE, kv_tokens=(BLOCKS - 1) * BLOCK_SIZE, max_num_batched_tokens=BATCHED_TOKENS, step=STEP
    )
    found = []
    for draw in range(DRAWS):
        cluster = Cluster(
            workers=cell.engines,
            engine=engine,
            decode_speeds=(cell.decode_speed,),
            seed=draw,
            latencies=Latencies(event_ms=5.0 + draw),
        )
        late = _late(workload, Random(draw))
        experiment = Experiment(late, cluster, objective=Objective(warm_up=WARM_UP))
        found.append(experiment.run(contender.settings, late.flow_rate))
    return tuple(found)


def _late(workload: Workload, random: Random) -> Workload:
    """Return the same, everything a little later."""

    def late(turn: Turn) -> Turn:
        return turn._replace(think_seconds=turn.think_seconds + random.uniform(0.0, LATE_SECONDS))

    def begun(flow: Flow) -> Flow:
        start = flow.start_seconds + random.uniform(0.0, LATE_SECONDS)
        return Flow(start, tuple(late(turn) for turn in flow.turns))

    flows = sorted((begun(flow) for flow in workload.flows), key=lambda flow: flow.start_seconds)
    return replace(workload, flows=tuple(flows))


def step_flags(decode_speed: float = 1.0) -> tuple[str, ...]:
    """Return the flags of a mocker that is as fast as the simulated engine."""
    return (
        *("--step-base-ms", str(STEP.base_ms / decode_speed)),
        *("--prefill-us-per-token", str(STEP.prefill_us_per_token)),
        *("--decode-us-per-request", str(STEP.decode_us_per_request / decode_speed)),
        *("--context-ns-per-token", str(STEP.context_ns_per_token / decode_speed)),
        *("--max-model-len", str((BLOCKS - 1) * BLOCK_SIZE)),
    )


def outcome(contender: Contender, found: Sequence[Measures], run: Replay, cores: float | None) -> Outcome:
    """Both, of one policy. What a stack did is taken as the laboratory takes it: without the first requests."""
    records = sorted(run.records, key=lambda record: record.scheduled)
    served = [record for record in records[int(len(records) * WARM_UP) :] if not record.error]
    streamed = [record for record in served if record.gaps_seconds]
    tokens = sum(record.output_tokens - 1 for record in streamed)
    return Outcome(
        contender.label,
        tuple(found),
        hit_rate=sum(record.cached_tokens or 0 for record in served)
        / max(1, sum(each.prompt_tokens for each in served)),
        ttft=fmean(record.ttft_seconds or 0.0 for record in served) if served else 0.0,
        itl=sum(sum(record.gaps_seconds) for record in streamed) / tokens if tokens else 0.0,
        errors=sum(bool(record.error) for record in run.records),
        requests=len(run.records),
        cores=cores,
    )


Measure = Callable[[RealCell, Workload, Contender], Awaitable[tuple[Replay, float | None]]]
"""Replays a workload on a stack of processes under a policy; returns the replay and the cores that it used."""


async def cross_check(
    contenders: Sequence[Contender],
    names: Sequence[str],
    measure: Measure,
    *,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
) -> list[Checked]:
    """Compare simulation and stack, cell by cell and policy by policy.

    Args:
        contenders: By the names of their policies; settings beside it are not carried over to the processes.
        names: Names in `CELLS`.
        measure: Runs a cell on real processes.
        seconds: In which requests come; a run takes some more.
        seed: Seed of the workloads.
        say: Called with what is going on.

    Raises:
        ProcessFailed: A process ended unasked.
    """
    checked = []
    for name in names:
        cell = CELLS[name]
        workload, outcomes = cell.workload(seconds, seed), []
        for contender in contenders:
            say(f"{name}: {contender.label}, {workload.requests} requests in real time")
            found = simulated(cell, workload, contender)
            outcomes.append(outcome(contender, found, *await measure(cell, workload, contender)))
            say(_line(outcomes[-1]))
        checked.append(Checked(name, tuple(outcomes)))
    return checked


def _line(one: Outcome) -> str:
    cores = "" if one.cores is None else f", {one.cores:.2f} cores"
    return (
        f"  hit rate {one.simulated_hit_rate:.1%} / {one.hit_rate:.1%}, "
        f"TTFT {1000 * one.simulated_ttft:,.0f} / {1000 * one.ttft:,.0f} ms{cores}, {one.errors} errors"
    )


def _row(one: Outcome) -> tuple[str, ...]:
    """Hit rate, TTFT and ITL, each of the laboratory and of the stack, and errors."""
    hits = [measures.hit_rate for measures in one.simulated]
    ttfts = [1000 * measures.ttft.mean for measures in one.simulated]
    return (
        f"{one.simulated_hit_rate:.1%} ({100 * min(hits):.0f}–{max(hits):.0%})",
        f"{one.hit_rate:.1%}",
        f"{1000 * one.simulated_ttft:,.0f} ({min(ttfts):,.0f}–{max(ttfts):,.0f})",
        f"{1000 * one.ttft:,.0f}",
        f"{1000 * fmean(measures.itl.mean for measures in one.simulated):,.0f}",
        f"{1000 * one.itl:,.0f}",
        str(one.errors),
    )


def _verdict(each: Checked) -> str:
    by_laboratory, by_stack = each.orders
    order = "the same order by TTFT"
    if by_laboratory != by_stack:
        order = f"by TTFT {' < '.join(by_laboratory)}, on the stack {' < '.join(by_stack)}"
    return f"{each.cell}: hit rates within {100 * each.hit_rate_difference:.1f} points, {order}"


def table(checked: Sequence[Checked]) -> Table:
    """Return all cells, laboratory and stack side by side; times are milliseconds."""
    shown = Table(box=None, pad_edge=False, header_style="bold", caption="\n".join(map(_verdict, checked)))
    shown.caption_justify = "left"
    shown.add_column("cell")
    shown.add_column("policy")
    for what in ("hit rate", "TTFT mean", "ITL mean"):
        shown.add_column(what, justify="right")
        shown.add_column("of the stack", justify="right")
    shown.add_column("errors", justify="right")
    for each in checked:
        for one in each.outcomes:
            shown.add_row(each.cell, one.policy, *_row(one), end_section=one is each.outcomes[-1])
    return shown


def markdown(checked: Sequence[Checked]) -> str:
    """Return the same, as pages have it."""
    lines = ["| cell | policy | hit rate | of the stack | TTFT mean, ms | of the stack | ITL mean, ms | of the stack |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines.extend(
        f"| `{each.cell}` | `{one.policy}` | {' | '.join(_row(one)[:-1]).replace('%', ' %')} |"
        for each in checked
        for one in each.outcomes
    )
    return "\n".join((*lines, "", *(f"* {_verdict(each)}." for each in checked)))
