"""Commands that a driver takes on its standard input, one a line; `bench/README.md` has the protocol.

It needs the standard library alone: a peer's driver runs in the peer's environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

Handle = Callable[[str, dict[str, str]], Mapping[str, Any]]
"""Carries out a command: (verb, arguments) → answer."""


def serve(handle: Handle, lines: Iterable[str] = sys.stdin, out: TextIO = sys.stdout) -> None:
    """Answer commands until `quit` or their end; an error is answered, and the next command is read."""
    for line in lines:
        verb, *words = line.split() or [""]
        try:
            answer = handle(verb, dict(word.split("=", maxsplit=1) for word in words))
        except (LookupError, ValueError, TimeoutError) as error:
            answer = {"error": f"{line.strip()}: {error!r}"}
        print(json.dumps(answer), file=out, flush=True)
        if verb == "quit":
            return
