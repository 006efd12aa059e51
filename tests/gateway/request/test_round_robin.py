"""Workers in turn, where no scheduler decides."""

from dataclasses import replace
from typing import Any

import pytest

from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvscout_common.worker import Adapter, Role, WorkerSpec
from kvscout_gateway.members.catalog import NOBODY, Serving
from kvscout_gateway.request.round_robin import RoundRobin
from kvscout_gateway.values.prompt import Prompt
from kvscout_gateway.values.request import Request

A = WorkerSpec("a", "m", 16, dp_size=2, labels={"zone": "a"})
B = WorkerSpec("b", "m", 16, adapters=(Adapter("poet"),))
SERVING = Serving((A, B))


def take(turns: RoundRobin, serving: Serving = SERVING, *, lora: str = "", **fields: Any) -> tuple[str, int]:
    request = Request(**{"model": "m", "tenant": "default", "prompt": Prompt(1), "lora_name": lora, **fields})
    _, rank = turns.take(request, serving.specs)
    return rank.worker_id, rank.dp_rank


def test_every_rank_has_its_turn() -> None:
    turns = RoundRobin()
    assert [take(turns) for _ in range(6)] == [("a", 0), ("a", 1), ("b", 0)] * 2


def test_models_take_turns_of_their_own() -> None:
    turns = RoundRobin()
    other = Serving((replace(A, model="n", dp_size=1), replace(B, model="n")))
    got = []
    for _ in range(4):
        take(turns)
        got.append(take(turns, other, model="n")[0])
    assert got == ["a", "b", "a", "b"]


def test_wishes_are_kept() -> None:
    turns = RoundRobin()
    assert {take(turns, pinned="a", pinned_rank=1) for _ in range(3)} == {("a", 1)}
    assert {take(turns, allowed=("b",)) for _ in range(3)} == {("b", 0)}
    assert {take(turns, excluded=("a",)) for _ in range(3)} == {("b", 0)}
    assert {take(turns, required_labels={"zone": "a"})[0] for _ in range(3)} == {"a"}
    assert {take(turns, lora="poet") for _ in range(3)} == {("b", 0)}
    draining = Serving((A.with_draining(True), B))
    assert {take(turns, draining) for _ in range(3)} == {("b", 0)}


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (NotFound, {"serving": NOBODY}),
        (InvalidArgument, {"pinned": "a", "allowed": ("b",)}),
        (NotFound, {"pinned": "c"}),
        (NotFound, {"pinned": "a", "pinned_rank": 2}),
        (Unavailable, {"allowed": ("c",)}),
        (Unavailable, {"excluded": ("a", "b")}),
        (FailedPrecondition, {"required_labels": {"zone": "b"}}),
        (FailedPrecondition, {"lora": "painter"}),
        (Unavailable, {"serving": Serving((A.with_draining(True), B.with_draining(True)))}),
        (Unavailable, {"role": Role.PREFILL}),
    ],
)
def test_each_reason_for_nobody_has_its_own_error(error: type[Exception], fields: dict[str, Any]) -> None:
    with pytest.raises(error):
        take(RoundRobin(), **fields)
