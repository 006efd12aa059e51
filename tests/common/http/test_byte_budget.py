"""Budgets of bytes, those of the extension and of Python alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_common.http.byte_budget import Budget, BudgetCollector, ReferenceBudget, make_budget
from kvscout_common.http.http import Charge
from kvscout_common.transport import Transport, choose, chosen

Make = Callable[[int, int], Budget]


def native(limit: int, share: int) -> Budget:
    from kvscout_native import ByteBudget

    return ByteBudget(limit, share)


MAKERS: list[Make] = [ReferenceBudget, *([native] if native_available() else [])]


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def test_a_charge_is_refused_above_the_limit_of_all_or_of_its_tenant_and_then_nothing_is_charged(make: Make) -> None:
    budget = make(100, 50)
    one, again, other, nobodys = (budget.charge(tenant) for tenant in ("a", "a", "b", None))
    assert one.grow(40) is None
    refusal = again.grow(11)
    assert refusal is not None
    assert refusal[0] == 429
    assert "tenant" in refusal[1]
    assert again.bytes == 0
    assert again.look(10) is None
    assert other.grow(50) is None
    refusal = nobodys.grow(11)
    assert refusal is not None
    assert refusal[0] == 503
    assert nobodys.grow(10) is None
    assert (budget.held, budget.refused) == (100, (1, 1))


def test_what_is_charged_is_given_back_once_when_it_is_released_or_collected(make: Make) -> None:
    budget = make(100, 50)
    charge: Charge | None = budget.charge("a", 4)
    assert charge is not None
    assert charge.grow(5) is None
    assert (charge.bytes, budget.held) == (20, 20)
    charge.release()
    charge.release()
    assert budget.held == 0
    assert charge.grow(10) is None
    assert budget.held == 40
    charge = None
    assert budget.held == 0


def test_budgets_of_both_kinds_agree_about_anything() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    budgets = [make(1000, 500) for make in MAKERS]
    charges: dict[int, list[Charge]] = {}
    for step in range(3000):
        if not charges or draw.random() < 0.2:
            tenant, copies = draw.choice(["a", "b", "c", None]), draw.randint(1, 3)
            charges[step] = [budget.charge(tenant, copies) for budget in budgets]
        number, amount, what = draw.choice(list(charges)), draw.randint(0, 200), draw.random()
        if what < 0.6:
            assert len({charge.grow(amount) for charge in charges[number]}) == 1, seed
        elif what < 0.7:
            assert len({charge.look(amount) for charge in charges[number]}) == 1, seed
        elif what < 0.9:
            assert [charge.release() for charge in charges[number]]  # type: ignore[func-returns-value]
        else:
            del charges[number]
        assert len({(budget.held, budget.refused) for budget in budgets}) == 1, seed
        assert budgets[0].held == sum(of[0].bytes for of in charges.values()) <= 1000, seed
    charges.clear()
    assert [budget.held for budget in budgets] == [0] * len(budgets), seed


@pytest.fixture(params=[Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    before = chosen()
    choose(request.param)
    yield request.param
    choose(before)


def test_half_of_a_budget_is_the_share_of_a_tenant_and_metrics_tell_of_it(transport: Transport) -> None:
    budget, metrics = make_budget(100), CollectorRegistry()
    metrics.register(BudgetCollector(budget))
    charge = budget.charge("a")
    assert charge.grow(50) is None
    assert charge.grow(1) is not None
    assert metrics.get_sample_value("kvscout_request_memory_bytes") == 50
    assert metrics.get_sample_value("kvscout_request_memory_limit_bytes") == 100
    assert metrics.get_sample_value("kvscout_request_memory_refusals_total", {"full": "tenant"}) == 1
    assert metrics.get_sample_value("kvscout_request_memory_refusals_total", {"full": "process"}) == 0
