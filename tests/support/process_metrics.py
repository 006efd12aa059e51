"""The Prometheus samples of a running process."""

from __future__ import annotations

import asyncio
import urllib.request

from support.processes import Running


async def scrape(running: Running) -> dict[str, float]:
    """Every sample of /metrics by its name with labels."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{running.ready['metrics_port']}/metrics") as response:
            text: str = response.read().decode()
            return text

    lines = (await asyncio.to_thread(read)).splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def sum_of(samples: dict[str, float], name: str) -> float:
    """What Prometheus' sum(name) is."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)
