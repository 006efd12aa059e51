"""The report of a run of everything as Markdown: where it ran, a table a part, where a peer is better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvscout_bench.all_bench import Report
from kvscout_bench.harness import Row


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
            yield from _table(part.rows)
    yield ""
    yield "## Where we lose"
    yield ""
    lost, missed = report.lost(), report.missed()
    for name, row, peer in lost:
        ours, theirs = number(row.ours.value), number(row.peers[peer].value)
        yield f"* {name}: {row.title}: {ours} {row.case.unit}, {peer} {theirs}"
    for name, row in missed:
        yield f"* {name}: {row.title}: {number(row.ours.value)} {row.case.unit}, goal {number(row.case.goal)}"
    if not lost and not missed:
        yield "Nowhere in this run." if not report.quick else "A short run judges nothing."


def _table(rows: Sequence[Row]) -> Iterator[str]:
    head = columns(rows)
    yield f"| {' | '.join(['', *head[1:]])} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        title, value, *others = cells(row, head)
        value = f"**{value}**" if row.met is False else value
        yield f"| {' | '.join((title.replace('|', '/'), value, *others))} |"


def columns(rows: Iterable[Row]) -> list[str]:
    """Return the heads of a table: one for each peer after those that all tables have."""
    peers = dict.fromkeys(peer for row in rows for peer in row.peers)
    return ["workload", "kvscout", "rounds", "p99", "goal", "published", *peers]


def cells(row: Row, head: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a row below the heads of `columns`."""

    def peer(name: str) -> str:
        if name not in row.peers:
            return "–"
        value, ratio = number(row.peers[name].value), row.ratio(name)
        return f"{value} ({ratio:.2f}×)" if ratio else value

    low, high = row.ours.spread
    return (
        row.title,
        f"{number(row.ours.value)} {row.case.unit}",
        f"{number(low)} … {number(high)}",
        number(row.ours.p99),
        number(row.case.goal),
        " … ".join(map(number, row.case.published)) if row.case.published else "–",
        *map(peer, head[6:]),
    )


def number(value: float | None) -> str:
    """Return a number to three digits; "–" for none."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
