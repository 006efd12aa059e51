"""Every dialect through the OpenAI front: the engine's own bytes, its usage, errors in the dialect's own shape."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web
from support.dialect_answers import BY_NAME, SAMPLES, Sample, error_of, last_error
from support.openai_stack import Front, Script, breaks, engine, says, spec, streams
from support.openai_stack import front as front_of

from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.worker import EngineKind, Role, WorkerRank, WorkerSpec

EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=str)
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NOWHERE = "http://127.0.0.1:1"
KEYS = TokenTable({hashlib.sha256(b"secret").hexdigest(): Identity(AccessRole.CLIENT, "default")})


def front(*workers: WorkerSpec, **config: Any) -> AbstractAsyncContextManager[Front]:
    """Return a front that asks no engine for tokens: engines count what came."""
    return front_of(*workers, **{"tokenize_timeout_seconds": 0.0, **config})


def answers(sample: Sample, *, stream: bool, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Script:
    """Answers as an engine of the dialect does."""
    if not stream:
        return says(sample.answer(stream=False))
    return streams(*sample.preamble, *sample.outputs, *sample.end, then=then)


@EVERY
@STREAMS
async def test_the_engines_own_bytes_come_back_and_its_usage_is_read(sample: Sample, stream: bool) -> None:
    async with engine(answers(sample, stream=stream)) as one, front(spec("w", one.url)) as served:
        body = sample.body | {"stream": stream}
        if sample.api.asks_for_usage and stream:
            body["stream_options"] = {"include_usage": True}
        status, _, answer = await served.post(sample.api.path, body)
        assert (status, answer) == (200, sample.answer(stream=stream))
        assert json.loads(one.received[0].body) == body
        seen = served.gateway.front_context.exchanges.context.observations.of("default", WorkerRank("w", 0))
        assert (seen.reports.prompt_tokens, seen.reports.cached_tokens) == (7, 4)


@EVERY
@STREAMS
async def test_a_worker_that_fails_before_its_first_output_costs_a_try_elsewhere(sample: Sample, stream: bool) -> None:
    failing = streams(*sample.preamble, sample.failure) if stream else says(b"out of luck", 500)
    async with (
        engine(failing) as one,
        engine(answers(sample, stream=stream)) as other,
        front(spec("a", one.url), spec("b", other.url)) as served,
    ):
        for _ in range(2):  # the workers take turns
            status, _, answer = await served.post(sample.api.path, sample.body | {"stream": stream})
            assert status == 200
            if not sample.api.asks_for_usage:
                assert answer == sample.answer(stream=stream)
        assert one.received


@EVERY
async def test_an_engines_error_in_a_stream_is_passed_on_as_it_is(sample: Sample) -> None:
    async with engine(streams(sample.failing)) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post(sample.api.path, sample.body | {"stream": True})
        assert (status, answer) == (200, sample.failing)
        assert served.gateway.front_context.exchanges.failures == 1


@EVERY
async def test_a_stream_that_breaks_ends_with_an_error_of_its_dialect(sample: Sample) -> None:
    begun = b"".join((*sample.preamble, sample.outputs[0]))
    async with engine(streams(begun, then=breaks)) as one, front(spec("w", one.url)) as served:
        _, _, answer = await served.post(sample.api.path, sample.body | {"stream": True})
        assert answer.startswith(begun)
        document = last_error(sample, answer)
        message = document["error"]["message"]
        assert "failed after its first token" in message
        if sample.api.name == "responses":
            assert (document["message"], document["sequence_number"]) == (message, len(sample.preamble) + 1)


@EVERY
async def test_a_stream_without_its_end_is_broken_off(sample: Sample) -> None:
    begun = b"".join((*sample.preamble, *sample.outputs))
    async with engine(streams(begun)) as one, front(spec("w", one.url)) as served:
        _, _, answer = await served.post(sample.api.path, sample.body | {"stream": True})
        assert "broke off" in last_error(sample, answer)["error"]["message"]


@EVERY
async def test_engines_see_a_clients_key_only_where_it_is_theirs(sample: Sample) -> None:
    async def key_seen(**config: Any) -> str | None:
        async with engine(answers(sample, stream=False)) as one, front(spec("w", one.url), **config) as served:
            status, _, _ = await served.post(sample.api.path, sample.body, x_api_key="secret", anthropic_version="1")
            assert status == 200
            assert one.received[0].headers["anthropic-version"] == "1"
            return one.received[0].headers.get("x-api-key")

    assert await key_seen(tokens=KEYS) is None
    assert await key_seen() == "secret"


async def test_a_page_may_send_the_headers_of_anthropics_sdk_where_its_origin_is_allowed() -> None:
    names = "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key"
    page = {"Origin": "https://chat.example.com"}
    sample = BY_NAME["messages"]
    async with engine(answers(sample, stream=False)) as one:
        async with front(spec("w", one.url), tokens=KEYS, cors_origins=(page["Origin"],)) as served:
            asks = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": names, **page}
            status, headers, _ = await served.request("OPTIONS", sample.api.path, None, **asks)
            assert (status, headers["access-control-allow-headers"]) == (204, names)
            status, headers, _ = await served.post(sample.api.path, sample.body, x_api_key="secret", **page)
            assert (status, headers["access-control-allow-origin"]) == (200, page["Origin"])
            status, headers, answer = await served.post(sample.api.path, sample.body, **page)
            assert (status, headers["access-control-allow-origin"]) == (401, page["Origin"])
            assert error_of(sample, json.loads(answer))[0] == "authentication_error"


async def test_a_query_of_the_client_goes_to_the_engine() -> None:
    sample = BY_NAME["messages"]
    async with engine(answers(sample, stream=True)) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post(f"{sample.api.path}?beta=true", sample.body | {"stream": True})
        assert (status, answer) == (200, sample.answer(stream=True))
        assert one.received[0].target == f"{sample.api.path}?beta=true"


REFUSALS: dict[str, tuple[int, str, str]] = {
    "no key": (401, "authentication_error", "authentication_error"),
    "wrong key": (401, "authentication_error", "authentication_error"),
    "no such model": (404, "not_found_error", "invalid_request_error"),
    "no model": (400, "invalid_request_error", "invalid_request_error"),
    "model of another type": (400, "invalid_request_error", "invalid_request_error"),
    "no JSON": (400, "invalid_request_error", "invalid_request_error"),
    "no object": (400, "invalid_request_error", "invalid_request_error"),
    "too long": (413, "request_too_large", "invalid_request_error"),
    "wrong method": (405, "invalid_request_error", "invalid_request_error"),
    "unreachable": (503, "overloaded_error", "service_unavailable_error"),
    "draining": (503, "overloaded_error", "service_unavailable_error"),
    "full": (429, "rate_limit_error", "rate_limit_error"),
}
"""Status, and the type in Anthropic's and in OpenAI's words."""


@EVERY
@pytest.mark.parametrize("case", REFUSALS)
async def test_the_gateways_own_refusals_are_in_the_dialects_shape(sample: Sample, case: str) -> None:
    config: dict[str, Any] = {"max_in_flight": 0} if case == "full" else {}
    async with front(spec("w", NOWHERE), tokens=KEYS, **config) as served:
        key = {} if case == "no key" else {"x_api_key": "wrong" if case == "wrong key" else "secret"}
        body: Any = {
            "no such model": sample.body | {"model": "other"},
            "no model": {name: value for name, value in sample.body.items() if name != "model"},
            "model of another type": sample.body | {"model": 7},
            "no JSON": b"{",
            "no object": b"[]",
            "too long": b" " * (served.gateway.config.server.max_message_bytes + 1),
        }.get(case, sample.body)
        if case == "draining":
            served.gateway.front_context.exchanges.draining = True
        if case == "wrong method":
            status, headers, answer = await served.request("PUT", sample.api.path, b"{}", **key)
        else:
            status, headers, answer = await served.post(sample.api.path, body, **key)
        expected, anthropic, openai = REFUSALS[case]
        kind, message = error_of(sample, json.loads(answer))
        assert (status, kind) == (expected, anthropic if sample.api.name == "messages" else openai)
        assert message
        assert ("retry-after" in headers) == (status in (429, 503))
        assert served.gateway.front_context.exchanges.in_flight == 0


@EVERY
@pytest.mark.parametrize("wrong", [None, 7, "text", [7], {"a": 1}, [{"role": 7}], [[[]]], [None]], ids=repr)
async def test_a_prompt_of_the_wrong_type_is_the_engines_to_refuse(sample: Sample, wrong: Any) -> None:
    said = b'{"type": "error"}'
    async with engine(says(said, 400)) as one, front(spec("w", one.url)) as served:
        for field in {sample.api.prompt, "tools", "system", "instructions"}:
            status, _, answer = await served.post(sample.api.path, sample.body | {field: wrong})
            assert (status, answer) == (400, said)


@EVERY
async def test_a_client_that_goes_leaves_nothing_at_the_engine(sample: Sample) -> None:
    gone = asyncio.Event()

    async def waits(_: web.Request) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    begun = b"".join((*sample.preamble, sample.outputs[0]))
    async with engine(streams(begun, then=waits)) as one, front(spec("w", one.url)) as served:
        body = sample.body | {"stream": True}
        async with served.http.post(f"{served.url}{sample.api.path}", json=body) as response:
            assert await response.content.readexactly(len(begun)) == begun
        await asyncio.wait_for(gone.wait(), 20)
        await asyncio.wait_for(served.gateway.front_context.exchanges.idle.wait(), 20)


@pytest.mark.parametrize("name", ["messages", "responses"])
async def test_tokens_are_counted_by_any_worker_that_answers_clients(name: str) -> None:
    sample, counted = BY_NAME[name], b'{"input_tokens": 7}'
    async with engine(says(b"{}")) as prefill, engine(says(counted)) as one:
        workers = [spec("p", prefill.url, role=Role.PREFILL), spec("w", one.url)]
        async with front(*workers) as served:
            for _ in range(5):
                assert (await served.post(sample.api.count_path, sample.body))[::2] == (200, counted)
            status, _, answer = await served.post(sample.api.count_path, sample.body | {"model": "other"})
            assert (status, error_of(sample, json.loads(answer))[0]) == (
                404,
                "not_found_error" if name == "messages" else "invalid_request_error",
            )
        assert (len(prefill.received), len(one.received)) == (0, 5)


@pytest.mark.parametrize("name", ["messages", "responses"])
async def test_what_cannot_be_divided_runs_on_one_worker_or_is_refused(name: str) -> None:
    sample = BY_NAME[name]
    async with engine(says(b"{}")) as prefill, engine(says(sample.answer(stream=False))) as one:
        apart = {"engine": EngineKind.SGLANG, "bootstrap_host": "127.0.0.1"}
        computes, decodes = spec("p", prefill.url, role=Role.PREFILL, **apart), {"role": Role.DECODE, **apart}
        async with front(computes, spec("d", one.url, **decodes)) as served:
            status, _, answer = await served.post(sample.api.path, sample.body)
            kind, message = error_of(sample, json.loads(answer))
            assert (status, kind) == (400, "invalid_request_error")
            assert f"{sample.api.path} of sglang takes over no prompt" in message
            assert served.sample("kvscout_disaggregated_requests_total", path="refused") == 1
        for others in (
            [spec("d", one.url, can_fallback=True, **decodes)],
            [spec("d", NOWHERE, **decodes), spec("a", one.url)],
        ):
            async with front(computes, *others) as served:
                assert (await served.post(sample.api.path, sample.body))[0] == 200
                assert served.sample("kvscout_disaggregated_requests_total", path="undivided") == 1
        assert prefill.received == []


async def test_a_response_is_continued_without_the_prefill_worker_that_has_nothing_of_it() -> None:
    sample = BY_NAME["responses"]
    body = sample.body | {"previous_response_id": "resp_1"}
    async with engine(says(b"{}")) as prefill, engine(says(sample.answer(stream=False))) as one:
        computes = spec("p", prefill.url, role=Role.PREFILL)
        async with front(computes, spec("d", one.url, role=Role.DECODE, can_fallback=True)) as served:
            assert (await served.post(sample.api.path, body))[0] == 200
        async with front(computes, spec("d", one.url, role=Role.DECODE)) as served:
            status, _, answer = await served.post(sample.api.path, body)
            assert (status, "has the previous response" in error_of(sample, json.loads(answer))[1]) == (400, True)
        assert (len(prefill.received), len(one.received)) == (0, 1)
