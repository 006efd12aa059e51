"""Every regular expression of the product costs one pass over what it reads, whoever wrote that."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from support.cpu_cost import TIMES, assert_in_proportion

PACKAGES: Final = (
    *("kvscout_common", "kvscout_blocks", "kvscout_client", "kvscout_cli"),
    *("kvscout_gateway", "kvscout_indexer", "kvscout_scheduler", "kvscout_bridge"),
)
OPERATORS: Final = {"_CERTIFICATE"}
"""Those that read nothing but files of whoever runs the service."""
UNITS: Final = (
    *("a", "0", "9", "A", "_", "-", ".", ",", ":", "/", "=", ";", '"', "\\", " ", "\t", "\n", "[", "]", "{", "}", "%"),
    *('\\"', '"\\', "a.", "a[0]", "a[", "a,", "a, ", ", ", "1,", "[1,", 'a="b",', ';a="', "; a=b", "a=", "/a", "/v1"),
    *('"usage" ', '"usage":', "\\n", "\\u0061", "\\ud83d", "http://", "a://", "[a", "<|", "|>", 'name="model"\r\n'),
    *("snap-1-1-1of1", "1/1", "w1", "-----BEGIN CERTIFICATE-----"),
)
SIZE: Final = 8_000
BEGINS: Final = ("", '"', "[", "{a")
SEARCHING: Final = r"\.(?:search|finditer|findall|sub|split)\("


def patterns() -> Iterator[tuple[str, re.Pattern[Any], bool]]:
    """Find the patterns of all modules, and whether they are searched for, not only matched at a known place."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            for attribute, value in vars(module).items():
                if isinstance(value, re.Pattern):
                    searched = re.search(attribute + SEARCHING, inspect.getsource(module)) is not None
                    yield f"{found.name}.{attribute}", value, searched


ALL: Final = tuple(patterns())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pattern", "searched"), [pytest.param(*one, id=one[0]) for one in ALL])
def test_four_times_the_text_costs_no_more_than_in_proportion(
    name: str, pattern: re.Pattern[Any], searched: bool
) -> None:
    if name.rpartition(".")[2] in OPERATORS:
        return

    def use(text: Any) -> None:
        pattern.match(text)
        pattern.fullmatch(text)
        if searched:
            pattern.search(text)
            for _ in pattern.finditer(text):
                pass

    for unit in UNITS:
        for begin in BEGINS:
            texts: list[Any] = [begin + unit * (times * SIZE // len(unit)) + "!" for times in (1, TIMES)]
            if isinstance(pattern.pattern, bytes):
                texts = [text.encode() for text in texts]
            assert_in_proportion(use, texts[0], texts[1], repr(begin + unit))


def test_the_patterns_of_the_product_are_found() -> None:
    names = {name.rpartition(".")[2] for name, _, searched in ALL if searched}
    assert {"_USAGE", "_BRACKETS", "_ESCAPE"} <= names
    assert len(ALL) > 20
