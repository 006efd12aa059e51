"""Faults of a real mocker process: what is lost live, what the replay socket still has, what a restart forgets."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from support.free_ports import first_of_free_ports
from support.mocker_process import DEADLINE_SECONDS, MockerProcess, running_mocker

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_mocker.faults import BOUND_VARIABLE, BoundPorts, FaultConfig, Faults, stall

PROMPTS = [[number] * 32 for number in range(1, 41)]


async def truth(mocker: MockerProcess) -> dict[str, Any]:
    async with mocker.http.get(mocker.url + "/mock/kv_blocks") as response:
        answer: dict[str, Any] = (await response.json())["0"]
        return answer


async def live(mocker: MockerProcess) -> None:
    """Waits until a mocker that is starting again answers."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                async with mocker.http.get(mocker.url + "/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)


async def test_dropped_batches_are_in_the_replay_and_draws_repeat_with_their_seed() -> None:
    counts = []
    for _ in range(2):
        async with running_mocker("--drop-events", "0.3", "--duplicate-events", "0.2", "--fault-seed", "7") as mocker:
            for prompt in PROMPTS:
                await mocker.complete(prompt, max_tokens=1)
            status, counted = await mocker.post("/mock/faults", {})
            assert status == 200
            counts.append((counted["dropped"], counted["duplicated"]))
            assert len(await mocker.replay(0)) == len(PROMPTS) + 1
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0


async def test_shares_change_at_run_time() -> None:
    async with running_mocker() as mocker:
        await mocker.complete(PROMPTS[0], max_tokens=1)
        await mocker.post("/mock/faults", {"drop_events": 1})
        await mocker.complete(PROMPTS[1], max_tokens=1)
        assert (await mocker.post("/mock/faults", {"drop_events": 0}))[1]["dropped"] == 1


async def test_the_truth_is_what_the_cache_holds_with_copies() -> None:
    async with running_mocker() as mocker:
        # The second request recomputes the last block of a block-aligned prompt: two physical copies of it.
        await mocker.complete(PROMPTS[0], max_tokens=1)
        await mocker.complete(PROMPTS[0], max_tokens=1)
        held = await truth(mocker)
        assert sorted(held["blocks"].values()) == [1, 2]
        assert (held["last_seq"], held["unpublished"]) == (1, 0)


async def test_an_engine_without_a_replay_socket() -> None:
    async with running_mocker("--no-replay") as mocker:
        assert mocker.ranks[0]["replay"] == ""
        async with mocker.http.get(mocker.url + "/kv_event_sources") as response:
            assert (await response.json())["0"]["replay_endpoint"] is None
        await mocker.complete(PROMPTS[0], max_tokens=1)


async def test_an_engine_dies_after_so_many_batches() -> None:
    async with running_mocker("--crash-after", "2") as mocker:
        await mocker.complete(PROMPTS[0], max_tokens=1)
        with pytest.raises(aiohttp.ClientError):
            await mocker.complete(PROMPTS[1], max_tokens=1)
        assert await mocker.process.wait() == -9


