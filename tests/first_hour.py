"""`make first-hour`: what a newcomer does, from a clone on, with the times that it took.

Clone, set-up, every snippet and output of the pages. Then each part of a stack is broken, and doctor must name it
first, within `NAMED_WITHIN_SECONDS` on a machine that is not busy. `HERE=1` leaves the clone out.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.first_hour import DAMAGES, Named, break_each

ROOT = Path(__file__).resolve().parents[1]
NAMED_WITHIN_SECONDS = 5.0
"""From the moment of the damage, with the run of doctor itself."""
STEPS = (
    ("make setup", ("make", "setup")),
    (
        "the pages' snippets and outputs",
        ("make", "test", "TESTS=tests/cli/test_snippets.py tests/cli/test_page_outputs.py"),
    ),
)


def newcomer(clone: Path) -> bool:
    """Clone, set up and try the pages; return whether all of it worked."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for what, command in STEPS:
        began = time.monotonic()
        done = subprocess.run(command, cwd=clone, check=False)
        print(f"{what}: {time.monotonic() - began:.0f} s, exit {done.returncode}", flush=True)
        if done.returncode:
            return False
    return True


async def bad_night() -> bool:
    """Break each part; return whether doctor named all of them first, and in time."""
    told: list[bool] = []

    def report(named: Named) -> None:
        in_time = named.right and named.seconds <= NAMED_WITHIN_SECONDS
        told.append(in_time)
        mark = "" if in_time else "  <- LATE" if named.right else "  <- NOT FIRST, OR UNNAMED"
        print(f"{named.damage.what:24} {named.seconds:7.1f}  {named.sentence}{mark}", flush=True)

    print(f"{'broken':24} {'seconds':>7}  doctor's first sentence", flush=True)
    await break_each(DAMAGES, report)
    return all(told)


def main() -> int:
    """Run all of it; 0 = all is well."""
    well = True
    if not os.environ.get("HERE"):
        with TemporaryDirectory(prefix="kvscout-") as name:
            well = newcomer(Path(name) / "kvscout")
    return 0 if asyncio.run(bad_night()) and well else 1


if __name__ == "__main__":
    sys.exit(main())
