"""Where SGLang's attempts meet, and what the one that computes the prompt is said to have done."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvscout_common.errors import FailedPrecondition
from kvscout_common.http.dialect import Usage
from kvscout_common.worker import EngineKind, Role, WorkerRank, WorkerSpec
from kvscout_gateway.request.sglang_handover import SglangHandover
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import SGLANG
from kvscout_gateway.values.prompt import Geometry

POOL = Geometry(16, eagle=False)


def placed(rank: int, **fields: object) -> Decision:
    known = {"worker_id": "p", "model": "m", "block_size": 16, "role": Role.PREFILL, "engine": EngineKind.SGLANG}
    spec = WorkerSpec(**known | fields)  # type: ignore[arg-type]
    return Decision("default", "m", WorkerRank("p", rank), POOL, bytes(8), endpoint="http://10.0.0.7:30000", spec=spec)


@pytest.mark.parametrize(("dp_size", "start"), [(1, 0), (3, 0), (8, 8)])
def test_the_number_of_a_room_says_the_rank_that_was_chosen(dp_size: int, start: int) -> None:
    draw = random.Random(7)
    handover = SglangHandover(draw.randrange)
    for rank in range(dp_size):
        where = handover.meeting(placed(start + rank, dp_size=dp_size, dp_start_rank=start))
        assert where["bootstrap_room"] % dp_size == rank
        assert 0 <= where["bootstrap_room"] < 2**63
    assert len({handover.meeting(placed(start))["bootstrap_room"] for _ in range(50)}) == 50


def test_a_worker_is_met_at_its_bootstrap_server_or_where_it_serves() -> None:
    handover = SglangHandover()
    told = handover.meeting(placed(0, bootstrap_host="10.1.1.1", bootstrap_port=9000))
    assert (told["bootstrap_host"], told["bootstrap_port"]) == ("10.1.1.1", 9000)
    untold = handover.meeting(placed(0))
    assert (untold["bootstrap_host"], untold["bootstrap_port"]) == ("10.0.0.7", 8998)


def test_a_worker_of_which_nothing_is_known_cannot_be_met() -> None:
    with pytest.raises(FailedPrecondition, match="bootstrap"):
        SglangHandover().meeting(
            Decision("default", "m", WorkerRank("p", 0), POOL, bytes(8), endpoint="http://10.0.0.7:1")
        )


class Prefill:
    """An attempt whose engine has not answered when the other one is done."""

    dialect = SGLANG
    decision = placed(0)

    def __init__(self) -> None:
        self.told: list[Usage | None] = []

    async def send(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()

    def prefilled(self, usage: Usage | None) -> None:
        self.told.append(usage)


class Decode:
    """An attempt that ends at once."""

    decision = placed(0)
    passed = False
    usage = Usage(40, 16, 500)

    async def send(self, *_: object) -> None:
        """Nothing."""

    async def relay(self, *_: object) -> None:
        """Nothing."""

    async def placed(self, *_: object) -> None:
        """Nothing."""


async def test_what_the_other_leg_generated_is_not_said_of_the_one_that_computes_the_prompt() -> None:
    attempt, decode = Prefill(), Decode()

    class Exchange:
        request_id = "r"

        async def run_attempts(self, _: object, use: Any) -> None:
            await use(attempt)

    anything: Any = Exchange()
    unneeded: Any = None
    told: Any = decode
    await SglangHandover().run(anything, unneeded, told, told)
    assert attempt.told == [Usage(40, 16, 0)]
