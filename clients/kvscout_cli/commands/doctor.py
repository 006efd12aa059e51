"""`kvscout doctor`: what makes routing blind or wrong, and what helps?"""

from __future__ import annotations

import textwrap

import click
from rich.console import Console
from rich.text import Text

from kvscout_cli.connection import Services, json_flag, option, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.tables import stdout
from kvscout_common.doctor.conditions import Severity
from kvscout_common.doctor.diagnosis import Finding, diagnose, is_wrong
from kvscout_common.doctor.snapshot import ServiceKind, Snapshot
from kvscout_common.settings.flags import SectionedCommand

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold"}
MAX_WIDTH = 110
"""Sentences are not read in longer lines."""


@click.command(cls=SectionedCommand)
@option("--engines/--no-engines", default=True, show_default=True, help="Also query the workers' engines over HTTP.")
@option(
    "--envoy-admin",
    multiple=True,
    metavar="URL",
    help="Read the counters of this Envoy, by its admin interface, such as http://127.0.0.1:9901; repeatable.",
)
@json_flag
@services_flags
def command(services: Services, *, engines: bool, envoy_admin: tuple[str, ...], as_json: bool) -> None:
    """Diagnose what makes routing blind or wrong, with evidence and remedy; exit with 1 on a finding.

    The gateway names its indexers and schedulers, and workers name their bridges and engines. ADDRESS is a
    further service.

    \b
        kvscout doctor
        kvscout doctor --gateway 10.0.0.5:7050 --json
        kvscout doctor --envoy-admin http://127.0.0.1:9901
    """
    snapshot = run(services.snapshot(engines=engines, proxies=envoy_admin))
    findings = diagnose(snapshot)
    if as_json:
        print_json({"findings": findings})
    else:
        _print(snapshot, findings)
    if is_wrong(findings):
        raise SystemExit(1)


def _print(snapshot: Snapshot, findings: list[Finding]) -> None:
    console = stdout()
    for finding in findings:
        console.print(Text.assemble((finding.severity, _STYLES[finding.severity]), f" {finding.id}"))
        _say(console, finding.what, indent="  ")
        for evidence in finding.evidence:
            _say(console, evidence, indent="  · ")
        _say(console, finding.remedy, indent="  → ")
        console.print()
    console.print(Text(_summary(snapshot, findings)), soft_wrap=True)


def _say(console: Console, text: str, *, indent: str) -> None:
    width = min(console.width, MAX_WIDTH)
    lines = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False
    )
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _summary(snapshot: Snapshot, findings: list[Finding]) -> str:
    counts = [(kind, sum(service.info is not None for service in snapshot.of_kind(kind))) for kind in ServiceKind]
    counted = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts if count) or "nobody answered"
    workers = len(snapshot.workers)
    about = f"checked: {counted}; {workers:,} worker{'s' * (workers != 1)}"
    if not findings:
        return f"nothing is wrong ({about})"
    return f"{len(findings)} finding{'s' * (len(findings) > 1)} ({about})"
