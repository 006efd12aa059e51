"""What is picked for a request that names no model: any worker that answers clients, and well ones first."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai_stack import front, spec
from prometheus_client import CollectorRegistry

from kvscout_common.errors import Unavailable
from kvscout_common.worker import DEFAULT_TENANT, Role, WorkerRank, WorkerSpec
from kvscout_gateway.engines.health import MIN_FAILURES
from kvscout_gateway.front.endpoint_picker import wire
from kvscout_gateway.front.endpoint_picker.asked import Asked
from kvscout_gateway.front.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.front.endpoint_picker.exchange_picker import ExchangePicker, PickerMetrics
from kvscout_gateway.gateway import Gateway

PICKS = 40


def worker(number: int, **fields: Any) -> WorkerSpec:
    return spec(f"w{number}", f"http://10.0.0.{number}:8000", **fields)


def address(number: int) -> str:
    return f"10.0.0.{number}:8000"


@asynccontextmanager
async def picker(*workers: WorkerSpec, fallbacks: int = 2) -> AsyncIterator[tuple[ExchangePicker, Gateway]]:
    config = EndpointPickerConfig(0, tenant=DEFAULT_TENANT, fallbacks=fallbacks)
    async with front(*workers) as served:
        counts = PickerMetrics(CollectorRegistry())
        yield ExchangePicker(served.gateway, config, counts, draw=random.Random()), served.gateway


async def picked(one: ExchangePicker, subset: tuple[str, ...] | None = None) -> list[str]:
    """The endpoints that a request without a model gets, in order of preference."""
    pick = await one.pick(Asked("", "/v1/models", subset=subset))
    return pick.headers[wire.DESTINATION].split(",")


async def test_what_names_no_model_goes_to_workers_that_answer_clients_only() -> None:
    apart = (worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE))
    async with picker(*apart, worker(3), worker(4, model="other")) as (one, _):
        seen = [await picked(one) for _ in range(PICKS)]
        assert {endpoint for endpoints in seen for endpoint in endpoints} == {address(3), address(4)}
        assert {endpoints[0] for endpoints in seen} == {address(3), address(4)}
        with pytest.raises(Unavailable):
            await picked(one, (address(1),))
    async with picker(*apart) as (one, _):
        assert [await picked(one) for _ in range(PICKS)] == [[address(2)]] * PICKS
    async with picker(apart[0]) as (one, _):
        with pytest.raises(Unavailable):
            await picked(one)


async def test_what_names_no_model_goes_to_a_failing_worker_last() -> None:
    workers = [worker(1), worker(2), worker(3)]
    async with picker(*workers) as (one, gateway):
        for _ in range(MIN_FAILURES):
            gateway.health.failed((DEFAULT_TENANT, WorkerRank("w1", 0)), workers)
        seen = [await picked(one) for _ in range(PICKS)]
        assert {endpoints[-1] for endpoints in seen} == {address(1)}
        assert {endpoints[0] for endpoints in seen} == {address(2), address(3)}
        # Where the proxy allows no other, it is asked all the same.
        assert await picked(one, (address(1),)) == [address(1)]


async def test_a_worker_s_address_is_named_once_and_no_more_than_are_wanted() -> None:
    workers = [worker(1), worker(2), worker(3), spec("same", "http://10.0.0.1:8000")]
    async with picker(*workers, fallbacks=1) as (one, _):
        for _ in range(PICKS):
            endpoints = await picked(one)
            assert len(endpoints) == len(set(endpoints)) == 2
