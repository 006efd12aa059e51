"""An honest HTTP client as a process of its own: `python -m http_probe URL` asks every 20 ms until its input ends.

Prints one line of JSON: how many requests it made, the longest of them in ms, and what failed.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

PAUSE_SECONDS = 0.02
REQUEST_SECONDS = 30.0


def main() -> int:
    """Ask until standard input ends."""
    url = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=REQUEST_SECONDS)
    delays: list[float] = []
    failures: list[str] = []
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        began = time.perf_counter()
        try:
            connection.request("GET", url.path)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                failures.append(f"status {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
            connection.close()
        delays.append((time.perf_counter() - began) * 1e3)
    print(json.dumps({"requests": len(delays), "longest_ms": round(max(delays, default=0.0), 1), "failures": failures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
