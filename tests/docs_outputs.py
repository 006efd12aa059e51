"""`make docs-outputs`: runs the commands of the pages that show outputs, and writes these into the pages.

A page is marked as `support/page_outputs.py` says. The stacks take the default ports, which must be free; where user
namespaces are allowed, `unshare --map-root-user --net sh -c 'ip link set lo up; make docs-outputs'` has all of them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cli.test_up import kvscout, output
from support.page_outputs import Example, rewritten, sessions, shell

ROOT = Path(__file__).resolve().parents[1]
SEED = "1"
"""Of the scheduler's choice among equals, so that a page changes only where kvscout did."""


def marked_pages() -> list[Path]:
    """Return the pages that show outputs of a stack."""
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if sessions(page.read_text())]


async def outputs_of(page: str, name: str) -> list[tuple[Example, str]]:
    """Run the commands of a page, each session on a stack of its own."""
    found = []
    for session in sessions(page):
        with TemporaryDirectory(prefix="kvscout-") as temporary:
            directory = Path(temporary)
            state_dir = ("--state-dir", str(directory / ".kvscout"))
            started = await kvscout("up", "--detach", "--seed", SEED, *state_dir, *session.flags)
            if started.returncode:
                raise SystemExit(await output(started))
            try:
                async with shell(directory, {}) as run:
                    for before, examples in session.blocks:
                        if before:
                            await run.run(before)
                        for example in examples:
                            print(f"{name}: {example.command.splitlines()[0]}", flush=True)
                            code, text = await run.run(example.command)
                            if not example.output and code:
                                raise SystemExit(f"{name}: {example.command}: exit code {code}\n{text}")
                            if example.output:
                                found.append((example, text))
            finally:
                await kvscout("down", *state_dir)
    return found


def main(names: list[str]) -> None:
    """Write the outputs of the pages named, or of all, anew."""
    for page in marked_pages():
        if not names or page.name in names:
            text = page.read_text()
            page.write_text(rewritten(text, asyncio.run(outputs_of(text, page.name))))


if __name__ == "__main__":
    main(sys.argv[1:])
