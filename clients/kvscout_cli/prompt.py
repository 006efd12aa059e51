"""Prompts of commands: arguments, a file, or stdin."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TextIO

import click

from kvscout_cli.connection import option


def prompt_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[TOKENS]...` and `--file` to a command; it gets them as `token_ids`."""

    @click.argument("tokens", nargs=-1)
    @option(
        "--file", "source", type=click.File(), help="Read token ids from a file, - = stdin: a JSON list, or numbers."
    )
    @functools.wraps(command)
    def with_prompt(*arguments: Any, tokens: tuple[str, ...], source: TextIO | None, **values: Any) -> Any:
        if bool(tokens) == bool(source):
            raise click.UsageError("Give token ids as arguments or with --file (- = stdin).")
        text = source.read() if source else " ".join(tokens)
        return command(*arguments, token_ids=parse_tokens(text), **values)

    return with_prompt


def parse_tokens(text: str) -> list[int]:
    """Token ids in a text: a JSON list, or numbers between spaces, commas or line ends.

    Raises:
        BadParameter: It is something else, empty, or an id is not a u32.
    """
    try:
        if text.lstrip().startswith("["):
            ids = json.loads(text)
        else:
            ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise click.BadParameter(f"not token ids: {error}", param_hint="TOKENS") from None
    if not ids:
        raise click.BadParameter("no token ids given", param_hint="TOKENS")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            raise click.BadParameter(f"not a token id: {token!r}", param_hint="TOKENS")
    return list(ids)
