"""The OpenAI front with real helpers, real engines and the openai client."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
import trustme
from support.gateway_stack import MODEL, Stack, fresh_prompt, mocker_worker, running_stack
from support.processes import eventually, running

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.hashing import native_available

if TYPE_CHECKING:
    import openai  # loading it takes a second, at every worker of pytest

pytestmark = [pytest.mark.usefixtures("each_mode"), pytest.mark.asyncio(loop_scope="module")]


def words(prompt: Any) -> str:
    """Text that the mocker's tokenizer takes apart into these tokens."""
    return " ".join(f"w{token}" for token in prompt)


async def ran(stack: Stack) -> dict[str, int]:
    """Requests that each worker was sent."""
    return {w.worker.worker_id: w.requests for w in (await stack.client.status()).workers}


def url_of(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.gateway.ready['http_port']}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack("--tokenize-timeout-ms", "5000") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(stack) as connected:
        yield connected


@asynccontextmanager
async def openai_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(api_key="unused", base_url=f"{url_of(stack)}/v1", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "transport",
    ["grpcio", pytest.param("native", marks=pytest.mark.skipif(not native_available(), reason="no extension"))],
)
async def test_the_openai_client_is_served_and_what_is_cached_is_found(transport: str) -> None:
    flags = ("--tokenize-timeout-ms", "5000", "--rpc-transport", transport)
    async with running_stack(*flags) as stack, openai_client(stack) as client:
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        ids = fresh_prompt(64).tolist()
        first = await client.completions.create(model=MODEL, prompt=ids, max_tokens=4)
        assert first.usage is not None
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (64, 4)
        assert first.choices[0].finish_reason == "length"
        await stack.client.until_indexed(ids, 4)
        for _ in range(4):
            # The end of a request may come later than its answer, as load that turns the next decision.
            await stack.client.until_idle()
            again = await client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            assert again.usage.prompt_tokens_details.cached_tokens == 48  # the last token is always computed
        await stack.client.until_idle()

        async def all_checked() -> bool:
            return sum(worker.checked for worker in (await stack.client.status()).workers) == 5

        await eventually(all_checked, what="each prediction checked")
        assert sum(worker.mispredicted for worker in (await stack.client.status()).workers) == 0


async def test_a_conversation_streams_and_its_next_turn_goes_where_the_last_one_was(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    before = await ran(stack)
    messages: list[Any] = [{"role": "user", "content": words(fresh_prompt(100))}]
    previous: list[int] = []
    for _ in range(3):
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        said, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert len(said.split()) == usage.completion_tokens == 20
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= len(previous) // 16 * 16
        _, told = await stack.mockers[0].post("/tokenize", {"messages": messages})
        previous = told["tokens"]
        assert len(previous) == usage.prompt_tokens
        await stack.client.until_indexed(previous, len(previous) // 16)
        await stack.client.until_idle()
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": words(fresh_prompt(80))}]
    ran_at = [worker for worker, requests in (await ran(stack)).items() if requests > before.get(worker, 0)]
    assert len(ran_at) == 1
    await stack.client.until_idle()


async def test_errors_come_as_the_clients_own(stack: Stack, client: openai.AsyncOpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="nope"):
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt="a " * 40_000, max_tokens=1)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=-1, stream=True)
    several = await client.completions.create(model=MODEL, prompt=fresh_prompt(40).tolist(), max_tokens=2, n=2)
    assert len(several.choices) == 2
    embedding = await client.embeddings.create(model=MODEL, input="a b c", encoding_format="float")
    assert len(embedding.data[0].embedding) > 0
    await stack.client.until_idle()


async def test_a_client_that_goes_away_frees_its_request(stack: Stack, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=fresh_prompt(40).tolist(), max_tokens=4000, stream=True
    )
    async for _ in stream:
        break
    await stack.client.until_active()
    await stream.close()
    await stack.client.until_idle()
    waiting = asyncio.create_task(client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4000))
    await stack.client.until_active()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stack.client.until_idle()


