"""The spans of the charts."""

from __future__ import annotations

from kvscout_gateway.fronts.dashboard.history import KEPT, History, Totals
from kvscout_gateway.values.tally import Tally


def test_the_history_has_what_happened_in_each_span_and_an_hour_of_them() -> None:
    def totals(at: float, requests: int, cached: int, *ttft: float) -> Totals:
        tally = Tally()
        for one in ttft:
            tally.observe(one)
        return Totals(at, requests, 0, 0, 100 * requests, cached, tuple(tally.counts), tuple(Tally().counts))

    history = History(totals(100.0, 10, 0))
    history.add(totals(110.0, 30, 500, 0.1, 0.1, 4.0))
    (point,) = history.points
    assert (point["rate"], point["hit"], point["itl"]) == (2.0, 0.25, [None, None])
    assert 90 < point["ttft"][0] < 110
    assert 3_700 < point["ttft"][1] < 4_300
    unfinished = history.unfinished(totals(112.0, 30, 500, 0.1, 0.1, 4.0))
    assert (unfinished["seconds"], unfinished["hit"], unfinished["ttft"]) == (2.0, None, [None, None])
    for index in range(KEPT + 10):
        history.add(totals(120.0 + 10 * index, 30, 500, 0.1, 0.1, 4.0))
    assert len(history.points) == KEPT
