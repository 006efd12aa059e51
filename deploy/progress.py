"""Run a command and show how far it is and how long it has run: `progress.py NAME COMMAND...`.

On a terminal one line is rewritten each second; elsewhere, and with PROGRESS_LINES=1, for commands that run beside each
other, a line is written every ten. The output of the command is
written only if it fails. The exit code is the command's. It shows how everything else is installed, and so needs
nothing but Python's standard library.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import sys
import time

LOG_SECONDS = 10.0
"""Between two lines where they cannot be rewritten."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CARGO_BAR = re.compile(r"\[=*>? *\] ")
DETAIL = re.compile(r"^Running `|[Uu]ninstall|^Found existing|^Stored in|^Created wheel|^Preparing metadata")
"""Lines of cargo and pip in between, which would hide how far they are."""
CARGO = {"CARGO_TERM_COLOR": "never", "CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": "80"}
"""Have cargo say `34/57` where no terminal is."""


class Progress:
    """Step of a command now, by the last line it wrote."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.output = bytearray()
        self._line = ""
        self._packages = 0
        self._started = self._written = time.monotonic()
        self._terminal = sys.stdout.isatty() and os.environ.get("PROGRESS_LINES") != "1"

    def read(self, chunk: bytes) -> None:
        """Take what the command wrote."""
        seen = self.output.rfind(b"\n") + 1
        self.output += chunk
        for line in re.split(r"[\r\n]+", CONTROL.sub("", self.output[seen:].decode(errors="replace")))[:-1]:
            text = CARGO_BAR.sub("", line).strip()
            if text.startswith("Collecting "):
                self._packages += 1
                text += f", package {self._packages}"
            elif text.startswith("Installing collected packages: "):
                text = f"Installing {text.count(',') + 1} packages"
            elif DETAIL.search(text):
                continue
            self._line = text or self._line

    def show(self) -> None:
        """Write where it is, if it is time to."""
        if self._terminal:
            print(f"\r\x1b[K{self.state(shutil.get_terminal_size().columns - 1)}", end="", flush=True)
        elif time.monotonic() >= self._written + LOG_SECONDS:
            self._written = time.monotonic()
            print(self.state(118), flush=True)

    def state(self, width: int) -> str:
        """Say in one line, of a limited length, where it is."""
        return f"[{self._elapsed()}] {self.name}: {self._line}"[:width]

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02}"

    def end(self, code: int) -> None:
        """Write how it ended, and what the command wrote if it failed."""
        if self._terminal:
            print("\r\x1b[K", end="")
        if code:
            sys.stdout.flush()
            sys.stdout.buffer.write(bytes(self.output))
        print(f"[{self._elapsed()}] {self.name}: {f'failed with exit code {code}' if code else 'done'}", flush=True)


def run(name: str, command: list[str]) -> int:
    """Run a command to its end; return its exit code."""
    progress = Progress(name)
    print(f"{name} ...", flush=True)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | CARGO
    ) as process:
        assert process.stdout is not None
        output = process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=1):
                    if not (chunk := os.read(output, 65536)):
                        break
                    progress.read(chunk)
                progress.show()
        code = process.wait()
    progress.end(code)
    return code


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
