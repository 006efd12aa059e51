"""A process that behaves, or misbehaves, as its first argument says; run as `python -m fake_service MODE`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def announce() -> None:
    print(json.dumps({"ready": True, "port": 1, "pid": os.getpid(), "mark": os.environ.get("MARK")}), flush=True)


def on_term(*_: object) -> None:
    print("stopping", flush=True)
    sys.exit(0)


def main(mode: str) -> None:
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit("it crashed on purpose"))
    if mode == "broken":
        sys.exit("it cannot start")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(grandchild.pid, file=sys.stderr, flush=True)
    if mode == "chatty":
        sys.stderr.write("x" * 1_000_000)
        sys.stderr.flush()
        print('{"ready": "not yet"}\n{broken', flush=True)
    if mode != "silent":
        announce()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
