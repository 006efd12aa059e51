"""`make fuzz`: random index operations, damaged bytes for every decoder, hostile calls of every rpc and HTTP path.

Four runs run side by side, as long as wanted. In this process: worlds of the index (`index_world`, longer than in the
tests) and the decoders of both languages (`decoder_fuzz`), in turns, from fresh seeds. In two others: `rpc_fuzz` and
`http_fuzz`, each with the services that it starts. In the fourth: the libFuzzer targets of `native/fuzz`, one after
another, where cargo-fuzz is installed (`cargo install cargo-fuzz`).

The first finding ends the run with a non-zero status: its seed, or the file with libFuzzer's input.
`FUZZ_SECONDS` is how long each run runs.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.decoder_fuzz import decoders, fuzz
from support.fuzz_seeds import write_corpus
from support.index_scenarios import IndexFactory
from support.index_world import run_world

from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available

SECONDS = float(os.environ.get("FUZZ_SECONDS", "3600"))
SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
FUZZ_FOLDER = Path(__file__).parents[1] / "native" / "fuzz"
TARGETS = ("operations", "events", "state", "requests", "hashing", "http", "event_stream", "zmtp", "rpc")

MEAN_STEPS = 120
"""Four times those of the test run: some states need many steps."""
WORLDS_A_ROUND = 40
CASES_A_ROUND = 5_000
ADDRESS_SPACE_BYTES = 8 << 30
"""Of this process: what takes memory without bound fails instead of taking the machine."""
LIMITS = ["-rss_limit_mb=2048", "-malloc_limit_mb=256", "-timeout=20"]
REPORT_SECONDS = 60.0


def start_native_run() -> subprocess.Popen[bytes] | None:
    """Starts all libFuzzer targets, one after another; None where that cannot be."""
    cargo = shutil.which("cargo")
    if cargo is None or shutil.which("cargo-fuzz") is None:
        missing = "cargo" if cargo is None else "cargo-fuzz (`cargo install cargo-fuzz`)"
        print(f"libFuzzer targets are left out: there is no {missing}", flush=True)
        return None
    write_corpus(FUZZ_FOLDER / "corpus")
    seconds = max(1, round(SECONDS / len(TARGETS)))
    # libFuzzer needs compiler switches that the stable compiler has, but does not offer.
    environment = {**os.environ, "RUSTC_BOOTSTRAP": "1"}
    runs = [f"{cargo} fuzz run {target} -- -max_total_time={seconds} {' '.join(LIMITS)}" for target in TARGETS]
    with (FUZZ_FOLDER / "fuzz.log").open("wb") as log:
        return subprocess.Popen(
            ["sh", "-c", " && ".join(runs)],
            cwd=FUZZ_FOLDER.parent,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def start_run(module: str) -> subprocess.Popen[bytes]:
    """Start a module of the tests that fuzzes running services."""
    environment = {**os.environ, "FUZZ_SECONDS": str(SECONDS), "FUZZ_SEED": str(SEED)}
    command = [sys.executable, "-m", f"support.{module}"]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def run_here(goes_on: Callable[[], bool]) -> str:
    """Fuzzes in this process for as long as it goes on; returns what it did."""
    factories: dict[str, IndexFactory] = {"reference": ReferenceIndex}
    if native_available():
        factories["native"] = NativeIndex
    targets = decoders()
    rounds = worlds = steps = cases = 0
    reported = time.monotonic()
    while goes_on():
        for _ in range(WORLDS_A_ROUND):
            steps += run_world(SEED + worlds, factories, mean_steps=MEAN_STEPS)
            worlds += 1
        for name, decoder in targets.items():
            seed = f"{SEED}/{rounds}/{name}"
            try:
                fuzz(decoder, random.Random(seed), CASES_A_ROUND)
            except AssertionError as error:
                raise AssertionError(f"decoder {name}, random.Random({seed!r}): {error}") from error
            cases += CASES_A_ROUND
        rounds += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{worlds} worlds, {steps} steps, {cases} damaged inputs: no finding", flush=True)
    return f"{worlds} worlds, {steps} steps ({', '.join(factories)}), {cases} damaged inputs ({', '.join(targets)})"


def main() -> int:
    """Runs all runs; 0 if none found anything."""
    native = start_native_run()
    others = [start_run("rpc_fuzz"), start_run("http_fuzz"), *([native] if native is not None else [])]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    print(f"FUZZ_SEED={SEED} FUZZ_SECONDS={SECONDS:g}", flush=True)
    deadline = time.monotonic() + SECONDS
    try:
        done = run_here(lambda: time.monotonic() < deadline and not any(run.poll() for run in others))
        print("python:", done, flush=True)
        status = next((run.returncode for run in others if run.poll()), 0) or sum(run.wait() for run in others)
    finally:
        for run in others:
            if run.poll() is None:
                # With all that it started, which has its process group.
                os.killpg(run.pid, signal.SIGTERM)
                run.wait()
    if native is not None:
        print(
            f"libFuzzer: {', '.join(TARGETS)}: {'no finding' if not native.returncode else 'see native/fuzz/fuzz.log'}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
