"""Constants of both languages, by name: where Rust and Python have one of these, they have the same value."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from kvscout_blocks.bytes import codec, events, messages, wire
from kvscout_blocks.index import block_index
from kvscout_common import hashing

SOURCES = Path(__file__).parents[2] / "native" / "src"
SHARED: dict[str, tuple[ModuleType, ...]] = {
    "codec/encode.rs": (codec,),
    "codec/mod.rs": (messages,),
    "events.rs": (events,),
    "hashing.rs": (hashing,),
    "index": (block_index,),
    "wire": (wire,),
}
"""Files or folders of Rust → modules of Python."""
CONSTANT = re.compile(r"const (\w+): (?:u|i)\w+ = ([^;]+);")


def constants(place: str) -> dict[str, int]:
    """Return the constants of a file or folder that are plain numbers."""
    path = SOURCES / place
    files = sorted(path.rglob("*.rs")) if path.is_dir() else [path]
    found = {}
    for file in files:
        for name, text in CONSTANT.findall(file.read_text()):
            expression = text.replace("u32::MAX", "(2**32 - 1)")
            if re.fullmatch(r"[\d_\s+*<()-]+", expression):
                found[name] = int(eval(expression))  # numbers and operators only
    return found


@pytest.mark.parametrize("place", sorted(SHARED))
def test_constants_of_both_languages_have_the_same_values(place: str) -> None:
    compared = 0
    for name, value in constants(place).items():
        for module in SHARED[place]:
            ours = getattr(module, name, getattr(module, f"_{name}", None))
            if isinstance(ours, int):
                assert (name, ours) == (name, value)
                compared += 1
    assert compared, "some are shared"
