"""Prompts on the command line."""

from __future__ import annotations

import click
import pytest

from kvscout_cli.prompt import parse_tokens


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", "1, 2,\n3\n", "[1, 2, 3]", " [1,2,3]"])
def test_numbers_and_json_lists_are_read(text: str) -> None:
    assert parse_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "  ", "[]", "a", "1.5", "[1.5]", "[true]", "-1", "4294967296", "[1", '["1"]'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_tokens(text)
