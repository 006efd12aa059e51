"""The registry: names, leases, sources and what listeners hear."""

from dataclasses import replace

import pytest

from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.worker import Adapter, EngineKind, EventEndpoint, Transport, WorkerSpec


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """Writes down what a registry tells."""

    def __init__(self) -> None:
        self.received: list[str] = []

    def worker_added(self, spec: WorkerSpec) -> None:
        self.received.append(f"+{spec.worker_id}")

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        self.received.append(f"~{new.worker_id}")

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        self.received.append(f"-{spec.worker_id}:{reason}")


def spec(worker_id: str, **fields: object) -> WorkerSpec:
    return WorkerSpec(worker_id=worker_id, **{"model": "m", "block_size": 16, **fields})  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(clock)


def test_listeners_hear_of_changes_once_and_late_ones_of_what_is_there(registry: Registry) -> None:
    early, late = Recorder(), Recorder()
    registry.listen(early)
    assert registry.register(spec("a"))
    assert not registry.register(spec("a"))
    assert not registry.register(spec("a", total_kv_blocks=9))
    registry.listen(late)
    registry.remove("default", "a")
    assert early.received == ["+a", "~a", "-a:removed"]
    assert late.received == ["+a", "-a:removed"]


def test_a_lease_ends_unless_it_is_kept_alive(registry: Registry, clock: Clock) -> None:
    recorder = Recorder()
    registry.listen(recorder)
    registry.register(spec("leased"), lease_seconds=10)
    registry.register(spec("lasting"))
    clock.now += 9
    assert registry.keep_alive("default", ["leased", "lasting", "ghost"]) == ["ghost"]
    clock.now += 9
    assert registry.expire() == []
    clock.now += 1
    assert [ended.worker_id for ended in registry.expire()] == ["leased"]
    assert recorder.received == ["+leased", "+lasting", "-leased:lease"]
    assert registry.keep_alive("default", ["leased"]) == ["leased"]


def test_an_update_keeps_the_lease(registry: Registry, clock: Clock) -> None:
    registry.register(spec("a"), lease_seconds=10)
    clock.now += 5
    registry.update(spec("a", total_kv_blocks=7))
    entry = registry.get("default", "a")
    assert (entry.spec.total_kv_blocks, registry.lease_remaining(entry)) == (7, 5.0)
    with pytest.raises(NotFound):
        registry.update(spec("b"))


def test_tenants_have_names_of_their_own(registry: Registry) -> None:
    registry.register(spec("a"))
    registry.register(spec("a", tenant="t", model="other"))
    assert [(e.spec.tenant, e.spec.model) for e in registry.entries()] == [("default", "m"), ("t", "other")]
    assert [e.spec.tenant for e in registry.entries("t")] == ["t"]
    assert [e.spec.tenant for e in registry.entries(model="m")] == ["default"]


def test_a_file_owns_its_workers(registry: Registry) -> None:
    recorder = Recorder()
    registry.register(spec("mine"))
    registry.register(spec("taken"))
    registry.listen(recorder)
    registry.replace_source(Source.FILE, [spec("taken", total_kv_blocks=1), spec("file")])
    with pytest.raises(FailedPrecondition, match="workers file"):
        registry.remove("default", "file")
    with pytest.raises(FailedPrecondition, match="workers file"):
        registry.register(spec("taken"))
    registry.set_draining("default", "file", True)
    assert registry.get("default", "file").spec.draining
    registry.replace_source(Source.FILE, [])
    assert [e.spec.worker_id for e in registry.entries()] == ["mine"]
    assert recorder.received == ["+mine", "+taken", "~taken", "+file", "~file", "-taken:file", "-file:file"]


