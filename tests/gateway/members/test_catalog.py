"""The workers as requests see them."""

from dataclasses import replace

import pytest

from kvscout_common.errors import InvalidArgument
from kvscout_common.rank_sets import rank_set
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import Adapter, EngineKind, Role, WorkerRank, WorkerSpec
from kvscout_gateway.members.catalog import NOBODY, Catalog, Target
from kvscout_gateway.values.prompt import Geometry

A = WorkerSpec("a", "base", 16, http_endpoint="http://a", adapters=(Adapter("poet"),))


def test_an_adapter_stands_for_its_base_model() -> None:
    registry = Registry(lambda: 0.0)
    view = Catalog(registry).tenant("default")
    assert view.resolve("poet", "") == Target("poet", "")
    catalog = Catalog(registry)
    registry.register(A)
    view = catalog.tenant("default")
    assert view.resolve("poet", "") == view.resolve("poet", "poet") == Target("base", "poet")
    assert view.resolve("base", "poet") == Target("base", "poet")
    assert view.resolve("base", "") == Target("base", "")
    with pytest.raises(InvalidArgument) as refused:
        view.resolve("poet", "other")
    assert refused.value.field == "lora_name"
    with pytest.raises(InvalidArgument) as refused:
        view.resolve("", "")
    assert refused.value.field == "model"


def test_a_model_is_itself_even_if_an_adapter_has_its_name() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    registry.register(A)
    registry.register(WorkerSpec("b", "poet", 16))
    assert catalog.tenant("default").resolve("poet", "") == Target("poet", "")


def test_a_view_follows_the_registry() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    assert catalog.tenant("default").serving("base") is NOBODY
    registry.register(A)
    assert catalog.tenant("default").serving("base").specs == (A,)
    registry.register(replace(A, worker_id="b", block_size=32))
    assert set(catalog.tenant("default").serving("base").pools) == {Geometry(16, False), Geometry(32, False)}
    registry.update(replace(A, total_kv_blocks=5))
    assert catalog.tenant("default").specs["a"].total_kv_blocks == 5
    for worker_id in ("a", "b"):
        registry.remove("default", worker_id)
    assert catalog.tenant("default").serving("base") is NOBODY


def test_tenants_do_not_see_each_other_and_unknown_ones_leave_no_trace() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    registry.register(A)
    registry.register(replace(A, tenant="other", worker_id="o"))
    assert list(catalog.tenant("default").specs) == ["a"]
    assert list(catalog.tenant("other").specs) == ["o"]
    for number in range(100):
        assert not catalog.tenant(f"t{number}").specs
    assert set(catalog._views) == {"default", "other"}


def test_workers_without_an_api_that_the_gateway_speaks_are_named() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    registry.register(A)
    registry.register(replace(A, worker_id="b", http_endpoint=""))
    registry.register(replace(A, worker_id="c", engine=EngineKind.CUSTOM))
    registry.register(replace(A, worker_id="d", engine=EngineKind.MOCK))
    assert catalog.tenant("default").serving("base").unroutable == ("b", "c")


def test_the_longest_prompt_is_what_the_largest_cache_holds_if_all_tell_theirs() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    registry.register(replace(A, total_kv_blocks=10))
    registry.register(replace(A, worker_id="b", block_size=32, total_kv_blocks=8))
    assert catalog.tenant("default").serving("base").longest_prompt == 256
    registry.register(replace(A, worker_id="c"))
    assert catalog.tenant("default").serving("base").longest_prompt is None


def test_the_ranks_of_a_model_are_counted_by_geometry_whatever_their_role() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    registry.register(replace(A, dp_size=2))
    registry.register(replace(A, worker_id="b", role=Role.DECODE))
    registry.register(replace(A, worker_id="c", block_size=32))
    assert catalog.tenant("default").serving("base").ranks == {
        Geometry(16, eagle=False): rank_set([WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)]),
        Geometry(32, eagle=False): rank_set([WorkerRank("c", 0)]),
    }


def test_caches_count_offload_tiers_and_each_shared_cache_once() -> None:
    registry = Registry(lambda: 0.0)
    catalog = Catalog(registry)
    shared = {"shared_cache": "store", "shared_cache_blocks": "1000"}
    registry.register(replace(A, total_kv_blocks=10, dp_size=2, labels={**shared, "offload_blocks": "50"}))
    registry.register(replace(A, worker_id="b", total_kv_blocks=20, labels={"shared_cache": "store"}))
    caches = catalog.tenant("default").serving("base").caches[Geometry(16, False)]
    assert (caches.blocks, caches.smallest) == (2 * 50 + 20 + 1000, 20)
    assert catalog.tenant("default").serving("base").longest_prompt == 320
