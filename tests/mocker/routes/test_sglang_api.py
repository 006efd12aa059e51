"""SGLang's API and its handshake between a prefill and a decode engine, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from support.mocker_process import MockerProcess, running_mocker
from support.processes import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 200))


_rooms = itertools.count(2**40 + 7, 2)


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mocker() -> AsyncIterator[MockerProcess]:
    async with running_mocker("--api", "both", "--dp-size", "2") as process:
        yield process


async def generate(mocker: MockerProcess, **fields: Any) -> dict[str, Any]:
    status, answer = await mocker.post("/generate", body(**fields))
    assert status == 200, answer
    return answer


async def test_generate_answers_with_text_ids_and_meta_info(mocker: MockerProcess) -> None:
    answer = await generate(mocker, rid="me", routed_dp_rank=1, return_logprob=True)
    meta = answer["meta_info"]
    assert answer["text"] == "".join(f" w{token}" for token in answer["output_ids"])
    assert (meta["id"], meta["finish_reason"], meta["dp_rank"]) == ("me", {"type": "length", "length": 4}, 1)
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (100, 4, 0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    again = await generate(mocker, data_parallel_rank=1)
    assert again["meta_info"]["cached_tokens"] == 96
    apart = await generate(mocker, routed_dp_rank=1, extra_key="mine")
    assert apart["meta_info"]["cached_tokens"] == 0
    openai = await mocker.complete(PROMPT, max_tokens=4, return_token_ids=True)
    assert openai["choices"][0]["token_ids"] == answer["output_ids"]


async def test_a_streams_events_repeat_everything_so_far(mocker: MockerProcess) -> None:
    whole = await generate(mocker)
    async with mocker.http.post(mocker.url + "/generate", json=body(stream=True)) as response:
        *events, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    documents = [json.loads(event.removeprefix("data: ")) for event in events]
    for earlier, later in itertools.pairwise(documents):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert documents[-1]["output_ids"] == whole["output_ids"]
    assert documents[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"text": "a"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1]]}, "input_ids"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": 1}, "sampling_params"),
        ({"routed_dp_rank": 2}, "X-data-parallel-rank"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
    ],
)
async def test_bad_input_has_sglangs_shape_and_names_the_field(
    mocker: MockerProcess, fields: dict[str, Any], field: str
) -> None:
    status, answer = await mocker.post("/generate", body() | fields)
    assert (status, list(answer["error"])) == (400, ["message"])
    assert answer["error"]["message"].startswith(field)


async def test_the_server_tells_of_itself() -> None:
    async with running_mocker("--api", "sglang", "--role", "prefill", "--dp-size", "2") as prefill:
        async with prefill.http.get(prefill.url + "/server_info") as response:
            info = await response.json()
        assert (info["dp_size"], info["disaggregation_mode"], info["page_size"]) == (2, "prefill", 16)
        assert info["disaggregation_bootstrap_port"] == prefill.bootstrap_port > 0
        assert info["max_total_num_tokens"] == 4095 * 16
        samples = await prefill.metrics()
        assert samples['sglang:num_running_reqs{engine="0",model_name="mock"}'] == 0
        assert not any(name.startswith("vllm:") for name in samples)
        async with prefill.http.post(prefill.url + "/flush_cache") as response:
            assert response.status == 200


async def test_a_request_can_be_aborted_by_its_id() -> None:
    async with running_mocker("--api", "sglang", "--speedup", "1") as mocker:
        long = body(rid="long") | {"sampling_params": {"max_new_tokens": 20_000}}
        asking = asyncio.create_task(mocker.post("/generate", long))

        async def usage(expected: int) -> bool:
            return (await mocker.metrics())['sglang:num_running_reqs{engine="0",model_name="mock"}'] == expected

        await eventually(lambda: usage(1))
        status, answer = await mocker.post("/generate", long)
        assert (status, "Duplicate" in answer["error"]["message"]) == (400, True)
        async with mocker.http.post(mocker.url + "/abort_request", json={"rid": "long"}) as response:
            assert response.status == 200
        await eventually(lambda: usage(0))
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_request_that_fails_is_500_or_a_broken_stream() -> None:
    async with running_mocker("--api", "sglang", "--fail-requests", "1") as mocker:
        status, answer = await mocker.post("/generate", body())
        assert (status, list(answer)) == (500, ["error"])
        async with mocker.http.post(mocker.url + "/generate", json=body(stream=True)) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()


class Pair(NamedTuple):
    prefill: MockerProcess
    decode: MockerProcess

    def body(self, **fields: Any) -> dict[str, Any]:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port}
        return body(bootstrap_room=next(_rooms), **where, **fields)


@asynccontextmanager
async def running_pair(*flags: str) -> AsyncIterator[Pair]:
    common = ("--api", "sglang", "--dp-size", "2", *flags)
    async with (
        running_mocker(*common, "--role", "prefill") as one,
        running_mocker(*common, "--role", "decode") as other,
    ):
        yield Pair(one, other)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Pair]:
    async with running_pair() as pair:
        yield pair


@pytest.mark.parametrize("decode_first", [True, False])
async def test_both_legs_meet_in_their_room_whoever_comes_first(engines: Pair, decode_first: bool) -> None:
    asked = engines.body()
    legs = {}
    for role in ("decode", "prefill") if decode_first else ("prefill", "decode"):
        legs[role] = asyncio.create_task(getattr(engines, role).post("/generate", asked))
        await asyncio.sleep(0.05)
    (prefill_status, prefilled), (decode_status, decoded) = await legs["prefill"], await legs["decode"]
    assert (prefill_status, decode_status) == (200, 200)
    assert prefilled["meta_info"]["dp_rank"] == asked["bootstrap_room"] % 2 == 1
    assert (len(prefilled["output_ids"]), len(decoded["output_ids"])) == (1, 4)
    async with running_mocker("--api", "sglang") as alone:
        assert (await generate(alone))["output_ids"] == decoded["output_ids"]
    again = engines.body()
    _, (_, decoded) = await asyncio.gather(*(engine.post("/generate", again) for engine in engines))
    assert decoded["meta_info"]["cached_tokens"] == 96
    for engine in engines:
        samples = await engine.metrics()
        assert all(value == 0 for name, value in samples.items() if name.startswith("sglang:token_usage"))


async def test_a_leg_that_stays_alone_ends_after_its_patience() -> None:
    impatient = ("--bootstrap-timeout-seconds", "0.3", "--waiting-timeout-seconds", "0.6")
    async with running_pair(*impatient) as engines:
        status, answer = await engines.prefill.post("/generate", engines.body())
        assert (status, "KVPoll.Bootstrapping" in answer["error"]["message"]) == (500, True)
        asked = engines.body()
        status, answer = await engines.decode.post("/generate", asked)
        assert status == 500

        async def both_served() -> bool:
            both = await asyncio.gather(*(engine.post("/generate", asked) for engine in engines))
            return [status for status, _ in both] == [200, 200]

        await eventually(both_served, what="both legs in the room of the one that was alone")


async def _admitted(engine: MockerProcess) -> bool:
    samples = await engine.metrics()
    return any(value > 0 for name, value in samples.items() if name.startswith("sglang:num_running_reqs"))


async def test_a_leg_that_goes_ends_the_other() -> None:
    async with running_pair("--speedup", "1", "--step-base-ms", "300") as engines:
        asked = engines.body() | {"input_ids": PROMPT * 300}
        decoding = asyncio.create_task(engines.decode.post("/generate", asked))
        prefilling = asyncio.create_task(engines.prefill.post("/generate", asked))
        await eventually(lambda: _admitted(engines.prefill), what="its prefill")
        prefilling.cancel()
        status, _ = await decoding
        assert status == 500


async def test_no_leg_is_served_without_a_room_or_in_one_that_is_open(engines: Pair) -> None:
    for engine in engines:
        for path, asked in (("/generate", body()), ("/v1/completions", {"prompt": PROMPT})):
            status, answer = await engine.post(path, asked)
            assert (status, "without bootstrap room id" in answer["error"]["message"]) == (400, True)
    asked = engines.body()
    legs = [asyncio.create_task(engines.prefill.post("/generate", asked)) for _ in range(2)]
    (refused,), (waits,) = await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
    status, answer = refused.result()
    assert (status, "is in use" in answer["error"]["message"]) == (400, True)
    waits.cancel()


async def test_a_decode_engine_whose_prefill_is_gone_fails(engines: Pair) -> None:
    engines.prefill.process.kill()
    await engines.prefill.process.wait()
    status, answer = await engines.decode.post("/generate", engines.body())
    assert (status, list(answer)) == (500, ["error"])
    samples = await engines.decode.metrics()
    assert all(value == 0 for name, value in samples.items() if name.startswith("sglang:token_usage"))
