"""Keys of `kvscout top`: what is selected, sorted and filtered, and how keys change it.

::

    bytes of the terminal ──▶ keys ──▶ pressed(view, key, names) ──▶ the next view
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from kvscout_common.doctor.snapshot import RankName

SORTS: Final = ("worker", "req/s", "active", "hit rate", "TTFT", "state")
"""In the order in which `s` goes through them."""
MAX_FILTER_CHARACTERS: Final = 100

_READ_BYTES: Final = 1_024
_SEQUENCES: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "q",
}
_SAME: Final = {"h": "?", "k": "up", "j": "down"}
_KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[ -/]*[@-~]|\x1b|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class View:
    """Part of the data that is on the screen."""

    sort: str = SORTS[0]
    filter: str = ""
    """Only workers and models whose names contain it."""
    is_typing: bool = False
    """Keys are the filter's text."""
    selected: RankName | None = None
    is_opened: bool = False
    """The page of the selected worker."""
    is_help: bool = False
    is_over: bool = False

    def shows(self, name: RankName, model: str) -> bool:
        """Return whether a worker rank passes the filter."""
        wanted = self.filter.casefold()
        return wanted in str(name).casefold() or wanted in model.casefold()


def pressed(view: View, key: str, names: Sequence[RankName]) -> View:
    """Return the view after a key.

    Args:
        view: Before.
        key: One of `keys`.
        names: Worker ranks in the order in which they are shown.
    """
    if view.is_typing:
        return _typed(view, key)
    if view.is_help:
        return replace(view, is_help=False, is_over=key == "q")
    changes: dict[str, dict[str, Any]] = {
        "q": {"is_over": True},
        "?": {"is_help": True},
        "s": {"sort": SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]},
        "/": {"is_typing": True, "is_opened": False},
        "escape": {"is_opened": False} if view.is_opened else {"filter": "", "selected": None},
        "up": {"selected": _beside(view, -1, names)},
        "down": {"selected": _beside(view, 1, names)},
    }
    if names:
        changes["enter"] = {"selected": view.selected if view.selected in names else names[0], "is_opened": True}
    return replace(view, **changes.get(_SAME.get(key, key), {}))


def _typed(view: View, key: str) -> View:
    match key:
        case "enter":
            return replace(view, is_typing=False)
        case "escape":
            return replace(view, is_typing=False, filter="")
        case "backspace":
            return replace(view, filter=view.filter[:-1])
    if len(key) == 1 and key.isprintable():
        return replace(view, filter=(view.filter + key)[:MAX_FILTER_CHARACTERS])
    return view


def _beside(view: View, steps: int, names: Sequence[RankName]) -> RankName | None:
    if not names:
        return view.selected
    if view.selected not in names:
        return names[0 if steps > 0 else -1]
    return names[max(0, min(names.index(view.selected) + steps, len(names) - 1))]


def keys(text: str) -> Iterator[str]:
    """Yield the keys of what a terminal sent: "up", "enter", … or a character; sequences of other keys are left out."""
    for found in _KEY.findall(text):
        key = _SEQUENCES.get(found, found)
        if not key.startswith("\x1b"):
            yield key


@contextmanager
def keyboard(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call for each key pressed while the block runs, on the event loop; where stdin is no terminal there are none."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def readable() -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            loop.remove_reader(descriptor)  # the terminal is gone
        for key in keys(decoder.decode(data)):
            on_key(key)

    settings = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
