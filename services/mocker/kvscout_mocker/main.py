"""`kvscout-mocker`: flags and environment → one frozen config → run."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click
import uvloop

from kvscout_common.errors import ConfigError
from kvscout_common.flags import SectionedCommand, flag
from kvscout_common.observability.telemetry import configure_logging
from kvscout_common.process.descriptors import raise_descriptor_limit
from kvscout_common.variables import warn_of_variables
from kvscout_mocker.config import config_from_flags, flags
from kvscout_mocker.process import run


@click.command(cls=SectionedCommand)
@flags
@flag(
    "--log-level",
    program="mocker",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="WARNING",
)
def main(log_level: str, **values: Any) -> None:
    """A vLLM-like engine without a GPU: real prefix cache, real KV events, invented tokens.

    Prints one JSON line with its real ports when it is ready.
    """
    configure_logging(log_level, "text")
    warn_of_variables(logging.getLogger("kvscout.mocker"))
    try:
        config = config_from_flags(**values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    raise_descriptor_limit()
    sys.exit(uvloop.run(run(config)))


if __name__ == "__main__":
    main()
