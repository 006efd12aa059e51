"""Metrics of the ladders: those of the last minutes, as `GetLadder` has them by default."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.ladder.counts import Counts, rungs_of
from kvscout_gateway.ladder.ladders import WINDOW_SECONDS, Ladders


class LadderMetrics(Collector):
    """Rungs and losses of each model.

    Args:
        ladders: The counts; None = there are none.
    """

    def __init__(self, ladders: Ladders | None) -> None:
        self._ladders = ladders

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        labels = ["tenant", "model"]
        rungs = GaugeMetricFamily(
            "kvscout_ladder_tokens", "Prompt tokens of the last 5 min, by rung", labels=[*labels, "rung"]
        )
        losses = GaugeMetricFamily(
            "kvscout_ladder_lost_tokens",
            "Prompt tokens of the last 5 min that were not cached",
            labels=[*labels, "loss"],
        )
        saved = GaugeMetricFamily(
            "kvscout_ladder_saved_seconds",
            "Estimated seconds that requests of the last 5 min saved by being moved away from their holders",
            labels=labels,
        )
        by_model: dict[tuple[str, str], Counts] = {}
        if self._ladders is not None:
            for key, counts in self._ladders.counts(ALL_TENANTS, "", WINDOW_SECONDS).items():
                by_model.setdefault(key[:2], Counts()).add(counts)
        for model, counts in by_model.items():
            found = rungs_of(counts)
            for rung in ("prompt", "ideal", "capacity", "routing", "predicted", "actual"):
                rungs.add_metric([*model, rung], getattr(found, rung))
            for loss, tokens in found.losses.items():
                losses.add_metric([*model, loss], tokens)
            saved.add_metric(model, found.saved_seconds)
        yield from (rungs, losses, saved)
