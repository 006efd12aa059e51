"""Every worked example of docs/policies.md, run as it stands, and the example package."""

from __future__ import annotations

import importlib.util
import math
import re
import tomllib
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from support.scheduler_builders import BLOCK, ManualClock, overlaps, request, reserve, scheduler, worker

from kvscout_common.worker import DeviceClass, WorkerRank
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.policies import PolicyRegistry, installed_policies
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import ConfigOverride
from kvscout_scheduler.values.settings import SchedulerSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    yaml.safe_load(text)
    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/policies.md").read_text(), re.DOTALL)
]
DRAWS = 400
FIELDS = {"total_slots", "device_class"}


def world(example: dict[str, Any]) -> Scheduler:
    """The scheduler of an example, with its load booked."""
    specs = []
    for name, told in example["workers"].items():
        fields = {key: value for key, value in told.items() if key in FIELDS}
        if "device_class" in fields:
            fields["device_class"] = DeviceClass(fields["device_class"])
        specs.append(worker(name, **fields))
    made = scheduler(*specs, policy=example["policy"])
    block = 1000
    for name, told in example["workers"].items():
        for blocks, cached in told.get("active", ()):
            reserve(made, f"other-{block}", name, list(range(block, block + blocks)), cached_tokens=cached * BLOCK)
            block += blocks
        if "usage" in told:
            reported = EngineMetrics(told["usage"], None, told.get("waiting"))
            made.report_metrics("default", WorkerRank(name, 0), reported)
    return made


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{n} {e['policy']}" for n, e in enumerate(EXAMPLES)])
def test_a_worked_example_is_what_the_policy_does(example: dict[str, Any]) -> None:
    made = world(example)
    asked = request(
        list(range(example["prompt_blocks"])),
        on=overlaps(**{name: told["overlap"] for name, told in example["workers"].items() if "overlap" in told}),
        override=ConfigOverride(overlap_score_weight=example.get("overlap_score_weight")),
        pinned_worker_id=example.get("pinned", ""),
        explain=True,
    )
    decisions = [made.select(asked) for _ in range(len(example.get("in_turn", ())) or DRAWS)]
    chosen = [decision.rank.worker_id for decision in decisions]
    explanation = decisions[0].explanation
    assert explanation is not None
    rows = {row.rank.worker_id: row for row in explanation.candidates}
    assert {name: rows[name].cost for name in example.get("costs", ())} == pytest.approx(example.get("costs", {}))
    expected = example.get("probabilities", {})
    assert {name: rows[name].probability for name in expected} == pytest.approx(expected, abs=1e-4)
    for name, probability in expected.items():
        spread = 6 * math.sqrt(probability * (1 - probability) / DRAWS)
        assert abs(Counter(chosen)[name] / DRAWS - probability) <= spread
    if "in_turn" in example:
        assert chosen == example["in_turn"]
    else:
        assert set(chosen) == set(example["chosen"])
    assert all(decision.explanation and decision.explanation.reason for decision in decisions[:3])


def test_every_policy_has_a_worked_example() -> None:
    assert {example["policy"] for example in EXAMPLES} == set(installed_policies().names)


def test_the_example_package_brings_a_policy() -> None:
    folder = ROOT / "examples/policy_package"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["kvscout.policies"].items()
    module, _, attribute = target.partition(":")
    spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    factory = getattr(loaded, attribute)
    made = Scheduler(
        SchedulerSettings(policy=name),
        clock=ManualClock(),
        rng=Random(1),
        policies=PolicyRegistry({name: factory}),
    )
    for worker_id in ("a", "b"):
        made.workers.worker_added(worker(worker_id))
    decision = made.select(request([1, 2, 3], on=overlaps(b=2), explain=True))
    assert decision.rank.worker_id == "b"
    assert decision.explanation is not None
    assert decision.explanation.reason == "least cost: 16 prompt tokens to compute"
