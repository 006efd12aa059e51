"""`kvscout bench`: the benchmarks, which are in the source tree and not in the package."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from kvscout_common.errors import FailedPrecondition
from kvscout_common.settings.flags import SectionedCommand

_IN_A_CLONE = Path(__file__).resolve().parents[3] / "bench"


def _find() -> click.Command:
    """Return the command of the benchmarks, or one that says where they are."""
    if find_spec("kvscout_bench") is None:
        if not (_IN_A_CLONE / "kvscout_bench").is_dir():
            return _missing
        sys.path.append(str(_IN_A_CLONE))
    found: click.Command = import_module("kvscout_bench.command").command
    return found


@click.command(cls=SectionedCommand, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def _missing(arguments: tuple[str, ...]) -> None:
    """Measure on this machine; needs a clone of the repository."""
    raise FailedPrecondition(
        "the benchmarks are not part of the installed package: run `make bench`, or `kvscout bench` as installed by "
        "`make setup`, in a clone of https://github.com/kvscout/kvscout"
    )


command = _find()
