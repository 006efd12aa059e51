"""`make agentic-trace`: AIPerf makes the sessions of `kvscout replay --workload agentic-code` again."""

from __future__ import annotations

import gzip
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from kvscout_bench.strangers import VERSIONS, wheel_venv
from kvscout_lab.workloads.generators import AGENTIC_CODE

SESSIONS: Final = 240
SEED: Final = 42


def main() -> None:
    """Write the file."""
    aiperf = wheel_venv(VERSIONS["AIPERF"]).with_name("aiperf")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(aiperf), "synthesize", "agentic-code", "--num-sessions", str(SESSIONS), "--seed", str(SEED)]
        subprocess.run([*command, "--output", folder], check=True)
        (dataset,) = Path(folder).glob("*/dataset.jsonl")
        AGENTIC_CODE.write_bytes(gzip.compress(dataset.read_bytes(), 9, mtime=0))


if __name__ == "__main__":
    main()
