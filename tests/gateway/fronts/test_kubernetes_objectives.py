"""Objectives of a Kubernetes cluster: which count, as they come, change and go; a cluster without them; outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes_api import OBJECTIVES, OLD_OBJECTIVES, FakeApi, fake_api, objective, refusal
from support.processes import eventually, running

from kvscout.v1 import gateway_pb2_grpc, types_pb2
from kvscout_common.kubernetes import listing
from kvscout_common.kubernetes.access import KubernetesAccess
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.rpc.service_info import shown
from kvscout_gateway.fronts.kubernetes_objectives import KubernetesObjectives
from kvscout_gateway.fronts.objectives import Objective


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(listing, "LAST_PAUSE_SECONDS", 0.05)


class World:
    """An API, and what follows its objectives."""

    def __init__(self, api: FakeApi, *selections: str) -> None:
        self.api = api
        self.followed = KubernetesObjectives(selections, access=KubernetesAccess(api.url, "default"))

    async def until(self, **priorities: int) -> None:
        expected = {name: Objective(priority) for name, priority in priorities.items()}

        async def there() -> bool:
            return self.followed.objectives == expected

        await eventually(there, what=f"{expected}, not {self.followed.objectives}")

    async def warned(self, words: str) -> None:
        async def told() -> bool:
            return any(words in warning for warning in shown(self.followed.warnings()))

        await eventually(told, what=f"{words!r} in {self.followed.warnings()}")


@asynccontextmanager
async def world(*selections: str, defined: tuple[str, ...] = (OBJECTIVES, OLD_OBJECTIVES)) -> AsyncIterator[World]:
    async with fake_api() as api:
        for path in defined:
            api.define(path)
        made = World(api, *selections)
        task = asyncio.create_task(made.followed.run())
        try:
            yield made
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_objectives_of_the_selected_pool_are_followed_as_they_come_change_and_go() -> None:
    async with world("pool/llama", "app=other") as made:
        await made.api.put(OBJECTIVES, objective("urgent", "llama", 10), objective("foreign", "qwen", 99))
        await made.api.put(OLD_OBJECTIVES, objective("plain", "llama"), objective("batch", "llama", -10))
        await made.until(urgent=10, plain=0, batch=-10)
        await made.api.put(OBJECTIVES, objective("urgent", "llama", 20))
        await made.until(urgent=20, plain=0, batch=-10)
        await made.api.delete(OLD_OBJECTIVES, "batch")
        await made.until(urgent=20, plain=0)
        await made.api.put(OBJECTIVES, objective("urgent", "qwen", 20))
        await made.until(plain=0)
        assert made.followed.warnings() == []


async def test_of_one_name_the_first_pools_counts_and_llm_ds_before_the_gateway_apis() -> None:
    async with world("pool/llama", "pool/qwen") as made:
        await made.api.put(OLD_OBJECTIVES, objective("a", "llama", 1), objective("b", "llama", 2))
        await made.api.put(OBJECTIVES, objective("a", "qwen", 3), objective("b", "llama", 4))
        await made.until(a=1, b=4)


async def test_a_cluster_without_the_kind_is_silent_and_asked_rarely_until_it_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world("pool/llama", defined=()) as made:

        async def asked() -> bool:
            return {path for path, _ in made.api.asked} == {OBJECTIVES, OLD_OBJECTIVES}

        await eventually(asked, what="both kinds requested")
        # A worker's watch would have been tried many times by then.
        await asyncio.sleep(20 * listing.LAST_PAUSE_SECONDS)
        assert len(made.api.asked) == 2
        assert (made.followed.warnings(), caplog.records) == ([], [])
    monkeypatch.setattr(listing, "ABSENT_SECONDS", 0.05)
    async with world("pool/llama", defined=()) as made:
        made.api.define(OBJECTIVES)
        await made.api.put(OBJECTIVES, objective("urgent", "llama", 10))
        await made.until(urgent=10)
        made.api.undefine(OBJECTIVES)
        await made.api.kill()
        await made.api.start()
        await made.until()
        assert made.followed.warnings() == []


async def test_whoever_may_not_read_them_is_told_so() -> None:
    async with world("pool/llama", defined=()) as made:

        async def forbid(_: Any) -> Any:
            return refusal(403, "inferenceobjectives is forbidden")

        made.api.override = forbid
        await made.warned("inferenceobjectives is forbidden")


@pytest.mark.parametrize("priority", ["high", True, 2**31, 1.5])
async def test_an_objective_that_cannot_be_read_is_left_out_and_named(priority: Any) -> None:
    async with world("pool/llama") as made:
        await made.api.put(OBJECTIVES, objective("bad", "llama", priority), objective("good", "llama", 1))
        await made.until(good=1)
        await made.warned("bad: spec.priority")


async def test_an_outage_of_the_api_keeps_what_is_known_and_a_gateway_of_a_cluster_warns_of_it(tmp_path: Path) -> None:
    async with world("pool/llama") as made:
        await made.api.put(OBJECTIVES, objective("urgent", "llama", 10))
        await made.until(urgent=10)
        kubeconfig = tmp_path / "kubeconfig"
        context = {"name": "c", "context": {"cluster": "k"}}
        cluster = {"name": "k", "cluster": {"server": made.api.url}}
        kubeconfig.write_text(yaml.safe_dump({"current-context": "c", "contexts": [context], "clusters": [cluster]}))
        flags = ("--no-indexer", "--workers-k8s", "pool/llama", "--kubeconfig", str(kubeconfig))
        async with running("kvscout_gateway.main", *flags) as gateway, AsyncExitStack() as entered:
            channel = open_channel(gateway.address)
            entered.push_async_callback(channel.close)
            stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)

            async def warns() -> bool:
                status = await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=5)
                return any("InferenceObjectives of namespace" in text for text in status.service.warnings)

            assert not await warns()
            await made.api.kill()
            await made.warned("does not answer")
            await eventually(warns, what="a warning of the gateway")
            assert made.followed.objectives == {"urgent": Objective(10)}