def test_peers_never_replace_what_is_known_here(registry: Registry) -> None:
    registry.register(spec("a", total_kv_blocks=5))
    registry.replace_source(Source.PEER, [spec("a"), spec("b")])
    assert registry.get("default", "a").spec.total_kv_blocks == 5
    assert registry.get("default", "b").source is Source.PEER
    registry.replace_source(Source.PEER, [])
    assert [e.spec.worker_id for e in registry.entries()] == ["a"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"model": ""}, "model"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "*"}, "tenant"),
        ({"block_size": 0}, "block_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 1025}, "dp_size"),
        ({"http_endpoint": "10.0.0.1:80"}, "http_endpoint"),
        ({"http_endpoint": "http://user:secret@10.0.0.1:80"}, "http_endpoint"),
        ({"grpc_endpoint": "unix:/run/x"}, "grpc_endpoint"),
        ({"bridge_endpoint": "http://h:1"}, "bridge_endpoint"),
        ({"bootstrap_host": "a b"}, "bootstrap_host"),
        ({"bootstrap_port": 65_536}, "bootstrap_port"),
        ({"dp_start_rank": 2**32 - 1, "dp_size": 2}, "dp_start_rank"),
        ({"total_kv_blocks": 2**64}, "total_kv_blocks"),
        ({"worker_id": "w" * 257}, "worker_id"),
        ({"worker_id": "ä" * 129}, "worker_id"),
        ({"model": "a\nb"}, "model"),
        ({"tenant": "\ud800"}, "tenant"),
        ({"topic": "\x00"}, "topic"),
        ({"adapters": (Adapter("a"), Adapter(""))}, "adapters[1].name"),
        ({"labels": {"zone": "\x1b[2J"}}, "labels"),
        ({"labels": {"shared_cache_blocks": "0"}}, "labels"),
        ({"labels": {"shared_cache_tier": "device"}}, "labels"),
        ({"labels": {"offload_blocks": "many"}}, "labels"),
        ({"event_endpoints": (EventEndpoint(1, "tcp://h:1"),)}, "event_endpoints[0].dp_rank"),
        ({"event_endpoints": (EventEndpoint(0, "h:1"),)}, "event_endpoints[0].endpoint"),
        ({"event_endpoints": (EventEndpoint(0, "tcp://h:1", "tcp://*:5657"),)}, "event_endpoints[0].replay_endpoint"),
        ({"event_endpoints": (EventEndpoint(0, "tcp://h:1", topic="\n"),)}, "event_endpoints[0].topic"),
        ({"event_endpoints": (EventEndpoint(0, "grpc://h:1"),)}, "event_endpoints[0].endpoint"),
        ({"transport": Transport.SUBSCRIBE}, "event_endpoints"),
        (
            {"transport": Transport.SUBSCRIBE, "event_endpoints": (EventEndpoint(0, "tcp://h:1"),)},
            "event_endpoints[0].endpoint",
        ),
        (
            {"transport": Transport.SUBSCRIBE, "event_endpoints": (EventEndpoint(0, "grpcs://*:1"),)},
            "event_endpoints[0].endpoint",
        ),
        (
            {"transport": Transport.SUBSCRIBE, "event_endpoints": (EventEndpoint(0, "grpc://h:1", "tcp://h:2"),)},
            "event_endpoints[0].replay_endpoint",
        ),
        (
            {
                "transport": Transport.SUBSCRIBE,
                "engine": EngineKind.OPENAI,
                "event_endpoints": (EventEndpoint(0, "grpc://h:1"),),
            },
            "engine",
        ),
        (
            {"event_endpoints": (EventEndpoint(0, "tcp://h:1"), EventEndpoint(0, "tcp://h:2"))},
            "event_endpoints[1].dp_rank",
        ),
    ],
)
def test_a_registration_out_of_range_names_the_field(fields: dict[str, object], field: str) -> None:
    good: dict[str, object] = {"worker_id": "w"}
    with pytest.raises(InvalidArgument) as caught:
        spec(**{**good, **fields}).validate()  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("total", "labels", "kept"),
    [
        (100, {}, 100),
        (100, {"offload_blocks": "900"}, 900),
        (100, {"offload_blocks": "40"}, 100),
        (0, {"offload_blocks": "900"}, 0),
    ],
)
def test_a_rank_keeps_as_many_blocks_as_its_larger_tier(total: int, labels: dict[str, str], kept: int) -> None:
    assert spec("w", total_kv_blocks=total, labels=labels).validate().kept_blocks == kept


def test_leases_of_the_bucket_end_only_by_the_time_that_its_follower_names(registry: Registry, clock: Clock) -> None:
    registry.register(spec("own"), lease_seconds=10)
    registry.register(spec("shared"), source=Source.NATS, lease_seconds=10)
    clock.now += 10
    assert [ended.worker_id for ended in registry.expire()] == ["own"]
    assert registry.expire_shared(by=clock.now - 1) == []
    registry.restart_leases(Source.NATS)
    assert registry.expire_shared(by=clock.now) == []
    assert [ended.worker_id for ended in registry.expire_shared(by=clock.now + 10)] == ["shared"]


def test_the_file_wins_over_dns_and_dns_over_the_others(registry: Registry) -> None:
    registry.register(spec("a", total_kv_blocks=1), source=Source.NATS)
    registry.replace_source(Source.DNS, [spec("a", total_kv_blocks=2)])
    for source in (Source.RPC, Source.NATS):
        with pytest.raises(FailedPrecondition, match="DNS"):
            registry.register(spec("a"), source=source)
    registry.replace_source(Source.FILE, [spec("a", total_kv_blocks=3)])
    registry.replace_source(Source.DNS, [spec("a", total_kv_blocks=4)])
    assert registry.get("default", "a").spec.total_kv_blocks == 3
    registry.replace_source(Source.FILE, [])
    registry.replace_source(Source.DNS, [spec("a", total_kv_blocks=4)])
    registry.replace_source(Source.DNS, [])
    assert registry.entries() == []


def test_what_an_engine_told_stays_while_its_worker_registers_again_and_changes(registry: Registry) -> None:
    recorder = Recorder()
    registry.listen(recorder)
    asked = spec("a", http_endpoint="http://a")
    facts = EngineFacts("http://a", (EventEndpoint(0, "tcp://a:1"),), total_kv_blocks=9)
    registry.register(asked)
    registry.complete("default", "a", facts)
    registry.complete("default", "a", facts)
    registry.register(asked)
    registry.set_draining("default", "a", True)
    entry = registry.get("default", "a")
    assert (entry.spec.total_kv_blocks, entry.spec.draining, entry.registered) == (9, True, asked.with_draining(True))
    registry.update(spec("a", http_endpoint="http://elsewhere"))
    assert registry.get("default", "a").spec.event_endpoints == ()
    registry.complete("default", "a", replace(facts, http_endpoint="http://elsewhere"))
    registry.remove("default", "a")
    registry.register(asked)
    assert registry.get("default", "a").spec == asked
    assert recorder.received == ["+a", "~a", "~a", "~a", "~a", "-a:removed", "+a"]
    with pytest.raises(NotFound):
        registry.complete("default", "ghost", facts)


def test_each_change_has_a_version_of_its_own_and_renewals_have_none(registry: Registry) -> None:
    versions = [registry.version, Registry(Clock()).version]
    registry.register(spec("a"), lease_seconds=10)
    versions.append(registry.version)
    registry.keep_alive("default", ["a"])
    assert registry.version == versions[-1]
    registry.set_draining("default", "a", True)
    versions.append(registry.version)
    registry.remove("default", "a")
    versions.append(registry.version)
    assert len(set(versions)) == len(versions)
