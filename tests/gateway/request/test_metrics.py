"""What the gateway counts of models that come and go."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvscout_gateway.request import metrics as module
from kvscout_gateway.request.metrics import GatewayMetrics


def series(registry: CollectorRegistry) -> dict[tuple[str, str], int]:
    """Series by tenant and model."""
    found: dict[tuple[str, str], int] = {}
    for sample in (sample for metric in registry.collect() for sample in metric.samples if "model" in sample.labels):
        key = (sample.labels["tenant"], sample.labels["model"])
        found[key] = found.get(key, 0) + 1
    return found


def requests(registry: CollectorRegistry, tenant: str, model: str, outcome: str = "ok") -> float | None:
    labels = {"tenant": tenant, "model": model, "outcome": outcome}
    return registry.get_sample_value("kvscout_requests_total", labels)


def test_series_of_models_that_are_gone_end_when_another_one_comes_and_their_requests_stay_counted() -> None:
    registry, served = CollectorRegistry(), {("a", "m")}
    metrics = GatewayMetrics(registry, lambda *key: key in served)
    first = metrics.of("a", "m")
    first.first_token(0.1)
    first.ended("ok")
    first.ended("cancelled")
    served.clear()
    metrics.of("a", "m").ended("ok")
    assert requests(registry, "a", "m") == 2, "workers that restart change nothing"
    served.add(("b", "m"))
    metrics.of("b", "m").ended("ok")
    assert set(series(registry)) == {("", ""), ("b", "m")}
    assert (requests(registry, "", ""), requests(registry, "", "", "cancelled")) == (2, 1)
    first.first_token(0.1)  # one that was under way
    metrics.of("a", "m").ended("ok")
    assert set(series(registry)) == {("", ""), ("b", "m")}
    assert requests(registry, "", "") == 3


def test_tenants_that_come_and_go_leave_as_many_series_as_there_are_models() -> None:
    registry, served = CollectorRegistry(), set[tuple[str, str]]()
    metrics = GatewayMetrics(registry, lambda *key: key in served)
    for number in range(50):
        served = {(f"tenant-{number}", "m")}
        metrics.of(f"tenant-{number}", "m").ended("ok")
    assert set(series(registry)) == {("", ""), ("tenant-49", "m")}
    assert requests(registry, "", "") == 49


def test_models_that_were_too_many_have_series_once_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MODELS", 3)
    registry, served = CollectorRegistry(), {("t", f"m{number}") for number in range(5)}
    metrics = GatewayMetrics(registry, lambda *key: key in served)
    for _, model in sorted(served):
        metrics.of("t", model).ended("ok")
    assert ("t", "m4") not in series(registry)
    served = {("t", "m4")}
    for _ in range(3):
        metrics.of("t", "m4").ended("ok")
    assert {key for key in series(registry) if key != ("", "")} == {("t", "m4")}
