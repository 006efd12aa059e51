"""`kvscout replay`: the laboratory. Policies side by side on a simulated cluster, the same every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from itertools import product
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvscout_cli import replay_matrix
from kvscout_cli.connection import option
from kvscout_cli.cross_check import CELLS
from kvscout_cli.cross_check import cross_check as beside_the_stack
from kvscout_cli.cross_check import markdown as real_markdown
from kvscout_cli.cross_check import table as real_table
from kvscout_cli.lifetime import run
from kvscout_cli.output import stderr, stdout
from kvscout_common.errors import ConfigError
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.cells import Bench, Cell, Contender, cells_by_seed
from kvscout_lab.clients import SIGNS, Clients, Sign, as_clients_ask
from kvscout_lab.cluster import Cluster
from kvscout_lab.engines_known import ENGINES, known_engine
from kvscout_lab.faults import Faults
from kvscout_lab.generators import GENERATED, generate
from kvscout_lab.latencies import Latencies
from kvscout_lab.measures import Objective
from kvscout_lab.report import as_json as cell_json
from kvscout_lab.report import markdown, seeds_json, seeds_markdown, seeds_table, table
from kvscout_lab.timing import StepTime
from kvscout_lab.trace import read_trace
from kvscout_lab.worker import EngineSettings
from kvscout_lab.workload import Burst, Workload, from_trace
from kvscout_scheduler.policies import installed_policies

REQUESTS = 3_000
REAL_POLICIES = ("kv-time", "lmetric", "kv")
POLICIES = ("kv-time", "kv", "kv-balance", "lmetric", "least-loaded", "round-robin")

_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_TIME = click.FloatRange(min=0)
_SHARE = click.FloatRange(0, 1)


@click.command(cls=SectionedCommand)
@option(
    "--workload",
    type=click.Choice(GENERATED),
    default=GENERATED[0],
    show_default=True,
    help="What is asked, made from --seed.",
)
@option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A trace in Mooncake's format instead.",
)
@option("--requests", type=_COUNT, help=f"About so many.  [default: {REQUESTS}; of a trace, all]")
@option("--shared-tokens", type=click.IntRange(min=0), default=8_192, show_default=True, help="Of shared-prompt.")
@option("--policy", "policies", multiple=True, help="NAME or NAME:setting=value,…; may be repeated.")
@option("--workers", "workers", type=_COUNT, multiple=True, default=(16,), help="May be repeated.  [default: 16]")
@option("--prefill-workers", type=click.IntRange(min=0), default=0, help="Apart from the --workers, which then decode.")
@option("--rate", "rates", type=_POSITIVE, multiple=True, help="Flows a second; may be repeated.")
@option(
    "--load",
    "loads",
    type=_POSITIVE,
    multiple=True,
    help="Share of the rate at which kv saturates, which is looked for first; may be repeated.  [default: 0.85]",
)
@option("--burst", type=click.FloatRange(1, 5), default=1.0, help="Rate of bursts, in mean rates; 1: none.")
@option("--burst-seconds", type=_POSITIVE, default=30.0, show_default=True, help="From burst to burst.")
@option("--lead-seconds", type=_TIME, default=0.0, help="So long before the others comes the first flow.")
@option(
    "--kv-tokens",
    "kv_tokens",
    type=_COUNT,
    multiple=True,
    help="Of each worker; may be repeated.  [default: 600000; of --engine, what it has]",
)
@option("--engine", "engine_name", type=click.Choice(list(ENGINES)), help="A model on accelerators, instead of:")
@option("--max-num-batched-tokens", type=_COUNT, default=8_192, show_default=True, help="Tokens of a step.")
@option("--max-num-seqs", type=_COUNT, default=256, show_default=True, help="Requests of a batch.")
@option("--step-base-ms", type=_POSITIVE, default=StepTime().base_ms, show_default=True, help="An empty step.")
@option("--prefill-us-per-token", type=_TIME, default=50.0, show_default=True, help="Each prompt token adds.")
@option(
    "--decode-us-per-request", type=_TIME, default=50.0, show_default=True, help="Of a step, each decoding request."
)
@option(
    "--context-ns-per-token",
    type=_TIME,
    default=15.0,
    show_default=True,
    help="And each token of their contexts.",
)
@option(
    "--max-tokens",
    metavar="N|usual",
    help="That clients set: one number, or usual ones, a share each.",
)
@option("--expects-max-tokens", is_flag=True, help="Gateways take it for what the client expects, not for a bound.")
@option("--unstreamed", type=_SHARE, default=0.0, help="Share of the requests whose answer comes as a whole.")
@option("--long-answers", type=_SHARE, default=0.0, help="Share of answers of thousands of tokens; others are short.")
@option("--sign", type=click.Choice(SIGNS), default="none", show_default=True, help="By what these can be told.")
@option("--classes", is_flag=True, help="Requests say an output class, one for each beginning of prompts.")
@option("--adapters", type=click.IntRange(min=0), default=0, help="LoRA adapters, each on every other worker.")
@option("--speed", "speeds", type=_POSITIVE, multiple=True, help="Of the first workers, in those of the others.")
@option("--prefill-speed", "prefill_speeds", type=_POSITIVE, multiple=True, help="Likewise, of prompts alone.")
@option("--decode-speed", "decode_speeds", type=_POSITIVE, multiple=True, help="Likewise, of all but prompts.")
@option("--gateways", type=_COUNT, default=1, show_default=True, help="Requests are spread over them.")
@option("--replicas", type=_COUNT, default=1, show_default=True, help="Of the scheduler.")
@option("--event-ms", type=_TIME, default=Latencies().event_ms, show_default=True, help="How late KV events come.")
@option("--sync-ms", type=_TIME, default=Latencies().sync_ms, show_default=True, help="Between replicas.")
@option("--lost-events", type=_SHARE, default=0.0, help="Share of the batches of KV events that never arrive.")
@option("--restart-scheduler", type=_SHARE, help="After this share of the time in which flows come.")
@option("--restart-gateway", type=_SHARE, help="Likewise; the first of them.")
@option("--recover-worker", type=_SHARE, help="Likewise; until then the first worker has a fifth of its speed.")
@option("--tells-output", is_flag=True, help="Gateways know how long an output will be.")
@option("--ttft-ms", type=_POSITIVE, default=2_000.0, show_default=True, help="Of goodput: first token within.")
@option("--itl-ms", type=_POSITIVE, default=75.0, show_default=True, help="Of goodput: mean gap between tokens within.")
@option("--warm-up", type=_SHARE, default=0.1, show_default=True, help="Share of the requests that do not count.")
@option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of workload and draws.")
@option("--seeds", type=_COUNT, help="So many, from --seed on; shows 95 % intervals.  [default: 1; of --matrix, 3]")
@option(
    "--matrix",
    is_flag=True,
    help="Instead, run named cells; only options that name it, --policy, --seeds and --trace count.",
)
@option(
    "--cells",
    default="*",
    show_default=True,
    metavar="PATTERN",
    help="Of --matrix, such as 'max-tokens/*', or --cross-check.",
)
@option("--jobs", type=_COUNT, default=1, show_default=True, help="Of --matrix: processes.")
@option("--scale", type=_POSITIVE, default=1.0, show_default=True, help="Of --matrix: so many times the requests.")
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of --matrix: keep each run here, and take from it what was run before.",
)
@option("--again", multiple=True, metavar="POLICY", help="Of --matrix: run this one anew, though --out has it.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object a cell.")
@option("--markdown", "as_markdown", is_flag=True, help="Print one table of all cells, as the page of results has it.")
@option(
    "--cross-check",
    is_flag=True,
    help="Instead, run --cells made for that on real processes with simulated engines, too, two minutes a policy.",
)
@option(
    "--cell-seconds", type=_POSITIVE, default=75.0, show_default=True, help="Of --cross-check, in which requests come."
)
@option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw TTFT into this .png or .svg; needs the extra lab.",
)
def command(
    *,
    workload: str,
    trace: Path | None,
    requests: int | None,
    shared_tokens: int,
    policies: tuple[str, ...],
    workers: tuple[int, ...],
    prefill_workers: int,
    rates: tuple[float, ...],
    loads: tuple[float, ...],
    burst: float,
    burst_seconds: float,
    lead_seconds: float,
    kv_tokens: tuple[int, ...],
    engine_name: str | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    step_base_ms: float,
    prefill_us_per_token: float,
    decode_us_per_request: float,
    context_ns_per_token: float,
    max_tokens: str | None,
    expects_max_tokens: bool,
    unstreamed: float,
    long_answers: float,
    sign: Sign,
    classes: bool,
    adapters: int,
    speeds: tuple[float, ...],
    prefill_speeds: tuple[float, ...],
    decode_speeds: tuple[float, ...],
    gateways: int,
    replicas: int,
    event_ms: float,
    sync_ms: float,
    lost_events: float,
    restart_scheduler: float | None,
    restart_gateway: float | None,
    recover_worker: float | None,
    tells_output: bool,
    ttft_ms: float,
    itl_ms: float,
    warm_up: float,
    seed: int,
    seeds: int | None,
    matrix: bool,
    cells: str,
    jobs: int,
    scale: float,
    out: Path | None,
    again: tuple[str, ...],
    as_json: bool,
    as_markdown: bool,
    cross_check: bool,
    cell_seconds: float,
    plot_path: Path | None,
) -> None:
    """Compare policies on a simulated cluster, in a fraction of the time it would take.

    The scheduler's own code decides; engines are simulated step by step. The same command prints the same numbers on
    every machine. Options that may be repeated make a cell of each combination.
    """
    registry = installed_policies()
    default = REAL_POLICIES if cross_check else replay_matrix.POLICIES if matrix else POLICIES
    contenders = [Contender.parse(text, registry) for text in policies or default]
    if matrix:
        options = replay_matrix.MatrixOptions(
            cells, jobs, scale, seeds or replay_matrix.SEEDS, out, again, trace, as_json, as_markdown
        )
        replay_matrix.show_matrix(contenders, options)
        return
    if cross_check:
        names = [name for name in CELLS if fnmatch(name, cells)]
        if not names:
            raise ConfigError(f"{cells!r} is none of {', '.join(CELLS)}", field="cells")
        checked = run(beside_the_stack(contenders, names, seconds=cell_seconds, seed=seed, say=stderr().print))
        if as_json:
            for each in checked:
                click.echo(json.dumps(each.as_json()))
        elif as_markdown:
            click.echo(real_markdown(checked))
        else:
            stdout().print(real_table(checked))
        return
    engine = EngineSettings(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        step=StepTime(step_base_ms, prefill_us_per_token, decode_us_per_request, context_ns_per_token),
    )
    if engine_name is not None:
        known = known_engine(engine_name)
        engine = replace(engine, step=known.step)
        kv_tokens = kv_tokens or (known.kv_tokens,)
    cluster = Cluster(
        prefill_workers=prefill_workers,
        engine=engine,
        speeds=speeds,
        prefill_speeds=prefill_speeds,
        decode_speeds=decode_speeds,
        adapters=adapters,
        gateways=gateways,
        replicas=replicas,
        latencies=Latencies(event_ms=event_ms, sync_ms=sync_ms),
        tells_output=tells_output,
        expects_max_tokens=expects_max_tokens,
        lost_events=lost_events,
        faults=Faults(
            restart_scheduler=restart_scheduler, restart_gateway=restart_gateway, recover_worker=recover_worker
        ),
        seed=seed,
    )
    clusters = [
        replace(cluster, workers=count, engine=replace(engine, kv_tokens=tokens)).validate()
        for count, tokens in product(workers, kv_tokens or (EngineSettings().kv_tokens,))
    ]
    objective = Objective(ttft_ms / 1000, itl_ms / 1000, warm_up).validate()
    clients = Clients(
        max_tokens=_max_tokens(max_tokens),
        usual_max_tokens=max_tokens == "usual",
        unstreamed=unstreamed,
        long_answers=long_answers,
        sign=sign,
        classes=classes,
        adapters=adapters,
        seed=seed,
    ).validate()

    def make(seed: int) -> Workload:
        made = _workload(workload, trace, requests, shared_tokens, seed)
        return as_clients_ask(made, replace(clients, seed=seed))

    bursts = Burst(burst, burst_seconds).validate() if burst > 1 else None
    found: list[Cell] = []
    groups: list[list[Cell]] = []
    with _progress() as (on_run, on_done):

        def bench(made: Workload, each: Cluster) -> Bench:
            return Bench(
                made,
                each,
                objective=objective,
                burst=bursts,
                lead_seconds=lead_seconds,
                on_run=partial(on_run, made.requests),
                on_done=on_done,
            )

        numbers = range(seed, seed + (seeds or 1))
        for group in cells_by_seed(
            make,
            numbers,
            clusters=clusters,
            contenders=contenders,
            rates=rates,
            loads=loads or (() if rates else (0.85,)),
            bench=bench,
        ):
            found.append(group[0])
            groups.append(group)
            if as_json:
                click.echo(json.dumps(cell_json(group[0]) if len(group) == 1 else seeds_json(group)))
            elif not as_markdown:
                stdout().print(table(group[0]) if len(group) == 1 else seeds_table(group))
                stdout().print()
    if as_markdown:
        click.echo(markdown(found) if (seeds or 1) == 1 else seeds_markdown(groups))
    if plot_path is not None:
        from kvscout_lab.plots import plot

        plot(found, plot_path)


def _max_tokens(text: str | None) -> int:
    if text is None or text == "usual":
        return 0
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is neither a positive number nor 'usual'", field="max_tokens")
    return int(text)


def _workload(
    name: str,
    trace: Path | None,
    requests: int | None,
    shared_tokens: int,
    seed: int,
) -> Workload:
    if trace is not None:
        return from_trace(trace.stem, read_trace(trace), requests or 0)
    return generate(name, requests or REQUESTS, seed, shared_tokens)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int, str], None], Callable[[int], None]]]:
    """A bar a run, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal) as progress:
        task = progress.add_task("", total=None)

        def on_run(requests: int, text: str) -> None:
            progress.reset(task, description=text, total=requests)

        def on_done(requests: int) -> None:
            if not requests % 50:
                progress.update(task, completed=requests)

        yield on_run, on_done
