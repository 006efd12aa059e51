"""Objectives: read from flags, or refused with the flag's name."""

from __future__ import annotations

from math import inf

import pytest

from kvscout_common.errors import ConfigError
from kvscout_gateway.fronts.objectives import Objective, objectives_of


def test_an_objective_has_a_priority_and_may_have_targets() -> None:
    texts = ("batch=-10", "chat=5,ttft=400,itl=25", "a=b=0,itl=0.5")
    assert objectives_of(texts) == {
        "batch": Objective(-10, inf, inf),
        "chat": Objective(5, 0.4, 0.025),
        "a=b": Objective(0, inf, 0.0005),
    }


@pytest.mark.parametrize(
    "text",
    [
        *("", "batch", "=1", "batch=", "batch=x", f"batch={2**31}"),
        *("b=1,ttft=0", "b=1,ttft=-5", "b=1,ttft=nan", "b=1,tpot=5", "b=1,ttft=inf", "b=1,"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_flag(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        objectives_of([text])
    assert refused.value.field == "inference_objective"
