"""`kvscout replay`: policies side by side on a simulated cluster, the same numbers every time."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvscout_cli import completion
from kvscout_cli.comparison import replay_cell
from kvscout_cli.connection import option
from kvscout_cli.lifetime import run
from kvscout_cli.tables import stderr, stdout
from kvscout_common.errors import ConfigError
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.cells import report
from kvscout_lab.cells.cells import Cell, Contender, Experiment, cells_by_seed
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.measures import Objective
from kvscout_lab.cells.plan import Planner
from kvscout_lab.matrix import report as matrix_report
from kvscout_lab.matrix.run import MatrixPlan, run_matrix
from kvscout_lab.matrix.setups import matrix
from kvscout_lab.real_time import cross_check
from kvscout_lab.simulation.cluster import Cluster, Faults, Latencies, Picture
from kvscout_lab.simulation.known_engines import ENGINES, known_engine
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.clients import SIGNS, Clients, as_clients_ask
from kvscout_lab.workloads.generators import GENERATED, generate
from kvscout_lab.workloads.recording import from_recording, is_recording, read_recording
from kvscout_lab.workloads.trace import read_trace
from kvscout_lab.workloads.workload import Burst, Workload, from_trace
from kvscout_scheduler.policies import installed_policies

T = TypeVar("T")

REQUESTS = 3_000
MATRIX_POLICIES = ("kv-time", "kv", "kv-balance", "lmetric", "least-loaded")
DEFAULT_POLICIES: dict[str, tuple[str, ...]] = {
    "_replay": (*MATRIX_POLICIES, "round-robin"),
    "_matrix": MATRIX_POLICIES,
    "_cross_check": ("kv-time", "lmetric", "kv"),
}
"""Policies by what is run, where none are named."""
MATRIX_SEEDS = 3

_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_TIME = click.FloatRange(min=0)
_SHARE = click.FloatRange(0, 1)


FIRST = (
    "--workload",
    "--trace",
    "--requests",
    "--policy",
    "--workers",
    "--prefill-workers",
    "--rate",
    "--load",
    "--burst",
    "--kv-tokens",
    "--engine",
    "--gateways",
    "--replicas",
    "--picture",
    "--ttft-ms",
    "--itl-ms",
    "--seed",
    "--seeds",
    "--matrix",
    "--plot",
    "--json",
    "--markdown",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@click.argument(
    "recordings",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="[RECORDING]...",
)
@option(
    "--workload",
    type=click.Choice(GENERATED),
    default=GENERATED[0],
    show_default=True,
    help="Workload to generate from --seed.",
)
@option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A trace in Mooncake's format instead.",
)
@option("--requests", type=_COUNT, help=f"Approximate number.  [default: {REQUESTS}; of a trace, all]")
@option(
    "--shared-tokens",
    type=click.IntRange(min=0),
    default=8_192,
    show_default=True,
    help="Length of the system prompt of shared-prompt.",
)
@option(
    "--policy",
    "policies",
    multiple=True,
    shell_complete=completion.policies,
    help="NAME or NAME:setting=value,…; some are the laboratory's own (docs). May be repeated.",
)
@option("--workers", "workers", type=_COUNT, multiple=True, default=(16,), help="May be repeated.  [default: 16]")
@option(
    "--prefill-workers",
    type=click.IntRange(min=0),
    default=0,
    help="Further workers, for prefill only.",
)
@option("--rate", "rates", type=_POSITIVE, multiple=True, help="Flows per second; may be repeated.")
@option(
    "--load",
    "loads",
    type=_POSITIVE,
    multiple=True,
    help="Share of the rate at which kv saturates, which is determined first; may be repeated.  [default: 0.85]",
)
@option(
    "--burst",
    type=click.FloatRange(1, 5),
    default=1.0,
    help="Rate of bursts, as a multiple of the mean rate; 1: no bursts.",
)
@option("--burst-seconds", type=_POSITIVE, default=30.0, show_default=True, help="Time from burst to burst.")
@option("--lead-seconds", type=_TIME, default=0.0, help="Time by which the first flow starts before the others.")
@option(
    "--kv-tokens",
    "kv_tokens",
    type=_COUNT,
    multiple=True,
    help="KV tokens of each worker; may be repeated.  [default: 600000; of --engine, what it has]",
)
@option(
    "--engine",
    "engine_name",
    type=click.Choice(list(ENGINES)),
    help="Profile of a model on accelerators.",
)
@option("--max-num-batched-tokens", type=_COUNT, default=8_192, show_default=True, help="Tokens of a step.")
@option("--max-num-seqs", type=_COUNT, default=256, show_default=True, help="Requests of a batch.")
@option("--step-base-ms", type=_POSITIVE, default=StepTime().base_ms, show_default=True, help="An empty step.")
@option("--prefill-us-per-token", type=_TIME, default=50.0, show_default=True, help="Time that each prompt token adds.")
@option(
    "--decode-us-per-request",
    type=_TIME,
    default=50.0,
    show_default=True,
    help="Time that each decoding request adds to a step.",
)
@option(
    "--context-ns-per-token",
    type=_TIME,
    default=15.0,
    show_default=True,
    help="Time that each token of their contexts adds.",
)
@option(
    "--max-tokens",
    metavar="N|usual",
    help="max_tokens of clients: one number, or `usual` for a mix of values.",
)
@option("--expects-max-tokens", is_flag=True, help="Gateways use max_tokens as the expected length, not as a limit.")
@option("--unstreamed", type=_SHARE, default=0.0, help="Share of requests that are not streamed.")
@option("--long-answers", type=_SHARE, default=0.0, help="Share of answers of thousands of tokens; others are short.")
@option(
    "--sign", type=click.Choice(SIGNS), default="none", show_default=True, help="How long answers can be recognised."
)
@option("--sheddable", type=_SHARE, default=0.0, help="Share of the flows of a priority below 0, which may be shed.")
@option("--classes", is_flag=True, help="Requests name an output class, one for each beginning of a prompt.")
@option(
    "--adapters",
    type=click.IntRange(min=0),
    default=0,
    help="Number of LoRA adapters; each is loaded on every second worker.",
)
@option(
    "--speed",
    "speeds",
    type=_POSITIVE,
    multiple=True,
    help="Speed of the first workers, relative to the others; may be repeated.",
)
@option("--prefill-speed", "prefill_speeds", type=_POSITIVE, multiple=True, help="Like --speed, for prompts only.")
@option(
    "--decode-speed",
    "decode_speeds",
    type=_POSITIVE,
    multiple=True,
    help="Like --speed, for everything except prompts.",
)
@option(
    "--gateways", type=_COUNT, default=1, show_default=True, help="Number of gateways; requests are spread over them."
)
@option(
    "--replicas",
    "replicas",
    type=_COUNT,
    multiple=True,
    default=(1,),
    help="Replicas of the scheduler; may be repeated.  [default: 1]",
)
@option("--event-ms", type=_TIME, default=Latencies().event_ms, show_default=True, help="Delay of KV events.")
@option(
    "--sync-ms",
    "sync_ms",
    type=_TIME,
    multiple=True,
    default=(Latencies().sync_ms,),
    help=f"Replication delay between replicas; may be repeated.  [default: {Latencies().sync_ms:g}]",
)
@option(
    "--picture",
    type=click.Choice([one.value for one in Picture]),
    default=Picture.EXACT.value,
    show_default=True,
    help="What gateways know of caches: events; or what each routed, the last of it, or all.",
)
@option("--sessions-hashed", is_flag=True, help="Each session has one gateway; else each request goes to the next.")
@option("--bypass", type=_SHARE, default=0.0, help="Share of the sessions that go to workers past all gateways.")
@option("--lost-events", type=_SHARE, default=0.0, help="Share of the batches of KV events that never arrive.")
@option("--restart-scheduler", type=_SHARE, help="Share of the arrival period after which the fault occurs.")
@option("--restart-gateway", type=_SHARE, help="Like --restart-scheduler: the first gateway dies.")
@option(
    "--recover-worker",
    type=_SHARE,
    help="Share of the arrival period until which the first worker runs at a fifth of its speed.",
)
@option("--tells-output", is_flag=True, help="Gateways know the length of each output.")
@option("--ttft-ms", type=_POSITIVE, default=2_000.0, show_default=True, help="Goodput: first token within.")
@option("--itl-ms", type=_POSITIVE, default=75.0, show_default=True, help="Goodput: mean gap between tokens within.")
@option(
    "--warm-up",
    type=_SHARE,
    default=0.1,
    show_default=True,
    help="Share of requests at the start that are left out of the results.",
)
@option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of workload and draws.")
@option(
    "--seeds",
    type=_COUNT,
    help="Number of seeds, starting with --seed; shows 95 % intervals.  [default: 1; of --matrix, 3]",
)
@option(
    "--matrix",
    is_flag=True,
    help="Instead, run named cells; of other options --policy, --seeds, --trace apply.",
)
@option(
    "--cells",
    default="*",
    show_default=True,
    metavar="PATTERN",
    help="Cells of --matrix, such as 'max-tokens/*', or of --cross-check.",
)
@option("--jobs", type=_COUNT, default=1, show_default=True, help="For --matrix: number of processes.")
@option(
    "--scale", type=_POSITIVE, default=1.0, show_default=True, help="For --matrix: factor of the number of requests."
)
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="For --matrix: file that stores each run; stored runs are not repeated.",
)
@option("--again", multiple=True, metavar="POLICY", help="For --matrix: policy to run again although --out has it.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per cell.")
@option("--markdown", "as_markdown", is_flag=True, help="Print a table of all cells, in Markdown.")
@option(
    "--cross-check",
    is_flag=True,
    help="Instead, also run the --cells for this on real processes with simulated engines; two minutes per policy.",
)
@option("--cell-seconds", type=_POSITIVE, default=75.0, show_default=True, help="Arrival period of --cross-check.")
@option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw TTFT to a .png or .svg; needs the extra lab.",
)
def command(**options: Any) -> None:
    """Compare policies on a simulated cluster, much faster than real time.

    The scheduler's own code decides; engines are simulated step by step. The same command prints the same numbers on
    every machine. Options that may be repeated are combined: each combination is a cell.

    With a RECORDING (`kvscout record`), workers, caches, engine speeds and times are as recorded, except where
    options change them.
    """
    if options["recordings"]:
        options = _as_recorded(options)
    mode = _matrix if options["matrix"] else _cross_check if options["cross_check"] else _replay
    policies = options["policies"] or DEFAULT_POLICIES[mode.__name__]
    # Real processes have the policies of schedulers only.
    registry = installed_policies() if mode is _cross_check else lab_policies()
    mode([Contender.parse(text, registry) for text in policies], options)


def _replay(contenders: Sequence[Contender], options: dict[str, Any]) -> None:
    """Compare policies in the cells of the options."""
    clusters = _clusters(options)
    objective = Objective(options["ttft_ms"] / 1000, options["itl_ms"] / 1000, options["warm_up"]).validate()
    max_tokens = options["max_tokens"]
    changes = {"max_tokens": _max_tokens(max_tokens), "usual_max_tokens": max_tokens == "usual"}
    clients = _made(Clients, options | changes).validate()

    def make(seed: int) -> Workload:
        return as_clients_ask(_workload(options, seed), replace(clients, seed=seed))

    burst = Burst(options["burst"], options["burst_seconds"]).validate() if options["burst"] > 1 else None
    rates, seed, as_markdown = options["rates"], options["seed"], options["as_markdown"]
    groups: list[list[Cell]] = []
    with _bar() as (progress, task):

        def experiment(made: Workload, each: Cluster) -> Experiment:
            return Experiment(
                made,
                each,
                objective=objective,
                burst=burst,
                lead_seconds=options["lead_seconds"],
                on_run=lambda text: progress.reset(task, description=text, total=made.requests),
                on_done=lambda requests: None if requests % 50 else progress.update(task, completed=requests),
            )

        for group in cells_by_seed(
            make,
            range(seed, seed + (options["seeds"] or 1)),
            clusters=clusters,
            contenders=contenders,
            rates=rates,
            loads=options["loads"] or (() if rates else (0.85,)),
            experiment=experiment,
        ):
            groups.append(group)
            one = len(group) == 1
            if options["as_json"]:
                click.echo(json.dumps(report.as_json(group[0]) if one else report.seeds_json(group)))
            elif not as_markdown:
                stdout().print(report.table(group[0]) if one else report.seeds_table(group))
                stdout().print()
    found = [group[0] for group in groups]
    if as_markdown:
        click.echo(report.markdown(found) if (options["seeds"] or 1) == 1 else report.seeds_markdown(groups))
    if options["plot_path"] is not None:
        from kvscout_lab.cells.plots import plot

        plot(found, options["plot_path"])


def _as_recorded(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the set-up of a recording in the place of defaults.

    Raises:
        ConfigError: It cannot be read, or says too little.
    """
    if options["trace"] is not None or options["matrix"] or options["cross_check"]:
        raise ConfigError("goes with no other trace, nor with --matrix or --cross-check", field="RECORDING")
    planner = Planner(
        read_recording(options["recordings"]), kv_tokens=next(iter(options["kv_tokens"]), None), warm_up=0.0
    )
    cluster, step = planner.cluster, planner.fit.step
    made: dict[str, Any] = {
        "workers": (cluster.workers,),
        "prefill_workers": cluster.prefill_workers,
        "kv_tokens": (cluster.engine.kv_tokens,),
        "max_num_batched_tokens": cluster.engine.max_num_batched_tokens,
        "step_base_ms": step.base_ms,
        "prefill_us_per_token": step.prefill_us_per_token,
        "decode_us_per_request": step.decode_us_per_request,
        "context_ns_per_token": step.context_ns_per_token,
        "rates": () if options["loads"] else (planner.workload.flow_rate,),
    }
    source = click.get_current_context().get_parameter_source
    said = {name for name in made if source(name) is ParameterSource.COMMANDLINE}
    return (
        options | {name: value for name, value in made.items() if name not in said} | {"recording": planner.recording}
    )


