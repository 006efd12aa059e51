"""`kvscout demo`: kv-aware routing against round-robin, or prefill and decode apart, on this machine, for real."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
from rich.table import Table

from kvscout_cli.comparison import PolicyResult, replay_under
from kvscout_cli.connection import option
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.progress import replay_progress
from kvscout_cli.tables import stderr, stdout
from kvscout_cli.topology import Mockers, Topology
from kvscout_common.errors import ConfigError
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.real_time.summary import as_json as summary_json
from kvscout_lab.real_time.summary import comparison, errors_by_text, improvements
from kvscout_lab.workloads.sessions import LogNormal, MultiTurn, Range, Session, multi_turn
from kvscout_lab.workloads.trace import TraceOptions, trace_sessions

POLICIES = ("round-robin", "kv-time")
AGGREGATED, DISAGGREGATED = "aggregated", "disaggregated"

SESSIONS_PER_SECOND = MultiTurn().sessions_per_second
ARRIVAL_SECONDS = 20.0

CHAT_BLOCKS = 1280
"""KV blocks of an engine in the default workload: 20,480 tokens. Its live sessions hold about 80,000: four engines have
just room for each of them once, none for all of them. Larger caches hide bad routing, in this demo as in life."""

CHAT_STEP_COSTS = ("--step-base-ms", "4", "--prefill-us-per-token", "30", "--decode-us-per-request", "25")
"""A model of about 8B on one current GPU: 33,000 prompt tokens a second, 4 to 5 ms between tokens."""

LONG_PROMPTS = MultiTurn(
    sessions_per_second=5.0,
    turns=Range(1, 2),
    first_message_tokens=LogNormal(median=4096, sigma=0.4, low=1024, high=8192),
    output_tokens=Range(64, 128),
)
"""Workload for disaggregated serving: long prompts come while others get long answers."""
LONG_PROMPT_BLOCKS = 4096
"""Caches that hold what is in flight: they are not the subject."""

DISAGG_NOTE = (
    "Apart, half of the engines compute all prompts, and each prompt is moved once: first tokens come later. What is "
    "won is that no gap is as long as a chunk of another prompt takes (2,048 tokens: 61 ms on these engines). Where "
    "all engines do all, about 1 in 100 is, so that ITL p99 is as long or far shorter. Lengths, rate, engines and "
    "their network decide what that is worth."
)
LATE_SECONDS = 0.005
"""As long as a step of the simulated engines: who sends later than that does not see their gaps, but the machine's."""

TRACE_BLOCKS = 65_536
"""1,048,576 tokens: production traces repeat themselves after minutes, not seconds."""
TRACE_REQUESTS = 600
TRACE_SPEED = 8.0
TRACE_OUTPUT_TOKENS = 32
"""Outputs of a trace are cut to this: routing decides on prompts, and streaming costs CPU that two cores lack."""


@dataclass(frozen=True, slots=True)
class _Workload:
    description: str
    sessions: Callable[[], Iterable[Session]]
    mockers: Mockers


@click.command(cls=SectionedCommand)
@option(
    "--sessions",
    type=click.IntRange(min=1),
    help="Sessions; with --trace, requests.  [default: rate · duration; of a trace, 600]",
)
@option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Sessions per second.  [default: {SESSIONS_PER_SECOND:g}]",
)
@option(
    "--duration",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Seconds in which sessions arrive; they are then finished.  [default: {ARRIVAL_SECONDS:g}]",
)
@option(
    "--think-seconds",
    type=click.FloatRange(min=0),
    help=f"Mean time between a reply and the next turn.  [default: {MultiTurn().think_seconds:g}]",
)
@option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the workload.")
@option("--mockers", default=4, show_default=True, type=click.IntRange(1, 64), help="Simulated engines.")
@option("--blocks", type=click.IntRange(min=2), help=f"KV blocks of an engine.  [default: {CHAT_BLOCKS}]")
@option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay a trace in Mooncake's format instead of generated sessions.",
)
@option(
    "--trace-speed",
    default=TRACE_SPEED,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Factor of the recorded rate; engines are faster by the same factor.",
)
@option(
    "--disagg",
    is_flag=True,
    help="Compare engines that do all with as many of which half compute prompts and half continue them.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    sessions: int | None,
    rate: float | None,
    duration: float | None,
    think_seconds: float | None,
    seed: int,
    mockers: int,
    blocks: int | None,
    trace: Path | None,
    trace_speed: float,
    disagg: bool,
    as_json: bool,
) -> None:
    """Compare kv-aware routing with round-robin on this machine, or with --disagg separate prefill and decode.

    Starts indexer, scheduler, gateway and simulated engines as real processes, replays the same sessions through the
    gateway under round-robin and under kv-time, the default policy, each on a fresh stack, and prints what the engines
    and the client measured. Takes about 75 seconds.
    """
    if sessions is not None and duration is not None:
        raise click.UsageError("Give --sessions or --duration, not both.")
    if trace is None:
        base = LONG_PROMPTS if disagg else MultiTurn()
        rate = rate or base.sessions_per_second
        parameters = replace(
            base,
            sessions=sessions or max(1, round(rate * (duration or ARRIVAL_SECONDS))),
            sessions_per_second=rate,
            seed=seed,
        )
        if think_seconds is not None:
            parameters = replace(parameters, think_seconds=think_seconds)
        workload = _chat(parameters.validate(), mockers, blocks or (LONG_PROMPT_BLOCKS if disagg else CHAT_BLOCKS))
    elif rate is not None or think_seconds is not None:
        raise click.UsageError("A trace has its own times; --trace-speed changes them.")
    else:
        workload = _trace(
            trace, requests=sessions, duration=duration, speed=trace_speed, mockers=mockers, blocks=blocks
        )
    total = _requests(workload)
    if not as_json:
        stderr().print(f"{total} requests: {workload.description}", soft_wrap=True)
    results = []
    for name, topology in _topologies(workload.mockers, disagg=disagg):
        with replay_progress(name, total) as progress:
            results.append(run(replay_under(name, topology, workload.sessions, progress)))
    baseline, candidate = results
    if as_json:
        print_json(_document(workload, baseline, candidate))
    else:
        _print(baseline, candidate, note=DISAGG_NOTE if disagg else "")
    if baseline.summary.errors or candidate.summary.errors:
        raise SystemExit(1)


