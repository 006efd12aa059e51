"""`kvscout why`: why is the hit rate low?"""

from __future__ import annotations

from typing import Final

import click
from google.protobuf.json_format import MessageToDict

from kvscout.v1 import gateway_pb2
from kvscout_cli.connection import Connection, connection_flags, json_flag, of_model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo, print_json
from kvscout_common.doctor.ladder import NAMES, RUNGS, share, verdict
from kvscout_common.enum_words import word_of
from kvscout_common.settings.flags import SectionedCommand

BAR: Final = 24
"""Characters of 100 %."""


@click.command(cls=SectionedCommand)
@of_model_flag
@option(
    "--window",
    default=300,
    show_default=True,
    type=click.IntRange(1, 3_600),
    help="Length of the window, in seconds.",
)
@option("--sessions", is_flag=True, help="Also by session class: first turns, later turns, subagents, no session.")
@json_flag
@connection_flags
def command(connection: Connection, *, model: str, window: int, sessions: bool, as_json: bool) -> None:
    """Show where prompt tokens could have been cached, and where each part of them was lost.

    \b
        kvscout why
        kvscout why --window 3600 --sessions
    """

    async def asked() -> gateway_pb2.GetLadderResponse:
        async with connection.router() as router:
            return await router.ladders(model=model, window_seconds=window)

    answer = run(asked())
    shown = [one for one in answer.ladders if sessions or not one.session_class]
    if as_json:
        print_json([MessageToDict(one, preserving_proto_field_name=True) for one in shown])
        return
    if not shown:
        echo(f"No request has ended in the last {window} s.")
    for one in shown:
        _print(one)


def _print(ladder: gateway_pb2.Ladder) -> None:
    words = word_of(gateway_pb2.SessionClass, ladder.session_class)
    echo(f"{ladder.model}{f' ({words})' if words else ''}: {ladder.requests:,} requests,")
    echo(f"{ladder.prompt_tokens:,} prompt tokens")
    losses = {word_of(gateway_pb2.LadderLossKind, one.kind): one for one in ladder.losses}
    for name, field, kinds in RUNGS:
        for kind in kinds:
            if kind in losses and losses[kind].tokens:
                lost = losses[kind]
                cost = f" {lost.gpu_seconds:7.1f} s" if lost.gpu_seconds else ""
                echo(f"    -{share(lost.tokens, ladder):5.1f} %{cost}  {NAMES[kind]}")
                if lost.saved_seconds:
                    echo(f"            {lost.saved_seconds:9.1f} s  of waiting saved by that, estimated")
        if name == "actual" and ladder.unpredicted_tokens:
            echo(f"    +{share(ladder.unpredicted_tokens, ladder):5.1f} %  more than predicted")
        percent = share(getattr(ladder, field), ladder)
        echo(f"{name:<16}{percent:5.1f} %  {'█' * round(percent * BAR / 100)}")
    echo(verdict(ladder))
    for note in _notes(ladder):
        echo(note)
    echo()


def _notes(ladder: gateway_pb2.Ladder) -> list[str]:
    notes = []
    if ladder.unreported_requests:
        notes.append(f"{ladder.unreported_requests:,} requests: their engines report no cached tokens.")
    if ladder.workers and not ladder.capacity_blocks:
        notes.append("No worker loses by capacity here: the size of some cache is unknown.")
    if ladder.foreign_tokens:
        points = f"{share(ladder.foreign_tokens, ladder):.1f} %"
        notes.append(f"{points} is held, but was never in a prompt: engines' own outputs, or other routers.")
    if ladder.sample_weight > 1:
        notes.append(f"Estimated from one block in {ladder.sample_weight:,}.")
    if ladder.seconds_per_token:
        notes.append(f"Seconds of GPUs are estimated: {ladder.seconds_per_token * 1e6:.0f} us a prompt token.")
    return notes
