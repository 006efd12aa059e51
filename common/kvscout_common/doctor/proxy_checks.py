"""Checks of an Envoy: requests that its limits refused, or that passed the picker by. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvscout_common.doctor.conditions import PICKER_BYPASSED, PROXY_OVERFLOW, SERVICE_UNREACHABLE
from kvscout_common.doctor.snapshot import Snapshot
from kvscout_common.doctor.symptom import Symptom


def check_proxies(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every Envoy by itself; its counters run since its start."""
    for proxy in snapshot.proxies:
        if proxy.error:
            yield Symptom(SERVICE_UNREACHABLE, f"Envoy {proxy.url}: {proxy.error}")
        for name, count in proxy.counters.items():
            if count:
                condition = PICKER_BYPASSED if name.endswith("failure_mode_allowed") else PROXY_OVERFLOW
                yield Symptom(condition, f"Envoy {proxy.url}: {name} is {count:,} since its start")
