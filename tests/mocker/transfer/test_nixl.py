"""vLLM's handshake between a prefill and a decode engine, two real processes each."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from support.mocker_process import DEADLINE_SECONDS, MockerProcess, cached_tokens, running_mocker
from support.processes import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 200))
ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LABELS = '{engine="0",model_name="mock"}'


class Pair(NamedTuple):
    prefill: MockerProcess
    decode: MockerProcess

    async def prefilled(self, **fields: Any) -> dict[str, Any]:
        """The object that the prefill engine answers with."""
        answer = await self.prefill.complete(PROMPT, max_tokens=1, kv_transfer_params=ASK, **fields)
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params


@asynccontextmanager
async def pair(*decode_flags: str, prefill_flags: tuple[str, ...] = ()) -> AsyncIterator[Pair]:
    prefill = ("--role", "prefill", *prefill_flags)
    async with running_mocker(*prefill) as one, running_mocker("--role", "decode", *decode_flags) as other:
        yield Pair(one, other)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Pair]:
    async with pair() as engines:
        yield engines


RECORDED = Path(__file__).parents[2] / "data/exchanges/vllm-0.32.0-generate.json"


async def sample(mocker: MockerProcess, name: str) -> float:
    return (await mocker.metrics())[f"vllm:{name}{LABELS}"]


async def used(mocker: MockerProcess) -> float:
    return await sample(mocker, "kv_cache_usage_perc")


async def test_decode_takes_over_what_prefill_computed(engines: Pair) -> None:
    params = await engines.prefilled()
    recorded = json.loads(RECORDED.read_text())["decode"]["body"]["kv_transfer_params"]
    assert list(params) == list(recorded)
    assert {name: type(told) for name, told in params.items()} == {name: type(told) for name, told in recorded.items()}
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert await used(engines.prefill) > 0
    answer = await engines.decode.complete(PROMPT, max_tokens=5, return_token_ids=True, kv_transfer_params=params)
    assert cached_tokens(answer) == 0
    assert await used(engines.prefill) == 0
    assert await sample(engines.decode, "external_prefix_cache_hits_total") == 100
    assert await sample(engines.decode, "nixl_num_failed_transfers_total") == 0
    alone = await engines.prefill.complete(PROMPT, max_tokens=5, return_token_ids=True)
    assert alone["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert "kv_transfer_params" not in alone
    again = await engines.prefilled()
    assert again["remote_prefill_cached_tokens"] == 96
    answer = await engines.decode.complete(PROMPT, max_tokens=1, kv_transfer_params=again)
    assert cached_tokens(answer) == 96
    assert await sample(engines.decode, "external_prefix_cache_hits_total") == 104


async def test_decode_spends_no_time_on_a_prompt_that_it_took_over() -> None:
    # It would compute for an hour.
    async with pair("--speedup", "1", "--prefill-us-per-token", "3.6e7") as engines:
        params = await engines.prefilled()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await engines.decode.complete(PROMPT, max_tokens=1, kv_transfer_params=params)


@pytest.mark.parametrize("damage", ["spent", "unknown", "engine", "prompt", "nobody", "empty", "fields"])
async def test_a_transfer_that_fails_makes_decode_compute_the_prompt(engines: Pair, damage: str) -> None:
    params, prompt = await engines.prefilled(), PROMPT
    if damage == "spent":
        await engines.decode.complete(PROMPT, max_tokens=1, kv_transfer_params=params)
        await engines.decode.post("/reset_prefix_cache", None)
    elif damage == "prompt":
        prompt = PROMPT[1:]
    elif damage == "fields":
        del params["remote_host"]
    else:
        key, value = {
            "unknown": ("remote_request_id", "x"),
            "engine": ("remote_engine_id", "x"),
            "nobody": ("remote_port", 9),
            "empty": ("remote_block_ids", []),
        }[damage]
        params[key] = value
    failed = await sample(engines.decode, "nixl_num_failed_transfers_total")
    answer = await engines.decode.complete(prompt, max_tokens=3, kv_transfer_params=params)
    assert answer["usage"]["completion_tokens"] == 3
    assert await sample(engines.decode, "nixl_num_failed_transfers_total") == failed + 1
    assert await used(engines.decode) == 0


async def test_a_transfer_that_fails_ends_the_request_where_that_is_asked_for() -> None:
    async with pair("--kv-load-failure", "fail") as engines:
        lost = await engines.prefilled() | {"remote_request_id": "x"}
        body = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": lost}
        status, answer = await engines.decode.post("/v1/completions", body)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        url = engines.decode.url + "/v1/completions"
        async with engines.decode.http.post(url, json=body | {"stream": True}) as response:
            assert response.status == 200
            event, done, _ = (await response.text()).split("\n\n")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        assert await used(engines.decode) == 0


async def test_a_prefill_engine_that_hangs_holds_decode_up_for_its_patience_only() -> None:
    async with pair("--kv-transfer-timeout-seconds", "0.2") as engines:
        params = await engines.prefilled()
        engines.prefill.process.send_signal(signal.SIGSTOP)
        try:
            await engines.decode.complete(PROMPT, max_tokens=1, kv_transfer_params=params)
        finally:
            engines.prefill.process.send_signal(signal.SIGCONT)
        assert await sample(engines.decode, "nixl_num_failed_transfers_total") == 1


async def test_blocks_that_nobody_comes_for_are_freed_when_their_lease_ends() -> None:
    async with pair(prefill_flags=("--kv-lease-seconds", "0.05")) as engines:
        await engines.prefilled()

        async def expired() -> bool:
            return await sample(engines.prefill, "nixl_num_kv_expired_reqs_total") == 1

        await eventually(expired)
        assert await used(engines.prefill) == 0


async def test_a_streamed_prefill_has_no_place_for_the_object_but_keeps_the_lease() -> None:
    async with pair(prefill_flags=("--kv-lease-seconds", "0.05")) as engines:
        body = {"prompt": PROMPT, "max_tokens": 1, "stream": True, "kv_transfer_params": ASK}
        async with engines.prefill.http.post(engines.prefill.url + "/v1/completions", json=body) as response:
            assert "kv_transfer_params" not in await response.text()

        async def freed() -> bool:
            return await used(engines.prefill) == 0

        await eventually(freed)


async def test_a_client_that_goes_while_blocks_are_on_their_way_leaves_none() -> None:
    async with pair(prefill_flags=("--speedup", "1", "--kv-transfer-base-ms", "300")) as engines:
        params = await engines.prefilled()
        body = {"prompt": PROMPT, "max_tokens": 3, "kv_transfer_params": params}
        asking = asyncio.create_task(engines.decode.post("/v1/completions", body))

        async def waits() -> bool:
            return await sample(engines.decode, "num_requests_waiting") == 1

        await eventually(waits)
        asking.cancel()

        async def freed() -> bool:
            return await used(engines.decode) == 0 and await used(engines.prefill) == 0

        await eventually(freed)


async def test_a_chat_takes_part_in_it(engines: Pair) -> None:
    chat = {"messages": [{"role": "user", "content": "tell me " * 40}], "max_tokens": 1}
    _, answer = await engines.prefill.post("/v1/chat/completions", chat | {"kv_transfer_params": ASK})
    params = answer["kv_transfer_params"]
    before = await sample(engines.decode, "external_prefix_cache_hits_total")
    await engines.decode.post("/v1/chat/completions", chat | {"kv_transfer_params": params})
    hits = await sample(engines.decode, "external_prefix_cache_hits_total") - before
    assert hits == params["remote_num_tokens"]


async def test_an_aggregated_engine_ignores_it() -> None:
    async with running_mocker() as alone:
        answer = await alone.complete(PROMPT, max_tokens=1, kv_transfer_params=ASK)
        assert "kv_transfer_params" not in answer
