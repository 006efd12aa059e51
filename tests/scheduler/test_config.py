"""Flags of the queue and of targets, as the scheduler's settings have them."""

from __future__ import annotations

from math import inf
from typing import Any

import click
from click.testing import CliRunner

from kvscout_common.nats.config import nats_flags
from kvscout_common.settings.flags import server_flags
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.flags import lease_flag, scheduler_flags
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.targets import NO_TARGETS, Targets


def settings(*arguments: str) -> SchedulerSettings:
    """Settings of a scheduler that is started with these flags."""
    found: list[SchedulerSettings] = []

    @click.command()
    @lease_flag
    @scheduler_flags()
    @nats_flags()
    @server_flags("scheduler", port=0, metrics_port=0)
    def command(**values: Any) -> None:
        found.append(SchedulerConfig.from_flags(values).settings)

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_without_flags_there_are_no_weights_and_no_targets() -> None:
    plain = settings()
    assert (plain.queue_order.weights, plain.targets, plain.model_targets) == ({}, NO_TARGETS, {})
    assert (plain.queue_order.aged_share, plain.queue_order.aged_seconds) == (0.1, 10.0)


def test_weights_and_targets_are_read_by_name() -> None:
    read = settings(
        *("--fairness-weight", "team=a=2.5", "--fairness-weight", "batch=0.1", "--queue-aged-share", "0"),
        *("--ttft-target-ms", "800", "--model-target", "org/m:latest=500:20", "--model-target", "n=:30"),
        *("--revision-weight", "v1=95", "--revision-weight", "=5"),
    )
    assert read.revision_weights == {"v1": 95.0, "": 5.0}
    assert read.queue_order.weights == {"team=a": 2.5, "batch": 0.1}
    assert read.queue_order.aged_share == 0.0
    assert read.targets == Targets(0.8, inf)
    assert read.model_targets == {"org/m:latest": Targets(0.5, 0.02), "n": Targets(inf, 0.03)}
