"""The report of a run of everything as Markdown: where it ran, a table a part, where a peer is better."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout_bench.all_bench import Report
from kvscout_bench.harness import Row

_COLUMNS = "| | kvscout | p99 | goal | peer | its p99 | ratio | rounds |"
_RULE = "|---|---|---|---|---|---|---|---|"


def markdown(report: Report) -> str:
    """Return the whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "# What was measured"
    yield ""
    rounds = "one short round, which judges nothing" if report.quick else f"medians of {report.rounds} rounds"
    yield f"`kvscout bench all`, {rounds}. A ratio says how many times better kvscout is than the peer beside it."
    yield ""
    yield f"* machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux {machine.kernel}"
    yield f"* commit: {report.commit or 'not known'}; {machine.rustc or 'no rustc'}"
    yield from (f"* {name}: {version}" for name, version in report.versions.items())
    for name, part in report.parts.items():
        yield ""
        yield f"## {name}"
        yield ""
        before, after = part.load
        yield f"{part.seconds:.0f} s; load average {before:.2f} before, {after:.2f} after."
        if part.failure:
            yield ""
            yield f"**Ended early:** {part.failure}"
        if part.rows:
            yield ""
            yield _COLUMNS
            yield _RULE
            yield from map(_row, part.rows)
    yield ""
    yield "## Where we lose"
    yield ""
    lost, missed = report.lost(), report.missed()
    yield from (f"* {name}: {row.title}: {number(row.value)} {row.unit}, peer {number(row.peer)}" for name, row in lost)
    yield from (
        f"* {name}: {row.title}: {number(row.value)} {row.unit}, goal {number(row.goal)}" for name, row in missed
    )
    if not lost and not missed:
        yield "Nowhere in this run." if not report.quick else "A short run judges nothing."


def _row(row: Row) -> str:
    value = f"{number(row.value)} {row.unit}"
    low, high = row.spread
    peer = "–" if row.peer is None else number(row.peer) if row.peer_is_measured else f"({number(row.peer)})"
    cells = (
        row.title.replace("|", "/"),
        f"**{value}**" if row.met is False else value,
        number(row.p99),
        number(row.goal),
        peer,
        number(row.peer_p99),
        f"{row.ratio:.2f}×" if row.ratio else "–",
        f"{number(low)} … {number(high)}",
    )
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    """Return a number to three digits; "–" for none."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
