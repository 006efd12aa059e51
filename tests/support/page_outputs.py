"""Outputs of commands that pages show: read from a page, made anew on a running stack, compared by shape.

The mark `<!-- outputs of: kvscout up FLAGS -->` before a fenced block starts a stack for its commands; those of a later
block marked `<!-- outputs -->` run on the same one. `; after: COMMANDS` runs something first, unseen. A command
under which nothing stands stays without an output; one whose last line is `…` shows the first lines.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from support.processes import DEADLINE_SECONDS

MARK = r"<!-- outputs(?: of: kvscout up(?P<flags>[^;>]*?))?(?:; after: (?P<after>.*?))? -->"
BLOCK = re.compile(rf"^ *{MARK}\n+(?P<indent> *)```\w*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
REQUEST_ID = re.compile(r"\bgen-[0-9a-f]{32}\b")
ROOT = Path(__file__).resolve().parents[2]
SHOWN_REQUEST_ID = "gen-499a46646b6d40568a144a496f980e72"
NUMBER = re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?(?: (?:ms|s|µs)\b)?")
ELISION = "…"


class Example(NamedTuple):
    """A command of a page with the output beneath it."""

    command: str
    output: str
    """Lines as they stand on the page; empty: none is shown."""
    place: tuple[int, int]
    """Where the output stands in the page's text."""


@dataclass(frozen=True, slots=True)
class Session:
    """The examples of a page that one stack runs."""

    flags: tuple[str, ...]
    """Of `kvscout up`."""
    blocks: list[tuple[str, list[Example]]] = field(default_factory=list)
    """What is run before, unseen, and the examples of each block."""


class Ran(NamedTuple):
    code: int
    output: str


def sessions(page: str) -> list[Session]:
    """Return the marked examples of a page's text."""
    found: list[Session] = []
    for block in BLOCK.finditer(page):
        if block["flags"] is not None:
            found.append(Session(tuple(block["flags"].split())))
        assert not block["indent"], f"a block with outputs is not indented: {block['text']}"
        begin = block.start("text")
        examples = [
            Example(one[1], one[2].rstrip("\n") and one[2], (begin + one.start(2), begin + one.end(2)))
            for one in COMMAND.finditer(block["text"])
        ]
        assert examples, f"no command in the block of {block[0]}"
        found[-1].blocks.append((block["after"] or "", examples))
    return found


def rewritten(page: str, outputs: list[tuple[Example, str]]) -> str:
    """Return the page's text with other outputs."""
    for example, output in sorted(outputs, key=lambda one: one[0].place, reverse=True):
        begin, end = example.place
        # An empty line between two examples is the page's own.
        blank = "\n" if example.output.endswith("\n\n") else ""
        page = page[:begin] + shortened(REQUEST_ID.sub(SHOWN_REQUEST_ID, output), example) + blank + page[end:]
    return page


def shortened(output: str, example: Example) -> str:
    """Return as many lines of an output as the page shows."""
    shown = example.output.rstrip("\n").split("\n")
    lines = [line.rstrip() for line in output.rstrip("\n").split("\n")]
    return "\n".join([*lines[: len(shown) - 1], ELISION] if shown[-1] == ELISION else lines) + "\n"


def shape(output: str) -> list[str]:
    """Return the words of each line, without numbers, ids and widths.

    Of JSON, only which lines it has: a stream's messages are merged if they arrive together.
    """
    text = NUMBER.sub("0", REQUEST_ID.sub("gen-0", output.strip()).replace("localhost", "127.0.0.1"))
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return sorted({re.sub("( w0)+", " w0", line.rstrip(",")) for line in lines}) if text.startswith("{") else lines


class Shell:
    """A shell that runs one command after the other and returns each one's output."""

    END = "\x1e"

    def __init__(self, process: asyncio.subprocess.Process, addresses: Mapping[str, str]) -> None:
        self._process = process
        self._addresses = addresses

    async def run(self, command: str) -> Ran:
        """Run one command; its addresses are those of the stack."""
        for default, now in self._addresses.items():
            command = command.replace(default, now)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} </dev/null; printf '{self.END}%s{self.END}' $?\n".encode())
        await self._process.stdin.drain()
        async with asyncio.timeout(DEADLINE_SECONDS):
            text = (await self._process.stdout.readuntil(self.END.encode()))[:-1]
            code = (await self._process.stdout.readuntil(self.END.encode()))[:-1]
        return Ran(int(code), text.decode())


@asynccontextmanager
async def shell(directory: Path, addresses: Mapping[str, str], **environment: str) -> AsyncIterator[Shell]:
    """Start a shell in which the commands of kvscout are found.

    Args:
        directory: Where it runs.
        addresses: What stands for the default addresses.
        environment: Variables beside those of this process.
    """
    (directory / ".curlrc").write_text("silent\nshow-error\n")
    (directory / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOUT_")}
    wide = {"COLUMNS": "160", "CURL_HOME": str(directory), "PATH": path}
    process = await asyncio.create_subprocess_exec(
        "bash",
        cwd=directory,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**24,
        env={**clean, **wide, **environment},
    )
    try:
        yield Shell(process, addresses)
    finally:
        process.kill()
        await process.wait()
