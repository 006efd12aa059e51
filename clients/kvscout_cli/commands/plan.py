"""`kvscout plan`: what another policy, other workers or caches would make of recorded traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from kvscout_cli import completion
from kvscout_cli.connection import json_flag, option
from kvscout_cli.output import echo, print_json
from kvscout_cli.tables import columns, stderr, stdout
from kvscout_common.settings.flags import SectionedCommand
from kvscout_lab.cells.cells import Contender
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.plan import Change, Outcome, Planner, cheapest
from kvscout_lab.workloads.recording import read_recording

OTHER_POLICIES: Final = ("kv-time", "lmetric", "least-loaded", "round-robin")
TARGET_SHARE: Final = 0.95
"""Share of the requests for which a set-up keeps the target, to be named as enough."""


@click.command(cls=SectionedCommand)
@click.argument("recording", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@option("--model", default="", help="Model of the recording.  [default: the one with most requests]")
@option(
    "--today",
    default="kv-time",
    show_default=True,
    shell_complete=completion.policies,
    help="Policy that ran when it was recorded, as NAME or NAME:setting=value,….",
)
@option("--today-workers", type=click.IntRange(min=1), help="Ranks at recording time.  [default: as recorded]")
@option(
    "--today-kv-tokens",
    type=click.IntRange(min=1),
    help="KV tokens of each rank at recording time.  [default: as registered]",
)
@option(
    "--policy", "policies", multiple=True, shell_complete=completion.policies, help="Policy to try; may be repeated."
)
@option("--workers", multiple=True, type=click.IntRange(min=1), help="Number of ranks to try; may be repeated.")
@option(
    "--kv", "kv_factors", multiple=True, type=click.FloatRange(min=0, min_open=True), help="Factor of the cache sizes."
)
@option(
    "--offload",
    "offload_factors",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Size of an offload tier, as a factor of the cache sizes.",
)
@option(
    "--prefill-workers",
    multiple=True,
    type=click.IntRange(min=1),
    help="Prefill workers to try, in addition to the other ranks.",
)
@option(
    "--ttft-ms",
    default=2_000.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Target of the TTFT.",
)
@option(
    "--warm-up",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of requests at the start that are left out.",
)
@option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw to this .png or .svg file; needs the extra lab.",
)
@json_flag
def command(  # noqa: PLR0913  # a flag each
    recording: Sequence[Path],
    *,
    model: str,
    today: str,
    today_workers: int | None,
    today_kv_tokens: int | None,
    policies: Sequence[str],
    workers: Sequence[int],
    kv_factors: Sequence[float],
    offload_factors: Sequence[float],
    prefill_workers: Sequence[int],
    ttft_ms: float,
    warm_up: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay recorded traffic in other set-ups: hit rate, TTFT, and the fewest workers that keep the target.

    Engine speeds are fitted to the recording. The first two rows are the recorded traffic and a replay of the same
    set-up: their difference is the error of all other rows. Without --policy, --workers, --kv, --offload or
    --prefill-workers the usual changes are tried.

    \b
        kvscout record --duration 3600
        kvscout plan recordings/*.jsonl.gz
        kvscout plan recordings/*.jsonl.gz --workers 6 --kv 0.5 --ttft-ms 500
    """
    registry = lab_policies()
    planner = Planner(
        read_recording(recording, model),
        workers=today_workers,
        kv_tokens=today_kv_tokens,
        ttft_seconds=ttft_ms / 1000,
        warm_up=warm_up,
    )
    contender = Contender.parse(today, registry)
    if not (policies or workers or kv_factors or offload_factors or prefill_workers):
        now = planner.cluster.workers
        policies = [name for name in OTHER_POLICIES if name != today]
        workers = sorted({max(1, now // 2), max(1, now - 1), now + 1, now + 2, 2 * now} - {now})
        kv_factors, offload_factors = (0.5, 2.0, 4.0), (2.0,)
    changes = [
        Change("today, replayed", planner.cluster, contender),
        *planner.changes(
            contender,
            contenders=[Contender.parse(text, registry) for text in policies],
            workers=workers,
            kv_factors=kv_factors,
            prefill_workers=prefill_workers,
            offload_factors=offload_factors,
        ),
    ]
    recorded = planner.recorded()
    outcomes: list[tuple[Change, Outcome]] = []
    for change in changes:
        with stderr().status(f"{change.label} ({len(outcomes) + 1} of {len(changes)})"):
            outcomes.append((change, planner.run(change.cluster, change.contender)))
    enough = cheapest(outcomes, TARGET_SHARE)
    if as_json:
        print_json(
            {
                "recorded": recorded,
                "engine": planner.fit,
                "set_ups": [{"label": change.label} | outcome._asdict() for change, outcome in outcomes],
                "enough": enough.label if enough is not None else None,
            }
        )
    else:
        stdout().print(_table(recorded, outcomes, ttft_ms))
        for sentence in _sentences(planner, recorded, outcomes, enough, ttft_ms):
            echo(sentence)
    if plot is not None:
        from kvscout_lab.cells.plots import plot_plan

        plot_plan(recorded, outcomes, plot)


def _table(recorded: Outcome, outcomes: Sequence[tuple[Change, Outcome]], ttft_ms: float) -> Table:
    shown = ("hit rate", "TTFT mean", "p50", "p90", "p99", f"≤ {ttft_ms:g} ms")
    table = columns("set-up", *shown, right=shown)
    table.add_row("recorded", *_cells(recorded))
    for change, outcome in outcomes:
        table.add_row(change.label, *_cells(outcome))
    return table


def _cells(outcome: Outcome) -> list[str]:
    times = (outcome.ttft_mean, outcome.ttft_p50, outcome.ttft_p90, outcome.ttft_p99)
    return [
        f"{outcome.hit_rate:.1%}",
        *(f"{1000 * seconds:,.0f} ms" for seconds in times),
        f"{outcome.within_target:.1%}",
    ]


def _sentences(
    planner: Planner,
    recorded: Outcome,
    outcomes: Sequence[tuple[Change, Outcome]],
    enough: Change | None,
    ttft_ms: float,
) -> list[str]:
    _, today = outcomes[0]
    points = 100 * (today.hit_rate - recorded.hit_rate)
    percent = 100 * (today.ttft_mean / recorded.ttft_mean - 1)
    step = planner.fit.step
    target = f"{TARGET_SHARE:.0%} of the first tokens within {ttft_ms:g} ms"
    return [
        "",
        f"The replay of today's set-up is {points:+.1f} points of hit rate and {percent:+.0f} % of mean TTFT off what "
        "was recorded; other rows are about as far off.",
        f"Fitted engine: {step.base_ms:.2f} ms a step, {step.prefill_us_per_token:.1f} µs a prompt token, "
        f"{step.decode_us_per_request:.1f} µs a request that decodes.",
        f"Fewest workers that keep {target}: {enough.label}."
        if enough is not None
        else f"No set-up of these keeps {target}.",
    ]
