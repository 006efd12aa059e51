"""What is found in a snapshot, from values alone; tests/integration/test_doctor.py breaks real services."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.conditions import CONDITIONS, Severity
from kvscout_common.doctor.diagnosis import SHOWN, Finding, diagnose, is_wrong
from kvscout_common.doctor.snapshot import Engine, Proxy, Service, ServiceKind, Snapshot
from kvscout_common.registry.registry import WorkerName

ROOT = Path(__file__).resolve().parents[3]


def info(**fields: object) -> types_pb2.ServiceInfo:
    usual: dict[str, object] = {"version": "1", "backend": types_pb2.BACKEND_NATIVE, "max_descriptors": 1 << 20}
    return types_pb2.ServiceInfo(**{**usual, **fields})  # type: ignore[arg-type]


def entries(*worker_ids: str) -> tuple[workers_pb2.WorkerEntry, ...]:
    workers = (workers_pb2.Worker(worker_id=name, tenant="t", model="m", block_size=16) for name in worker_ids)
    return tuple(workers_pb2.WorkerEntry(worker=worker) for worker in workers)


def gateway(*worker_ids: str, about: types_pb2.ServiceInfo | None = None, **fields: object) -> Service:
    status = gateway_pb2.GatewayGetStatusResponse(service=about or info(), **fields)  # type: ignore[arg-type]
    return Service("g:1", ServiceKind.GATEWAY, serving=True, status=status, workers=entries(*(worker_ids or ("w",))))


def scheduler(address: str = "s:1", offset: float | None = None, **replicas: object) -> Service:
    return Service(
        address,
        ServiceKind.SCHEDULER,
        serving=True,
        status=scheduler_pb2.SchedulerGetStatusResponse(service=info()),
        workers=entries("w"),
        replicas=scheduler_pb2.GetReplicasResponse(**replicas),  # type: ignore[arg-type]
        clock_offset_seconds=offset,
    )


def indexer(*sources: indexer_pb2.SourceStatus) -> Service:
    status = indexer_pb2.IndexerGetStatusResponse(service=info(), sources=sources, shard_count=1)
    return Service("i:1", ServiceKind.INDEXER, serving=True, status=status, workers=entries("w"))


def source(state: indexer_pb2.SourceState.ValueType, **fields: object) -> indexer_pb2.SourceStatus:
    worker = types_pb2.WorkerRank(worker_id="w")
    return indexer_pb2.SourceStatus(worker=worker, tenant="t", model="m", state=state, **fields)  # type: ignore[arg-type]


def found(*services: Service, **rest: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in diagnose(Snapshot(services, **rest))}  # type: ignore[arg-type]


def test_where_nothing_is_wrong_nothing_is_found() -> None:
    assert found(gateway(), scheduler(), indexer(source(indexer_pb2.SOURCE_STATE_LIVE))) == {}
    assert not is_wrong([])


def test_replicas_that_disagree_and_one_that_is_gone_are_told_apart() -> None:
    replicas = [
        scheduler_pb2.Replica(replica_id="me", self=True),
        scheduler_pb2.Replica(replica_id="other", live=True, diverged=True, sequence=7, divergences=2),
        scheduler_pb2.Replica(replica_id="gone", silent_seconds=30.0, owned_requests=4),
    ]
    told = found(gateway(), scheduler(replicas=replicas))
    assert told.keys() == {"replicas-diverged", "replica-silent"}
    assert "replica other disagree at event 7" in told["replicas-diverged"].evidence[0]
    assert "replica gone 30 s ago; it owns 4 requests" in told["replica-silent"].evidence[0]


def test_one_scheduler_alone_is_as_it_should_be_and_two_that_do_not_share_are_not() -> None:
    assert found(gateway(), scheduler(problem="replicas are off")) == {}
    assert found(gateway(), scheduler(problem="replicas are off"), scheduler("s:2")).keys() == {"replicas-alone"}


def test_tenants_that_share_an_engine_are_told_that_they_share_its_cache() -> None:
    def registered(worker_id: str, tenant: str, url: str) -> workers_pb2.WorkerEntry:
        worker = workers_pb2.Worker(worker_id=worker_id, tenant=tenant, model="m", block_size=16, http_endpoint=url)
        return workers_pb2.WorkerEntry(worker=worker)

    shared = (
        registered("w", "a", "http://h:1"),
        registered("x", "b", "http://H:1/"),
        registered("y", "b", "http://h:2"),
    )
    (finding,) = found(replace(gateway(), workers=shared)).values()
    assert (finding.id, finding.severity) == ("tenants-share-engine", Severity.WARNING)
    assert finding.evidence == ("http://h:1 is a worker of the tenants a, b: w, x",)
    alone = (registered("w", "a", "http://h:1"), registered("w2", "a", "http://h:1"), registered("y", "b", ""))
    assert found(replace(gateway(), workers=alone)) == {}


def test_the_clock_that_differs_is_that_of_the_service_or_that_of_whoever_asks() -> None:
    told = found(gateway(), scheduler("s:1", 0.1), scheduler("s:2", -40.0), scheduler("s:3", 0.0))
    assert told["clocks-differ"].evidence == ("scheduler s:2 is 40 s behind",)
    told = found(gateway(), *(scheduler(f"s:{number}", 3600.0) for number in range(3)))
    assert told["clocks-differ"].evidence == ("the machine that asks is 3,600 s behind",)
    slow = replace(scheduler("s:9", 4.0), clock_doubt_seconds=3.0)
    assert found(gateway(), slow, scheduler("s:1", 0.0)) == {}


def test_what_only_the_gateway_reaches_is_a_note_and_nothing_wrong() -> None:
    helpers = [gateway_pb2.HelperStatus(kind=gateway_pb2.HELPER_KIND_INDEXER, address="i:1", healthy=True)]
    seen = [gateway_pb2.WorkerObservation(worker=types_pb2.WorkerRank(worker_id="w"), tenant="t", requests=3)]
    services = (gateway(helpers=helpers, workers=seen), Service("i:1", ServiceKind.INDEXER, error="failed to connect"))
    engine = Engine(WorkerName("t", "w"), "http://w", error="http://w does not answer")
    findings = diagnose(Snapshot(services, (engine,)))
    assert [finding.id for finding in findings] == ["out-of-sight"]
    assert len(findings[0].evidence) == 2
    assert not is_wrong(findings)


def test_an_engine_that_answers_and_does_not_tell_is_a_note() -> None:
    engine = Engine(WorkerName("t", "w"), "http://w", error="http://w/v1/models answers 401", reached=True)
    assert found(gateway(), engines=(engine,)).keys() == {"untold"}


def test_cache_groups_that_cannot_be_judged_are_named_in_a_note() -> None:
    live = source(indexer_pb2.SOURCE_STATE_LIVE, unjudged_groups=[2, 5])
    finding = found(gateway(), indexer(live))["groups-unjudged"]
    assert (finding.severity, finding.evidence) == (Severity.NOTE, ("worker w/0 at indexer i:1: groups 2, 5",))


def test_events_that_name_neither_adapter_nor_salt_are_named_in_a_note() -> None:
    worker = workers_pb2.Worker(worker_id="w", tenant="t", model="m", engine=workers_pb2.ENGINE_KIND_TRTLLM)
    silent, live = source(indexer_pb2.SOURCE_STATE_WAITING), source(indexer_pb2.SOURCE_STATE_LIVE, applied=1, blocks=7)
    knows = replace(gateway(), workers=(workers_pb2.WorkerEntry(worker=worker),))
    assert "scopes-untold" not in found(knows, indexer(silent))
    assert "scopes-untold" not in found(gateway(), indexer(live))
    finding = found(knows, indexer(live))["scopes-untold"]
    assert (finding.severity, finding.evidence) == (Severity.NOTE, ("worker w/0 at indexer i:1: 7 blocks",))
    worker.adapters.add(name="sql")
    knows = replace(gateway(), workers=(workers_pb2.WorkerEntry(worker=worker),))
    assert found(knows, indexer(live))["scopes-untold"].evidence[0].endswith("7 blocks, 1 adapters are registered")


def test_blocks_whose_parents_never_came_are_named_unless_they_are_few() -> None:
    live = source(indexer_pb2.SOURCE_STATE_LIVE, blocks=0, orphans=324)
    finding = found(gateway(), indexer(live))["blocks-orphaned"]
    assert finding.evidence == ("worker w/0 at indexer i:1: 324 blocks, beside 0 that are found",)
    for few in ({"orphans": 15}, {"orphans": 40, "blocks": 400}):
        assert found(gateway(), indexer(source(indexer_pb2.SOURCE_STATE_LIVE, **few))) == {}


def test_a_warning_that_no_check_explains_is_passed_on_and_one_that_is_explained_is_not() -> None:
    warnings = ["worker w/0 is blind at indexer i:1: no event", "worker v: its engine is not known yet"]
    blind = indexer(source(indexer_pb2.SOURCE_STATE_BLIND, reason="2 requests were served"))
    told = found(gateway("w", about=info(warnings=warnings)), blind)
    assert told.keys() == {"events-silent", "service-warning"}
    assert told["service-warning"].evidence == ("gateway g:1: worker v: its engine is not known yet",)


def test_a_worker_that_served_is_silent_only_if_the_indexer_listened_and_the_event_had_its_time() -> None:
    def silent(age: float, **fields: object) -> bool:
        seen = gateway_pb2.WorkerObservation(
            worker=types_pb2.WorkerRank(worker_id="w"), tenant="t", requests=1, eventful_age_seconds=[age]
        )
        waiting = source(indexer_pb2.SOURCE_STATE_WAITING, **{"open_seconds": 60.0, **fields})
        return "events-silent" in found(gateway(workers=[seen]), indexer(waiting))

    assert silent(30.0)
    assert not silent(1.0)
    assert not silent(90.0)
    assert not silent(30.0, last_event_id=4)


def judged(state: types_pb2.WorkerState.ValueType, cause: str = "", **fields: object) -> gateway_pb2.WorkerObservation:
    health = types_pb2.WorkerHealth(state=state, cause=cause, age_seconds=4.0)
    worker = types_pb2.WorkerRank(worker_id="w")
    return gateway_pb2.WorkerObservation(worker=worker, tenant="t", health=health, **fields)  # type: ignore[arg-type]


def test_each_state_that_a_gateway_judges_a_worker_to_be_in_has_its_finding() -> None:
    expected = {
        types_pb2.WORKER_STATE_OK: None,
        types_pb2.WORKER_STATE_NO_EVENTS: "events-silent",
        types_pb2.WORKER_STATE_SLOW: "worker-slow",
        types_pb2.WORKER_STATE_BUSY: None,
        types_pb2.WORKER_STATE_DRAINING: None,
        types_pb2.WORKER_STATE_SUSPECTED: "engine-suspected",
        types_pb2.WORKER_STATE_LEFT_OUT: "worker-failing",
    }
    assert set(expected) == {number for number in types_pb2.WorkerState.values() if number}
    for state, condition in expected.items():
        told = found(gateway(workers=[judged(state, "does it", requests=3, failures=2)]))
        assert set(told) == ({condition} if condition else set()), state
        for finding in told.values():
            assert "has been" in finding.evidence[0]
            assert "for 4 s: it does it" in finding.evidence[0]


def test_an_engine_that_is_down_is_one_finding_and_its_events_are_none() -> None:
    lost = judged(types_pb2.WORKER_STATE_LEFT_OUT, "does not answer", health_check_problem="no answer")
    closed = source(indexer_pb2.SOURCE_STATE_DISCONNECTED, open_seconds=60, last_event_id=4, reason="nothing answers")
    engine = Engine(WorkerName("t", "w"), "http://e", error="http://e does not answer within 5 s")
    told = found(gateway(workers=[lost]), indexer(closed), engines=(engine,))
    assert told.keys() == {"engine-unreachable"}
    assert told["engine-unreachable"].evidence == ("worker w has been left out for 4 s: it does not answer",)
    # It answers its gateway, which is elsewhere; a gateway that asks itself is not told to go where it is.
    served = judged(types_pb2.WORKER_STATE_OK, requests=3)
    assert found(gateway(workers=[served]), engines=(engine,)).keys() == {"out-of-sight"}
    assert found(gateway(workers=[served]), engines=(engine,), is_own=True).keys() == {"untold"}


def test_of_two_gateways_the_one_that_judges_worse_is_named() -> None:
    other = replace(gateway(workers=[judged(types_pb2.WORKER_STATE_SUSPECTED, "hangs")]), address="g:2")
    told = found(gateway(workers=[judged(types_pb2.WORKER_STATE_OK)]), other)
    [evidence] = told["engine-suspected"].evidence
    assert evidence == "worker w, says gateway g:2, has been suspected for 4 s: it hangs"


def test_events_that_stopped_are_missed_where_the_engine_reports_what_it_computed() -> None:
    def told(ages: list[float], checked: int = 0) -> set[str]:
        seen = judged(types_pb2.WORKER_STATE_OK, eventful_age_seconds=ages, checked=checked)
        live = source(indexer_pb2.SOURCE_STATE_LIVE, open_seconds=60, last_event_id=4, last_event_age_seconds=20)
        return set(found(gateway(workers=[seen]), indexer(live)))

    assert told([30.0, 5.0, 4.0], checked=3) == {"events-silent"}
    assert told([30.0, 5.0], checked=3) == set(), "one batch may have been lost"
    assert told([5.0, 1.0], checked=3) == set(), "it may be on its way"
    assert told([5.0, 4.0]) == set(), "nothing may have been computed"


def test_what_is_missing_just_after_a_start_is_no_error() -> None:
    young, old = info(uptime_seconds=3.0), info(uptime_seconds=30.0)
    nobody = replace(gateway(about=young), workers=())
    assert found(nobody)["starting"].evidence == ("gateway g:1 has no registration, 3 s after the start",)
    assert found(replace(gateway(about=old), workers=())).keys() == {"no-workers"}

    def closed(seconds: float, **fields: object) -> set[str]:
        return set(found(indexer(source(indexer_pb2.SOURCE_STATE_DISCONNECTED, open_seconds=seconds, **fields))))

    assert closed(3.0) == {"starting"}
    assert closed(30.0) == {"events-unreachable"}
    assert closed(3.0, last_event_id=7) == {"events-unreachable"}, "it was there"


def test_predictions_are_judged_only_where_events_come_and_there_are_enough_of_them() -> None:
    def told(state: indexer_pb2.SourceState.ValueType, checked: int, wrong: int) -> set[str]:
        seen = gateway_pb2.WorkerObservation(
            worker=types_pb2.WorkerRank(worker_id="w"),
            tenant="t",
            requests=checked,
            checked=checked,
            mispredicted=wrong,
            cached_tokens=100 * (checked - wrong),
            predicted_cached_tokens=100 * checked,
            prediction_error_tokens=100 * wrong,
        )
        return set(found(gateway(workers=[seen]), indexer(source(state))))

    assert told(indexer_pb2.SOURCE_STATE_LIVE, 40, 20) == {"predictions-wrong"}
    assert told(indexer_pb2.SOURCE_STATE_LIVE, 40, 4) == set()
    assert told(indexer_pb2.SOURCE_STATE_LIVE, 10, 8) == set()
    assert told(indexer_pb2.SOURCE_STATE_BLIND, 40, 20) == {"events-silent"}


def test_a_low_hit_rate_is_a_note_with_its_largest_loss() -> None:
    def told(requests: int, actual: int, ideal: int = 800) -> dict[str, Finding]:
        ladder = gateway_pb2.Ladder(
            tenant="t",
            model="m",
            requests=requests,
            prompt_tokens=1_000,
            ideal_tokens=ideal,
            actual_tokens=actual,
            losses=[gateway_pb2.LadderLoss(kind=gateway_pb2.LADDER_LOSS_KIND_OTHER_NAME, tokens=ideal - actual)],
        )
        return found(gateway(ladders=[ladder]))

    [evidence] = told(20, 300)["hit-rate-low"].evidence
    assert "30 % of prompt tokens are cached, 80 % could be; 50 points: same tokens, another salt" in evidence
    assert not told(19, 300), "too few"
    assert not told(20, 500), "most of what could be"
    assert not told(20, 10, ideal=90), "little could be"


def test_what_comes_from_outside_is_escaped_and_bounded() -> None:
    differing = [
        gateway_pb2.TokenDifference(model=f"m{number}", tenant="t", difference="\x1b[2J" + "x" * 100_000)
        for number in range(SHOWN + 5)
    ]
    evidence = found(gateway(token_differences=differing))["tokens-differ"].evidence
    assert len(evidence) == SHOWN + 1
    assert evidence[-1] == "and 5 more"
    assert all(text.isprintable() and len(text) < 2_000 for text in evidence)


def test_a_service_that_drains_or_is_not_ready_takes_no_calls() -> None:
    draining = gateway(about=info(draining=True))
    assert "drains" in found(draining)["not-serving"].evidence[0]
    waiting = replace(gateway(), serving=False)
    assert "is not ready" in found(waiting)["not-serving"].evidence[0]


def test_services_of_two_nats_clusters_are_told_and_those_of_one_cluster_are_not() -> None:
    def on(cluster: str) -> types_pb2.ServiceInfo:
        nats = types_pb2.NatsStatus(servers=["nats://n:4222"], namespace="a", connected=True, cluster=cluster)
        return info(nats=nats)

    def both(first: str, second: str) -> dict[str, Finding]:
        other = replace(scheduler(), status=scheduler_pb2.SchedulerGetStatusResponse(service=on(second)))
        return found(gateway(about=on(first)), other)

    assert "'one'" in both("one", "two")["nats-clusters-differ"].evidence[0]
    assert "nats-clusters-differ" not in both("one", "one")


def test_what_was_not_asked_is_counted_in_a_note() -> None:
    finding = found(gateway(), left_out=3)["left-out"]
    assert (finding.severity, finding.evidence) == (Severity.NOTE, ("3 were not asked",))


def test_a_cache_that_was_emptied_is_told_apart_from_lost_events() -> None:
    reason, state = "events are missing: those up to 7", indexer_pb2.SOURCE_STATE_INCOMPLETE
    told = found(gateway(), scheduler(), indexer(source(state, reason=reason, fenced=True, fences=1)))
    assert told.keys() == {"cache-emptied"}
    assert reason in told["cache-emptied"].evidence[0]
    assert found(gateway(), scheduler(), indexer(source(state, reason=reason))).keys() == {"history-incomplete"}


def test_each_condition_is_brought_about_by_a_test() -> None:
    """By real services in tests/integration/test_doctor.py and test_failures.py, or here where that cannot be done at
    will."""
    folder = ROOT / "tests" / "integration"
    text = "".join((folder / name).read_text() for name in ("test_doctor.py", "test_failures.py"))
    real = {condition.id for condition in CONDITIONS if f'"{condition.id}"' in text}
    assert len(real) >= 30
    here = Path(__file__).read_text()
    assert {condition.id for condition in CONDITIONS if f'"{condition.id}"' not in here} <= real


def test_what_a_proxy_refused_and_what_passed_the_picker_by_are_told_apart_by_its_counters() -> None:
    counters = {
        "cluster.engines.upstream_rq_retry_overflow": 12,
        "cluster.engines.upstream_cx_overflow": 0,
        "http.inference.ext_proc.failure_mode_allowed": 1476,
    }
    silent = Proxy("http://e:2", error="http://e:2 does not answer")
    told = found(gateway(), scheduler(), proxies=(Proxy("http://e:1", counters), silent))
    assert told.keys() == {"proxy-overflow", "picker-bypassed", "service-unreachable"}
    [overflow] = told["proxy-overflow"].evidence
    assert overflow == "Envoy http://e:1: cluster.engines.upstream_rq_retry_overflow is 12 since its start"
    assert "failure_mode_allowed is 1,476" in told["picker-bypassed"].evidence[0]
    assert found(gateway(), proxies=(Proxy("http://e:1", dict.fromkeys(counters, 0)),)) == {}


def test_services_of_two_releases_are_told() -> None:
    assert found(gateway(about=info(version="2")), scheduler()).keys() == {"versions-differ"}


def test_each_condition_has_its_place_in_the_docs_as_doctor_words_it() -> None:
    page = " ".join((ROOT / "docs/operating.md").read_text().split())
    assert len({condition.id for condition in CONDITIONS}) == len(CONDITIONS)
    assert not [one.id for one in CONDITIONS if f"`{one.id}` ({one.severity}): {one.what} {one.remedy}" not in page]


def test_the_sentence_names_the_one_that_it_is_about_and_no_one_of_several() -> None:
    def worker_named(name: str) -> gateway_pb2.WorkerObservation:
        one = judged(types_pb2.WORKER_STATE_SUSPECTED, "hangs")
        one.worker.worker_id = name
        return one

    def told(*names: str) -> str:
        return found(gateway(workers=[worker_named(name) for name in names]))["engine-suspected"].what

    assert told("a").startswith("Worker a may be down or hang; ")
    assert told("a", "b").startswith("An engine may be down or hang; ")
    assert told("\n\\1").startswith("Worker \\n\\1 may be down")
    silent = Service("i:1", ServiceKind.INDEXER, named_by="g:1", error="refused")
    assert found(gateway(), silent)["service-unreachable"].what == "Indexer i:1 does not answer at its address."


def test_a_worker_that_ran_requests_is_past_its_start_when_nothing_answers_at_its_event_endpoint() -> None:
    young = source(indexer_pb2.SOURCE_STATE_DISCONNECTED, open_seconds=4.0)
    assert found(gateway(), indexer(young)).keys() == {"starting"}
    for age, expected in ((3.0, "events-unreachable"), (1.0, "starting"), (5.0, "starting")):
        ran = judged(types_pb2.WORKER_STATE_OK, requests=1, eventful_age_seconds=[age])
        assert found(gateway(workers=[ran]), indexer(young)).keys() == {expected}, age


def test_a_renderer_that_does_not_answer_is_a_late_source_of_tokens() -> None:
    warning = "renderer: http://r:1 did not tokenize within 50 ms: see --renderer"
    told = found(gateway(about=info(warnings=[warning])))
    assert {name: one.evidence for name, one in told.items()} == {"tokens-late": (f"gateway g:1: {warning}",)}


def failures(cause: str, recent: int, *, owner: str = "ROUTER", answered: bool = False) -> gateway_pb2.FailureCount:
    return gateway_pb2.FailureCount(
        cause=cause,
        owner=gateway_pb2.FaultOwner.Value(f"FAULT_OWNER_{owner}"),
        answered=answered,
        total=recent,
        recent=recent,
        last_message="as it was",
    )


def of_requests(*counts: gateway_pb2.FailureCount, requests: int, **fields: Any) -> dict[str, Finding]:
    return found(gateway(failure_counts=counts, recent_requests=requests, recent_seconds=300, **fields), scheduler())


def test_a_defect_of_the_gateway_is_told_with_its_last_message() -> None:
    told = of_requests(failures("internal", 3), requests=10)
    assert told.keys() == {"gateway-failing"}
    assert told["gateway-failing"].evidence == (
        "gateway g:1: 3 of 10 requests of the last 5 min failed (internal); the last one: as it was",
    )


def test_few_requests_or_a_small_share_are_no_trouble() -> None:
    assert of_requests(failures("queue", 2), requests=2) == {}
    assert of_requests(failures("queue", 9), requests=1_000) == {}
    assert of_requests(failures("queue", 10), requests=1_000).keys() == {"requests-refused"}
    assert of_requests(failures("indexer", 49, answered=True), requests=1_000) == {}
    assert of_requests(failures("indexer", 50, answered=True), requests=1_000).keys() == {"requests-degraded"}


def test_callers_mistakes_are_no_trouble_but_limits_of_their_tenants_are() -> None:
    for cause in ("request", "unknown", "key", "gone"):
        assert of_requests(failures(cause, 100, owner="CALLER"), requests=100) == {}
    assert of_requests(failures("limit", 100, owner="CALLER"), requests=100).keys() == {"tenant-limited"}


def test_engines_that_fail_requests_come_after_what_is_wrong_with_a_worker() -> None:
    ejected = gateway_pb2.WorkerObservation(
        worker=types_pb2.WorkerRank(worker_id="w"), tenant="t", requests=9, failures=9, problem="fails what others run"
    )
    told = of_requests(failures("worker", 9, owner="ENGINE"), requests=9, workers=[ejected])
    assert list(told) == ["worker-failing", "requests-failing"]
    moved = failures("worker", 9, owner="ENGINE", answered=True)
    assert of_requests(moved, requests=9) == {}


def test_tokens_that_are_late_are_not_told_twice() -> None:
    late = gateway_pb2.LateTokens(source="renderer", model="m", tenant="t", total=20, recent=20)
    told = of_requests(failures("tokens", 20, answered=True), requests=20, late_tokens=[late])
    assert told.keys() == {"tokens-late"}
    told = of_requests(failures("tokens", 40, answered=True), requests=40, late_tokens=[late])
    assert told.keys() == {"tokens-late", "requests-degraded"}


def test_a_policy_that_fails_is_told_by_its_scheduler_or_else_by_a_gateway() -> None:
    by_gateway = gateway(failure_counts=[failures("policy", 5, answered=True)], recent_requests=5, recent_seconds=300)
    assert found(by_gateway)["policy-failing"].evidence[0].endswith("the last one: as it was")
    failing = scheduler_pb2.PolicyFailure(policy="mine", total=5, recent=5, recent_seconds=300, last_error="KeyError")
    status = scheduler_pb2.SchedulerGetStatusResponse(service=info(), policy_failures=[failing])
    told = found(by_gateway, replace(scheduler(), status=status))
    assert told["policy-failing"].evidence == (
        "policy 'mine' of scheduler s:1 failed 5 times in the last 5 min: KeyError",
    )
    few = scheduler_pb2.PolicyFailure(policy="mine", total=99, recent=1, recent_seconds=300)
    status = scheduler_pb2.SchedulerGetStatusResponse(service=info(), policy_failures=[few])
    assert found(gateway(), replace(scheduler(), status=status)) == {}
