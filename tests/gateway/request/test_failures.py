"""Failures of requests: counted, and the last ones remembered, in bounded memory."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvscout_common.errors import InvalidArgument, ResourceExhausted, Unavailable
from kvscout_common.observability.recent_counts import RECENT_SECONDS
from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.causes import Cause, Owner
from kvscout_gateway.engines.faults import EngineFailed, Fault
from kvscout_gateway.fronts.refusals import status_of
from kvscout_gateway.request.failures import (
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_MESSAGE,
    FailureFilter,
    FailureKind,
    FailureLog,
    RequestSummary,
)
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry

CHAT = RequestSummary("/v1/chat/completions", "default", "m", "r-1")
GENERATE = RequestSummary("Generate", "acme", "m", "r-2")


class World:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.log = FailureLog(status_of, clock=lambda: self.now, monotonic=lambda: self.now)

    def listed(self, **wanted: object) -> list[int]:
        return [one.number for one in self.log.listed(FailureFilter(**wanted), 10)[0]]  # type: ignore[arg-type]


def engine_error() -> Unavailable:
    error = Unavailable("the worker broke off: said the engine", retry_after_seconds=1.0)
    error.__cause__ = EngineFailed(
        "the worker broke off", detail="http://10.0.0.5:8000: reset", said="said the engine", fault=Fault.WORKER
    )
    return error


def test_a_failure_is_remembered_with_its_request_status_cause_and_workers() -> None:
    world = World()
    world.log.failed(CHAT, engine_error(), ["w0", "w1", "w1"])
    (one,), total = world.log.listed(FailureFilter(), 10)
    assert (one.number, one.at, one.asked, total) == (1, 1_000.0, CHAT, 1)
    assert (one.status, one.kind, one.owner) == ("503", FailureKind(Cause.WORKER, False), Owner.ENGINE)
    assert one.worker_ids == ("w0", "w1")


def test_addresses_are_for_administrators_and_words_of_engines_for_nobody() -> None:
    world = World()
    world.log.failed(CHAT, engine_error())
    (one,), _ = world.log.listed(FailureFilter(), 10)
    assert one.message == "the worker broke off"
    assert one.detail == "the worker broke off (http://10.0.0.5:8000: reset)"


def test_a_status_is_that_of_the_front() -> None:
    world = World()
    error = ResourceExhausted("9 requests wait", cause="queue")
    world.log.failed(CHAT, error)
    world.log.failed(GENERATE, ResourceExhausted("9 requests wait", cause="queue"))
    refused = InvalidArgument("no")
    refused.__cause__ = EngineFailed("engine answered 422", fault=Fault.REQUEST, answer=(422, (), b""))
    world.log.failed(CHAT, refused)
    assert [one.status for one in world.log.listed(FailureFilter(), 10)[0]] == ["422", "RESOURCE_EXHAUSTED", "429"]


def test_an_error_that_several_places_report_is_one_failure() -> None:
    world = World()
    error = InvalidArgument("wrong")
    world.log.failed(CHAT, error)
    world.log.failed(CHAT, error)
    assert world.listed() == [1]
    assert world.log.ended.total[None] == 1


def test_lists_are_narrowed_by_what_is_asked_for() -> None:
    world = World()
    world.log.failed(CHAT, InvalidArgument("wrong"))
    world.log.failed(GENERATE, engine_error(), ["w0"])
    world.log.answered(CHAT, Cause.TOKENS, "placed without: tokenizer", worker_ids=["w1"])
    assert world.listed() == [2, 1]
    assert world.listed(answered=None) == [3, 2, 1]
    assert world.listed(answered=True) == [3]
    assert world.listed(tenant="acme") == [2]
    assert world.listed(worker_id="w0") == [2]
    assert world.listed(owner=Owner.CALLER) == [1]
    assert world.listed(cause="worker") == [2]
    assert world.listed(cause="no such cause") == []
    assert world.listed(after=1) == [2]
    assert [one.number for one in world.log.listed(FailureFilter(), 1)[0]] == [2]
    assert [one.number for one in world.log.listed(FailureFilter(), 1, before=2)[0]] == [1]


def test_a_flood_of_callers_mistakes_drives_out_no_failure_of_an_engine() -> None:
    world = World()
    world.log.failed(GENERATE, engine_error(), ["w0"])
    for _ in range(3 * MAX_KEPT):
        world.log.failed(CHAT, InvalidArgument("wrong"))
        world.log.answered(CHAT, Cause.INDEXER, "placed without: indexer")
    assert world.listed(owner=Owner.ENGINE) == [1]
    assert world.log.listed(FailureFilter(answered=None), 10)[1] == 1 + 2 * MAX_KEPT
    assert world.log.counts.total[FailureKind(Cause.REQUEST, False)] == 3 * MAX_KEPT


def test_what_is_remembered_is_bounded_in_bytes_whatever_callers_send() -> None:
    world = World()
    for number in range(MAX_KEPT):
        text = f"{number}" + "x\n" * 100_000
        world.log.failed(RequestSummary(text, text, text, text), InvalidArgument(text), ["w0"])
    kept, _ = world.log.listed(FailureFilter(), MAX_KEPT)
    assert 1 < len(kept) < MAX_KEPT
    assert sum(one.size for one in kept) <= MAX_KEPT_BYTES
    assert all(len(one.message) < 2 * MAX_MESSAGE + 50 and one.message.isprintable() for one in kept)


def test_recent_counts_end() -> None:
    world = World()
    kind = FailureKind(Cause.REQUEST, False)
    world.log.failed(CHAT, InvalidArgument("wrong"))
    world.log.over(CHAT, None)
    assert (world.log.counts.recent()[kind], world.log.ended.recent()[None]) == (1, 2)
    world.now += RECENT_SECONDS
    assert (world.log.counts.recent()[kind], world.log.ended.recent()[None]) == (0, 0)
    assert world.log.counts.total[kind] == 1


def test_a_degraded_request_counts_for_its_first_reason_and_names_all() -> None:
    world = World()
    decision = Decision("default", "m", WorkerRank("w0", 0), Geometry(16, False), b"")
    decision.degraded = ("policy failed: policy 'mine': KeyError: 'x' (mine.py:7)", "tokenizer: none")
    world.log.degraded(CHAT, decision)
    (one,), _ = world.log.listed(FailureFilter(answered=True), 10)
    assert (one.kind, one.owner) == (FailureKind(Cause.POLICY, True), Owner.ROUTER)
    assert one.message == "placed without: policy, tokenizer"
    assert one.detail == "policy failed: policy 'mine': KeyError: 'x' (mine.py:7); tokenizer: none"


def test_metrics_distinguish_cause_owner_and_whether_it_was_answered() -> None:
    world = World()
    registry = CollectorRegistry()
    registry.register(world.log)
    world.log.failed(CHAT, InvalidArgument("wrong"))
    world.log.answered(CHAT, Cause.TOKENS, "placed without: tokenizer")
    for cause, owner, answered in (("request", "caller", "no"), ("tokens", "router", "yes")):
        labels = {"cause": cause, "owner": owner, "answered": answered}
        assert registry.get_sample_value("kvscout_failures_total", labels) == 1
