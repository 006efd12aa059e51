"""The sentence of an explanation, as Route answers it: with what was missing when the worker was chosen."""

from __future__ import annotations

from kvscout.v1 import scheduler_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.fronts.grpc.translate import MAX_SUMMARY, route_response
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry


def made(summary: str, *degraded: str) -> Decision:
    explanation = scheduler_pb2.Explanation(policy="kv-time", summary=summary)
    rank = WorkerRank("w", 0)
    return Decision("t", "m", rank, Geometry(16, False), b"", degraded=degraded, explanation=explanation)


def test_a_degraded_decision_says_what_was_missing() -> None:
    decision = made("w: the only worker", "indexer: 127.0.0.1:1 does not answer")
    told = route_response(decision, in_full=True).explanation.summary
    assert told == "w: the only worker; degraded: indexer: 127.0.0.1:1 does not answer"
    assert decision.explanation is not None
    assert decision.explanation.summary == "w: the only worker", "the decision itself is unchanged"


def test_who_may_not_see_addresses_is_not_told_them_in_the_sentence() -> None:
    told = route_response(made("w: the only worker", "indexer: 127.0.0.1:1 does not answer"), in_full=False)
    assert "127.0.0.1" not in told.explanation.summary
    assert told.explanation.summary.startswith("w: the only worker; degraded: ")


def test_a_decision_with_all_knowledge_is_told_as_it_is() -> None:
    assert route_response(made("w: the only worker"), in_full=True).explanation.summary == "w: the only worker"


def test_long_reasons_are_cut() -> None:
    told = route_response(made("w: the only worker", "x" * 10_000), in_full=True).explanation.summary
    assert len(told) <= MAX_SUMMARY