def _clusters(options: dict[str, Any]) -> list[Cluster]:
    """Return a cluster for each number of workers, size of caches, and replicas; a delay makes none for one replica."""
    kv_tokens, step = options["kv_tokens"], _made(StepTime, options | {"base_ms": options["step_base_ms"]})
    if options["engine_name"] is not None:
        known = known_engine(options["engine_name"])
        kv_tokens, step = kv_tokens or (known.kv_tokens,), known.step
    faults = _made(Faults, options)
    delays = options["sync_ms"]
    replicas = [(count, delay) for count in options["replicas"] for delay in (delays if count > 1 else delays[:1])]
    sizes = product(options["workers"], kv_tokens or (EngineSettings().kv_tokens,), replicas)
    return [
        _made(
            Cluster,
            options
            | {
                "workers": workers,
                "replicas": count,
                "latencies": _made(Latencies, options | {"sync_ms": delay}),
                "faults": faults,
                "picture": Picture(options["picture"]),
                "engine": _made(EngineSettings, options | {"step": step, "kv_tokens": tokens}),
            },
        ).validate()
        for workers, tokens, (count, delay) in sizes
    ]


def _made(kind: type[T], values: dict[str, Any]) -> T:
    """Make a dataclass of the values that are named as its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})  # type: ignore[arg-type]


def _max_tokens(text: str | None) -> int:
    if text is None or text == "usual":
        return 0
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is neither a positive number nor 'usual'", field="max_tokens")
    return int(text)


def _workload(options: dict[str, Any], seed: int) -> Workload:
    trace, requests = options["trace"], options["requests"]
    if "recording" in options:
        return from_recording("recording", options["recording"], requests or 0)
    if trace is not None:
        if is_recording(trace):
            raise ConfigError(f"{trace} is a recording: kvscout replay {trace}", field="--trace")
        return from_trace(trace.stem, read_trace(trace), requests or 0)
    return generate(options["workload"], requests or REQUESTS, seed, options["shared_tokens"])


def _matrix(contenders: Sequence[Contender], options: dict[str, Any]) -> None:
    """Run the matrix and print the verdicts on the first policy.

    Raises:
        ConfigError: No cell matches, or an option is out of range.
    """
    trace, seeds = options["trace"], options["seeds"] or MATRIX_SEEDS
    cells = matrix(pattern=options["cells"], trace=trace is not None)
    plan = MatrixPlan(tuple(cells), tuple(contenders), seeds, options["scale"], trace).validate()
    with _bar() as (progress, task):

        def on_done(done: int, of: int, what: str) -> None:
            progress.update(task, completed=done, total=of, description=what)

        results = run_matrix(plan, jobs=options["jobs"], path=options["out"], again=options["again"], on_done=on_done)
    found = matrix_report.verdicts(plan, results)
    if options["as_json"]:
        for each in found:
            click.echo(json.dumps(matrix_report.as_json(each)))
    elif options["as_markdown"]:
        click.echo(matrix_report.markdown(found, plan, _command_line(plan, options["cells"])))
    else:
        stdout().print(matrix_report.table(found, plan))
        stdout().print(matrix_report.summary(found, plan.contenders[0].label))


def _command_line(plan: MatrixPlan, pattern: str) -> str:
    """Return the command line of a matrix, without options that change no number."""
    words = ["kvscout", "replay", "--matrix"]
    if pattern != "*":
        words += ["--cells", pattern]
    if plan.seeds != MATRIX_SEEDS:
        words += ["--seeds", str(plan.seeds)]
    if plan.scale != 1.0:
        words += ["--scale", f"{plan.scale:g}"]
    if plan.trace is not None:
        words += ["--trace", plan.trace.name]
    labels = tuple(contender.label for contender in plan.contenders)
    if labels != MATRIX_POLICIES:
        for label in labels:
            words += ["--policy", label]
    return shlex.join([*words, "--markdown"])


def _cross_check(contenders: Sequence[Contender], options: dict[str, Any]) -> None:
    """Run cells simulated and on real processes, and print both."""
    pattern, seconds, seed = options["cells"], options["cell_seconds"], options["seed"]
    names = [name for name in cross_check.CELLS if fnmatch(name, pattern)]
    if not names:
        raise ConfigError(f"{pattern!r} is not one of {', '.join(cross_check.CELLS)}", field="cells")
    say = stderr().print
    checked = run(cross_check.cross_check(contenders, names, replay_cell, seconds=seconds, seed=seed, say=say))
    if options["as_json"]:
        for each in checked:
            click.echo(json.dumps(each.as_json()))
    elif options["as_markdown"]:
        click.echo(cross_check.markdown(checked))
    else:
        stdout().print(cross_check.table(checked))


@contextmanager
def _bar() -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as progress:
        yield progress, progress.add_task("", total=None)