def _topologies(mockers: Mockers, *, disagg: bool) -> list[tuple[str, Topology]]:
    if not disagg:
        return [(policy, Topology(mockers, scheduler_flags=("--router-mode", policy))) for policy in POLICIES]
    if mockers.count < 2:
        raise ConfigError("prefill and decode take two engines", field="--mockers")
    return [
        (AGGREGATED, Topology(mockers)),
        (DISAGGREGATED, Topology(replace(mockers, prefill=mockers.count // 2))),
    ]


def _requests(workload: _Workload) -> int:
    requests = longest = 0
    for session in workload.sessions():
        requests += len(session.turns)
        longest = max(longest, sum(len(turn.new_tokens) + turn.max_tokens for turn in session.turns))
    capacity = (workload.mockers.num_gpu_blocks - 1) * workload.mockers.block_size
    if longest > capacity:
        raise ConfigError(
            f"an engine has room for {capacity:,} tokens, the longest request has {longest:,}", field="--blocks"
        )
    return requests


def _chat(parameters: MultiTurn, mockers: int, blocks: int) -> _Workload:
    return _Workload(
        f"{parameters.sessions} multi-turn sessions of {parameters.apps} apps, {parameters.sessions_per_second:g} new "
        f"ones a second, on {mockers} engines with {blocks:,} blocks of 16 tokens",
        partial(multi_turn, parameters),
        Mockers(mockers, num_gpu_blocks=blocks, flags=CHAT_STEP_COSTS),
    )


def _trace(
    path: Path, *, requests: int | None, duration: float | None, speed: float, mockers: int, blocks: int | None
) -> _Workload:
    options = TraceOptions(
        limit=requests or (0 if duration else TRACE_REQUESTS),
        duration_seconds=duration or 0.0,
        rate_scale=speed,
        max_output_tokens=TRACE_OUTPUT_TOKENS,
    ).validate()
    blocks = blocks or TRACE_BLOCKS
    return _Workload(
        f"{path.name} at {speed:g} times its rate, outputs cut to {TRACE_OUTPUT_TOKENS} tokens, on {mockers} engines "
        f"with {blocks:,} blocks of 16 tokens",
        partial(trace_sessions, path, options),
        Mockers(
            mockers,
            num_gpu_blocks=blocks,
            max_num_batched_tokens=8192,
            flags=("--speedup", str(speed), "--max-model-len", str((blocks - 1) * 16)),
        ),
    )


def _document(workload: _Workload, *results: PolicyResult) -> dict[str, object]:
    baseline, candidate = results
    return {
        "workload": workload.description,
        "policies": {
            result.policy: {
                **summary_json(result.summary),
                "cpu_cores": result.cpu_cores,
                "mispredicted": result.mispredicted,
                "degraded": result.degraded,
                "error_texts": dict(errors_by_text(result.run.records)),
            }
            for result in results
        },
        "improvement": improvements(baseline.summary, candidate.summary),
    }


def _print(baseline: PolicyResult, candidate: PolicyResult, *, note: str) -> None:
    table = Table(title="the same sessions, twice", header_style="bold")
    table.add_column("")
    for heading in (baseline.policy, candidate.policy, f"{candidate.policy} is"):
        table.add_column(heading, justify="right")
    for row in comparison(baseline.summary, candidate.summary):
        table.add_row(*row)
    if baseline.cpu_cores is not None and candidate.cpu_cores is not None:
        label = f"CPU, cores of {os.cpu_count()}"
        table.add_row(label, f"{baseline.cpu_cores:.2f}", f"{candidate.cpu_cores:.2f}", "")
    if baseline.degraded or candidate.degraded:
        table.add_row("routed with a helper out of reach", str(baseline.degraded), str(candidate.degraded), "")
    console = stdout()
    console.print(table)
    console.print(
        "hit rate: cached / prompt tokens as the engines report them; TTFT from when a request was due; "
        "balance 0 = even.",
        style="dim",
        soft_wrap=True,
    )
    if note:
        console.print(note, style="dim", soft_wrap=True)
    late = max(result.summary.send_lag_p99_seconds or 0.0 for result in (baseline, candidate))
    if late > LATE_SECONDS:
        console.print(
            f"This machine was short of CPU: who sends the requests was itself up to {1000 * late:.0f} ms late (99 of "
            "100). Engines, gateway and client each are so now and then: gaps and first tokens are no better known.",
            style="yellow",
            soft_wrap=True,
        )
    for result in (baseline, candidate):
        for text, count in errors_by_text(result.run.records)[:5]:
            stderr().print(f"{result.policy}: {count} × {text}", style="red")
