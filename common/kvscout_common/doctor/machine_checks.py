"""Checks of the processes and machines that services run on. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from kvscout.v1 import types_pb2
from kvscout_common.doctor.conditions import CLOCKS_DIFFER, DESCRIPTORS_FEW, REFERENCE_BACKEND, VERSIONS_DIFFER
from kvscout_common.doctor.snapshot import Service, Snapshot
from kvscout_common.doctor.symptom import Symptom
from kvscout_common.process.descriptors import FEW
from kvscout_common.rpc.service_info import SLOW_BACKEND

CLOCK_SECONDS = 2.0
"""By which clocks may differ."""
FULL = 0.8
"""Share of the files that may be open, above which it gets tight."""


def check_machines(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield every service by itself, and all together."""
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for service in snapshot.services:
        info = service.info
        if info is None:
            continue
        versions[info.version].append(service.name)
        if info.backend == types_pb2.BACKEND_REFERENCE:
            yield Symptom(REFERENCE_BACKEND, service.name, (SLOW_BACKEND,))
        limit, used = info.max_descriptors, info.open_descriptors
        if limit and (limit < FEW or used > FULL * limit):
            yield Symptom(DESCRIPTORS_FEW, f"{service.name}: {used:,} of {limit:,} open")
    if len(versions) > 1:
        text = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(versions.items()))
        yield Symptom(VERSIONS_DIFFER, text)
    yield from _clocks(snapshot)


def _clocks(snapshot: Snapshot) -> Iterator[Symptom]:
    """Yield whose clock is not that of most; of this machine, too."""
    clocks: list[tuple[Service, float]] = [
        (service, service.clock_offset_seconds)
        for service in snapshot.services
        if service.clock_offset_seconds is not None
    ]
    # The machine that asks has a vote, too: its own clock is ahead of itself by nothing.
    middle = median([0.0, *(offset for _, offset in clocks)])
    for service, offset in clocks:
        if abs(offset - middle) > CLOCK_SECONDS + service.clock_doubt_seconds:
            yield Symptom(CLOCKS_DIFFER, f"{service.name} is {_off(offset - middle)}")
    if abs(middle) > CLOCK_SECONDS + max((service.clock_doubt_seconds for service, _ in clocks), default=0.0):
        yield Symptom(CLOCKS_DIFFER, f"the machine that asks is {_off(-middle)}")


def _off(seconds: float) -> str:
    return f"{abs(seconds):,.0f} s {'ahead' if seconds > 0 else 'behind'}"