async def test_an_engine_that_hangs_goes_on_afterwards() -> None:
    async with running_mocker("--stall-after", "1", "--stall-seconds", "0.3") as mocker:
        answer = await mocker.complete(PROMPTS[0], max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == 32
        await mocker.complete(PROMPTS[1], max_tokens=1)


async def test_a_mute_request_gets_pings_and_no_token_while_others_are_served() -> None:
    async with running_mocker("--mute-requests", "1") as mocker:
        body = {"prompt": PROMPTS[0], "stream": True, "max_tokens": 1}
        async with mocker.http.post(mocker.url + "/v1/completions", json=body) as mute:
            assert [await mute.content.readline() for _ in range(3)] == [b": ping\n", b"\n", b": ping\n"]
            await mocker.complete(PROMPTS[1], max_tokens=1)
            await mocker.post("/mock/faults", {"mute_requests": 0})
            async with mocker.http.post(mocker.url + "/v1/completions", json=body) as served:
                assert b"[DONE]" in await served.content.read()


@pytest.mark.parametrize(("details", "told"), [("always", [0, 16]), ("nonzero", [None, 16]), ("never", [None, None])])
async def test_cached_tokens_are_told_as_the_engine_was_told_to(details: str, told: list[int | None]) -> None:
    async with running_mocker("--prompt-tokens-details", details) as mocker:
        usages = [(await mocker.complete(PROMPTS[0], max_tokens=1))["usage"] for _ in range(2)]
        assert [(usage["prompt_tokens_details"] or {}).get("cached_tokens") for usage in usages] == told


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restart_keeps_the_ports_and_forgets_everything_else(replay: bool) -> None:
    # A port of the kernel's own range may be another process's by the time it is bound again.
    ports = [f"--{name}={first_of_free_ports(2)}" for name in ("port", "events-port", "replay-port", "bootstrap-port")]
    async with running_mocker("--dp-size", "2", *ports) as mocker:
        first = await mocker.complete(PROMPTS[0], {"X-data-parallel-rank": "0"}, max_tokens=1)
        before = await truth(mocker)
        status, _ = await mocker.post("/mock/faults", {"restart": True, "replay": replay})
        assert (status, before["last_seq"]) == (200, 0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert mocker.process.stdout is not None
            assert await mocker.process.stdout.readline()
        await live(mocker)
        assert (await truth(mocker))["last_seq"] == -1
        again = await mocker.complete(PROMPTS[0], {"X-data-parallel-rank": "0"}, max_tokens=1)
        assert again["usage"] == first["usage"]
        async with mocker.http.get(mocker.url + "/kv_event_sources") as response:
            sources = await response.json()
        assert [sources[rank]["endpoint"] for rank in "01"] == [rank["events"] for rank in mocker.ranks]
        assert bool(sources["1"]["replay_endpoint"]) == replay
        if replay:
            assert sources["1"]["replay_endpoint"] == mocker.ranks[1]["replay"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"drop_events": 1.5}, "drop_events"),
        ({"duplicate_events": "all"}, "duplicate_events"),
        ({"crash": 1}, "crash"),
        ({"crush": True}, "crush"),
        ([], "body"),
    ],
)
async def test_a_fault_that_cannot_be_is_refused_by_name(body: object, field: str) -> None:
    async with running_mocker() as mocker:
        status, answer = await mocker.post("/mock/faults", body)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with running_mocker() as mocker, mocker.http.post(mocker.url + "/mock/faults", data=b"{") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "body")


def test_a_share_is_changed_only_if_both_are_in_range() -> None:
    faults = Faults(FaultConfig(seed=1))
    with pytest.raises(InvalidArgument, match="duplicate_events"):
        faults.set_shares(drop_events=1.0, duplicate_events=2.0)
    assert [faults.deliveries() for _ in range(5)] == [1] * 5


async def test_a_slow_engine_takes_as_many_times_as_long_for_its_steps_until_it_is_told_otherwise() -> None:
    loop = asyncio.get_running_loop()
    async with running_mocker("--speedup", "1", "--step-base-ms", "4") as mocker:
        for factor in (0.5, 1e9, True, "x"):
            status, answer = await mocker.post("/mock/faults", {"slowdown": factor})
            assert (status, answer["error"]["param"]) == (400, "slowdown")
        assert (await mocker.post("/mock/faults", {"slowdown": 50}))[0] == 200
        began = loop.time()
        await mocker.complete("a b", max_tokens=6)
        assert loop.time() - began >= 5 * 50 * 0.004  # steps sleep no shorter than they say
        assert (await mocker.post("/mock/faults", {"slowdown": 1}))[0] == 200
        await mocker.complete("a b", max_tokens=20)


def test_a_stall_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match="stall_seconds"):
        stall(1e9)


def test_ports_that_a_restart_left_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BOUND_VARIABLE, "[1, 5, [2, 3], [4, 0], 6]")
    assert BoundPorts.from_environment() == BoundPorts(1, 5, (2, 3), (4, 0), 6)
    assert BoundPorts.from_environment() is None
    monkeypatch.setenv(BOUND_VARIABLE, "nonsense")
    with pytest.raises(ConfigError, match=BOUND_VARIABLE):
        BoundPorts.from_environment()


async def test_a_cache_can_be_emptied_without_an_event() -> None:
    async with running_mocker() as mocker:
        await mocker.complete(PROMPTS[0], max_tokens=1)
        before = await truth(mocker)
        assert (await mocker.post("/mock/faults", {"empty_cache": True}))[0] == 200
        after = await truth(mocker)
        assert (after["blocks"], after["unpublished"], after["last_seq"]) == ({}, 0, before["last_seq"])
        assert before["blocks"]