async def test_thresholds_are_set_read_cleared_and_listed(stack: Stack) -> None:
    async with aiohttp.ClientSession() as http:
        url = f"{url_of(stack)}/busy_threshold"

        async def post(**body: Any) -> tuple[int, Any]:
            async with http.post(url, json=body) as response:
                return response.status, await response.json()

        nothing = {"active_decode_blocks_threshold": None, "active_prefill_tokens_threshold": None}
        assert await post(model=MODEL) == (200, {"model": MODEL, **nothing})
        both = {"active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": 1000}
        assert await post(model=MODEL, **both) == (200, {"model": MODEL, **both})
        cleared = {**both, "active_decode_blocks_threshold": None}
        assert await post(model=MODEL, active_decode_blocks_threshold=None) == (200, {"model": MODEL, **cleared})
        async with http.get(url) as response:
            assert await response.json() == {"thresholds": [{"model": MODEL, **cleared}]}
        status, answer = await post(model=MODEL, active_decode_blocks_threshold=1.5)
        assert (status, answer["error"]["param"]) == (400, "active_decode_blocks_threshold")
        assert (await post(model=MODEL, active_prefill_tokens_threshold=None))[1] == {"model": MODEL, **nothing}


async def test_a_stream_that_runs_at_sigterm_comes_to_its_end() -> None:
    async with running_stack(mockers=((),)) as stack:
        async with openai_client(stack) as client:
            stream = await client.completions.create(
                model=MODEL, prompt=fresh_prompt(40).tolist(), max_tokens=100, stream=True
            )
            chunks = aiter(stream)
            await anext(chunks)
            stack.gateway.process.terminate()
            tokens = 1 + len([chunk async for chunk in chunks])
            assert tokens == 100
        assert await stack.gateway.process.wait() == 0


async def test_an_adapter_is_a_model() -> None:
    async with running_stack("--tokenize-timeout-ms", "5000", mockers=(("--lora", "tuned"),)) as stack:
        worker = mocker_worker("w0", stack.mockers[0], adapters=[workers_pb2.Adapter(name="tuned", lora_id=1)])
        await stack.client.register(worker)
        async with openai_client(stack) as client:
            assert [model.id for model in (await client.models.list()).data] == [MODEL, "tuned"]
            answer = await client.completions.create(model="tuned", prompt=fresh_prompt(40).tolist(), max_tokens=2)
            assert answer.model == "tuned"


async def test_prefill_and_decode_apart_answer_the_clients_own_body() -> None:
    roles = {"w0": types_pb2.ROLE_PREFILL, "w1": types_pb2.ROLE_DECODE}
    async with running_stack(
        "--tokenize-timeout-ms", "5000", mockers=(("--role", "prefill"), ("--role", "decode"))
    ) as stack:
        for mocker, (worker_id, role) in zip(stack.mockers, roles.items(), strict=True):
            await stack.client.register(mocker_worker(worker_id, mocker, role=role))
        async with openai_client(stack) as client:
            messages: Any = [{"role": "user", "content": words(fresh_prompt(100))}]
            whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 5
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, max_completion_tokens=7, stream=True
            )
            said = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
            assert len(said.split()) == 7
        assert await ran(stack) == {"w0": 2, "w1": 2}
        await stack.client.until_idle()


@pytest.mark.services_only
async def test_keys_and_tls_are_those_of_grpc(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own = ca.issue_cert("127.0.0.1")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    (tmp_path / "tokens.yaml").write_text(json.dumps({"tokens": [{"token": "k", "role": "client", "tenant": "t"}]}))
    (tmp_path / "tokens.yaml").chmod(0o600)
    flags = (
        "--auth-tokens",
        tmp_path / "tokens.yaml",
        "--tls-cert",
        tmp_path / "own.pem",
        "--tls-key",
        tmp_path / "own.pem",
    )
    async with running(
        "kvscout_gateway.main", "--no-indexer", "--scheduler", "127.0.0.1:1", *map(str, flags)
    ) as gateway:
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as http:
            url = f"https://127.0.0.1:{gateway.ready['http_port']}/v1/models"
            for key, status in (("k", 200), ("wrong", 401)):
                async with http.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status
            async with http.get(url) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
