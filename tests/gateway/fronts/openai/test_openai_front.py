"""The OpenAI front over real connections: bodies and answers unharmed, failures moved, told or passed on."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.http_peers import TRANSPORTS, made_of
from support.openai_stack import (
    CHAT,
    DONE,
    MODEL,
    NOBODY,
    TIMEOUTS,
    USAGE,
    breaks,
    delta,
    engine,
    event,
    front,
    hangs,
    says,
    spec,
    streams,
)
from support.processes import eventually

from kvscout.v1 import scheduler_pb2
from kvscout_common.http import json_fields, json_scan
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable, _digest
from kvscout_common.identity.tenant_limits import Limit
from kvscout_common.transport import Transport
from kvscout_common.worker import Adapter, Role
from kvscout_gateway.engines.health import MISSED_CHECKS
from kvscout_gateway.fronts.client_paths import ClientPaths
from kvscout_gateway.fronts.sessions import Sessions
from kvscout_gateway.upstreams.failover import UpstreamDown
from kvscout_gateway.upstreams.scheduler.select_request import select_request
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.overlaps import Overlaps
from kvscout_gateway.values.request import Request

ANSWER = b'{ "id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 7}, "odd":1.0e3 }'
IMAGE = "data:image/png;base64," + "A" * 3_000_000
BODIES: dict[str, dict[str, Any]] = {
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1.50}}}],
        "tool_choice": "auto",
    },
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"é": None}}}
    },
    "logprobs": {"logprobs": True, "top_logprobs": 5, "n": 3, "seed": 123456789012345678901234567890},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
    "unknown fields": {"guided_regex": "\\d+", "vllm_xargs": {"kv": [1, {"a": []}]}, "stop": ["\n", "\u2028"]},
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_reaches_its_engine_byte_for_byte_and_so_does_the_answer(name: str) -> None:
    body = json.dumps(CHAT | BODIES[name], indent=1, ensure_ascii=name == "unknown fields").encode()
    async with engine(says(ANSWER, X_Engine="yes")) as one, front(spec("w", one.url)) as served:
        status, headers, answer = await served.post("/v1/chat/completions?a=b%20c", body, traceparent="00-1")
        assert (status, answer, headers["x-engine"]) == (200, ANSWER, "yes")
        assert headers["content-length"] == str(len(ANSWER))
        [received] = [one for one in one.received if one.target not in ("/tokenize", "/v1/chat/completions/render")]
        assert (received.body, received.target) == (body, "/v1/chat/completions?a=b%20c")
        assert received.headers["traceparent"] == "00-1"
        assert received.headers["content-type"] == "application/json"


async def test_a_stream_is_passed_on_as_it_came_and_its_usage_where_it_was_asked_for() -> None:
    chunks = [delta("a"), b": ping\n\n", delta("b", "stop"), USAGE, DONE]
    async with engine(streams(*chunks)) as one, front(spec("w", one.url)) as served:
        asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        _, headers, answer = await served.post("/v1/chat/completions", asked)
        assert answer == b"".join(chunks)
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        _, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert answer == b"".join([*chunks[:3], DONE])
        await served.post("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"x": 1}})
        options = [json.loads(r.body)["stream_options"] for r in one.received if r.target != "/tokenize"]
        assert options == [{"include_usage": True}, {"include_usage": True}, {"x": 1, "include_usage": True}]


async def test_a_worker_that_fails_before_its_first_output_costs_a_try_elsewhere() -> None:
    bad = [streams(then=breaks), streams(event({"error": {"code": 500, "message": "oh"}}), DONE), says(b"no", 500)]
    for script in bad:
        async with (
            engine(script) as broken,
            engine(streams(delta("a", "stop"), DONE)) as well,
            front(spec("a", broken.url), spec("b", well.url), tokenize_timeout_seconds=0.0) as served,
        ):
            answers = [await served.post("/v1/chat/completions", CHAT | {"stream": True}) for _ in range(2)]
            assert [(status, answer) for status, _, answer in answers] == [(200, delta("a", "stop") + DONE)] * 2
            assert len(broken.received) >= 1


async def test_after_the_first_output_an_error_is_the_last_event() -> None:
    async with (
        engine(streams(delta("a"), b"data: {", then=breaks)) as one,
        front(spec("w", one.url)) as served,
    ):
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert (status, answer.startswith(delta("a"))) == (200, True)
        last = answer.rstrip().rpartition(b"data: ")[2]
        assert json.loads(last)["error"]["type"] == "server_error"


async def test_an_error_of_the_engine_within_a_stream_is_told_once_in_its_own_words() -> None:
    told = event({"error": {"code": 400, "message": "too long", "type": "BadRequestError"}})
    async with engine(streams(delta("a"), told, DONE)) as one, front(spec("w", one.url)) as served:
        _, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert answer == delta("a") + told + DONE
    async with engine(streams(told, DONE)) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert (status, b"too long" in answer) == (400, True)


async def test_a_refusal_of_the_engine_is_the_clients_answer() -> None:
    said = b'{"error":{"message":"max_tokens is too large","code":400,"x":[1]}}'
    async with engine(says(said, 400)) as one, front(spec("w", one.url)) as served:
        for body in (CHAT, CHAT | {"stream": True}):
            status, _, answer = await served.post("/v1/chat/completions", body)
            assert (status, answer) == (400, said)


async def test_a_busy_engine_is_told_of_with_when_to_come_back() -> None:
    async with engine(says(b"{}", 429, Retry_After="17")) as one, front(spec("w", one.url)) as served:
        status, headers, _ = await served.post("/v1/chat/completions", CHAT)
        assert (status, headers["retry-after"]) == (429, "17")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"model": ""}', "model"),
        (b'{"model": 5}', "model"),
        (b"{}", "model"),
    ],
)
async def test_bad_bodies_are_refused_by_name(body: bytes, param: str) -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, _, answer = await served.post(path, body)
            error = json.loads(answer)["error"]
            assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert one.received == []


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"error": {"message": "the adapter is not loaded", "code": 503}},
            "the engine reports: the adapter is not loaded",
        ),
        ({"detail": "busy"}, 'the engine answered a streamed call with a JSON document: {"detail": "busy"}'),
    ],
)
async def test_a_document_in_answer_to_a_streamed_call_is_shown_to_the_client(document: Any, said: str) -> None:
    async with engine(says(json.dumps(document).encode())) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert status == 503
        assert said in json.loads(answer)["error"]["message"]


async def test_who_refused_is_told_by_the_worker_in_a_header_or_by_its_absence() -> None:
    refusal = b'{"detail":"Not Found"}'
    async with engine(says(refusal, 404)) as one, front(spec("w", one.url)) as served:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/embeddings", {"model": MODEL, "input": "x"})):
            status, headers, answer = await served.post(path, body)
            assert (status, headers["x-kvscout-worker"], answer) == (404, "w", refusal)
        status, headers, answer = await served.post("/v1/chat/completions", CHAT | {"model": "nope"})
        assert (status, headers.get("x-kvscout-worker")) == (404, None)
        assert f"; known: {MODEL}" in json.loads(answer)["error"]["message"]
        status, headers, answer = await served.post("/v1/nothing", CHAT)
        assert (status, headers.get("x-kvscout-worker")) == (404, None)
        assert "the gateway has no path /v1/nothing" in json.loads(answer)["error"]["message"]


async def test_an_unknown_model_is_not_found_and_a_wrong_method_is_said() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"model": "nope"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        assert (await served.request("GET", "/v1/completions"))[0] == 405
        assert one.received == []


async def test_a_body_beyond_the_limit_is_refused_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvscout_common.settings.config import ServerConfig

    async with (
        engine(says(ANSWER)) as one,
        front(spec("w", one.url), server=ServerConfig(max_message_bytes=5000)) as served,
    ):
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"x": "y" * 6000})
        assert (status, "error" in json.loads(answer)) == (413, True)
        assert (await served.post("/v1/chat/completions", CHAT))[0] == 200


async def test_a_client_that_goes_away_ends_its_request_at_the_engine() -> None:
    for body in (CHAT, CHAT | {"stream": True}):
        async with (
            engine(streams(delta("a"), then=hangs)) as one,
            front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served,
        ):
            async with aiohttp.ClientSession() as client:
                posting = asyncio.create_task(client.post(f"{served.url}/v1/chat/completions", json=body))
                await eventually(lambda: bool(one.received), what="the request at its engine")
                posting.cancel()
                [answer] = await asyncio.gather(posting, return_exceptions=True)
                if isinstance(answer, aiohttp.ClientResponse):
                    answer.close()

            async def gone() -> bool:
                return one.aborted == 1 and served.gateway.exchanges.in_flight == 0

            await eventually(gone, what="the request given up")


async def test_a_client_that_leaves_with_the_last_event_has_its_answer_and_its_usage_counts() -> None:
    async with (
        engine(streams(delta("a", "stop"), USAGE, DONE, then=hangs)) as one,
        front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served,
    ):
        body = CHAT | {"stream": True}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body) as response:
            await response.content.readuntil(DONE)
            response.close()
        await eventually(lambda: served.gateway.exchanges.in_flight == 0, what="the request over")
        assert served.sample("kvscout_requests_total", tenant="default", model=MODEL, outcome="ok") == 1.0
        assert served.gateway.observations.by_rank
        [seen] = served.gateway.observations.by_rank.values()
        assert seen.unproven.prompt_tokens == 7


async def test_an_adapter_is_a_model_and_is_asked_for_by_its_name() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url, adapters=(Adapter("lora", 1),))) as served:
        status, _, _ = await served.post("/v1/chat/completions", CHAT | {"model": "lora"})
        sent = [json.loads(r.body)["model"] for r in one.received if r.target == "/v1/chat/completions"]
        assert (status, sent) == (200, ["lora"])
        _, _, listed = await served.request("GET", "/v1/models")
        assert [(card["id"], card["parent"]) for card in json.loads(listed)["data"]] == [(MODEL, None), ("lora", MODEL)]


async def test_models_are_told_of_in_the_engines_words_where_it_says_any() -> None:
    card = {"id": MODEL, "object": "model", "max_model_len": 5, "permission": []}
    async with (
        engine(says(json.dumps({"data": [card, {"id": "other"}]}).encode())) as one,
        front(spec("w", one.url), spec("x", "http://127.0.0.1:1", model="n")) as served,
    ):
        _, _, listed = await served.request("GET", "/v1/models")
        cards = {one["id"]: one for one in json.loads(listed)["data"]}
        assert cards.keys() == {MODEL, "n"}
        assert cards[MODEL] == card
        _, _, single = await served.request("GET", f"/v1/models/{MODEL}")
        assert json.loads(single) == card
        assert (await served.request("GET", "/v1/models/other"))[0] == 404
        assert len(one.received) == 1  # asked once, for a while


async def test_other_paths_go_to_a_worker_of_the_model_as_they_came() -> None:
    binary = bytes(range(256)) * 100
    async with (
        engine(says(binary, 201, X_More="1")) as one,
        engine(says(b"")) as other,
        front(spec("w", one.url), spec("x", other.url, model="n")) as served,
    ):
        body = json.dumps({"model": MODEL, "input": ["a", "b"]}, indent=2).encode()
        status, headers, answer = await served.post("/v1/embeddings?x=1", body, X_Request_Id="mine")
        assert (status, answer, headers["x-more"]) == (201, binary, "1")
        form = (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n'
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + MODEL.encode() + b"\r\n--b--\r\n"
        )
        await served.request("POST", "/v1/audio/transcriptions", form, Content_Type="multipart/form-data; boundary=b")
        assert [(r.method, r.target, r.body) for r in one.received] == [
            ("POST", "/v1/embeddings?x=1", body),
            ("POST", "/v1/audio/transcriptions", form),
        ]
        assert one.received[0].headers["x-request-id"] == "mine"
        assert one.received[1].headers["content-type"] == "multipart/form-data; boundary=b"
        assert other.received == []
        assert (await served.post("/v1/embeddings", {"model": "nope"}))[0] == 404
        assert (await served.post("/v1/embeddings", b"{"))[0] == 400
        as_form = {"Content_Type": "multipart/form-data; boundary=b"}
        for size in (16, 20_000):
            flood = b'name="model"\r\n' * size
            status, _, answer = await served.request("POST", "/v1/audio/transcriptions", flood, **as_form)
            assert (status, json.loads(answer)["error"]["param"]) == (400, "body")


async def test_another_path_moves_on_from_a_worker_that_cannot_be_reached() -> None:
    async with engine(says(b"{}")) as one, front(spec("w", one.url), spec("x", "http://127.0.0.1:1")) as served:
        for _ in range(8):
            assert (await served.post("/v1/embeddings", {"model": MODEL}))[0] == 200


async def test_another_path_comes_last_to_a_worker_that_is_left_out_and_comes_there() -> None:
    async with engine(says(b"{}")) as one, engine(says(b"{}")) as other:
        workers = [spec("w", one.url), spec("x", other.url), spec("y", other.url)]
        async with front(*workers) as served:
            for _ in range(MISSED_CHECKS):
                served.gateway.health.checked("default", "w", "no answer")
            for _ in range(8):
                assert (await served.post("/v1/embeddings", {"model": MODEL}))[0] == 200
            assert (len(one.received), len(other.received)) == (0, 8)
        async with front(spec("w", one.url), spec("x", "http://127.0.0.1:1")) as served:
            for _ in range(MISSED_CHECKS):
                served.gateway.health.checked("default", "w", "no answer")
            assert (await served.post("/v1/embeddings", {"model": MODEL}))[0] == 200


async def test_a_stream_of_another_path_is_passed_on_at_once_and_its_break_is_seen() -> None:
    first = b"event: speech.audio.delta\ndata: {}\n\n"
    async with engine(streams(first, then=breaks)) as one, front(spec("w", one.url)) as served:
        async with served.http.post(f"{served.url}/v1/audio/speech", json={"model": MODEL}) as response:
            assert await response.content.readexactly(len(first)) == first
            with pytest.raises(aiohttp.ClientError):
                await response.read()


async def test_another_path_goes_to_workers_that_answer_clients_only() -> None:
    async with engine(says(b"{}")) as prefill, engine(says(b"{}")) as decode, engine(says(b"{}")) as alone:
        apart = [spec("p", prefill.url, role=Role.PREFILL), spec("d", decode.url, role=Role.DECODE)]
        async with front(*apart, spec("a", alone.url)) as served:
            for path in ("/v1/audio/speech", "/v1/embeddings"):
                for _ in range(10):
                    assert (await served.post(path, {"model": MODEL}))[0] == 200
            assert (len(prefill.received), len(decode.received), len(alone.received)) == (0, 0, 20)
        async with front(*apart) as served:
            for _ in range(10):
                assert (await served.post("/tokenize", {"model": MODEL}))[0] == 200
            assert (len(prefill.received), len(decode.received)) == (0, 10)
        async with front(apart[0]) as served:
            assert (await served.post("/v1/audio/speech", {"model": MODEL}))[0] == 503
            assert prefill.received == []


# An engine that was stopped for a second has not fallen silent yet.
SHORT = replace(TIMEOUTS, first_output_seconds=1.5, idle_seconds=1.5, queue_seconds=1.5, answer_seconds=1.5)


@pytest.mark.parametrize("first", [b"event: speech.audio.delta\ndata: {}\n\n", b": ping\n\n"])
async def test_a_stream_of_another_path_that_falls_silent_is_broken_off(first: bytes) -> None:
    async with (
        engine(streams(first, then=hangs)) as one,
        front(spec("w", one.url), timeouts=SHORT) as served,
    ):
        body = {"model": MODEL, "stream": True}
        async with served.http.post(f"{served.url}/v1/audio/speech", json=body) as response:
            assert await response.content.readexactly(len(first)) == first
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await eventually(lambda: one.aborted == 1, what="the request given up at the engine")


async def test_comments_alone_do_not_keep_a_stream_of_another_path_open() -> None:
    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.05)

    async with engine(script) as one, front(spec("w", one.url), timeouts=SHORT) as served:
        body = {"model": MODEL, "stream": True}
        async with served.http.post(f"{served.url}/v1/audio/speech", json=body) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()


KEYS = TokenTable(
    {
        _digest("admin"): Identity(AccessRole.ADMIN, "*"),
        _digest("client"): Identity(AccessRole.CLIENT, "team"),
        _digest("viewer"): Identity(AccessRole.VIEWER, "team"),
    }
)


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/v1/load_lora_adapter", "/v1/../sleep", "/v1/%2e%2e/sleep", "/%73leep", "//sleep", "/v1/x/../../sleep",
     "/reset_prefix_cache", "/v1//sleep", "/v1/unload_lora_adapter", "/v1/chat/completions/%2e%2e/x", "/metrics/",
     "/v1/admin/x", "/v1/abort_requests", "/v1/nothing"],
)  # fmt: skip
async def test_what_is_for_operators_reaches_no_engine_with_a_clients_key(path: str) -> None:
    async with engine(says(b"{}")) as one, front(spec("w", one.url, tenant="team"), tokens=KEYS) as served:
        from yarl import URL

        async with served.http.post(URL(served.url + path, encoded=True), headers={"x-api-key": "client"}) as response:
            assert response.status in (403, 404, 405)
        assert one.received == []


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "get", "BREW"])
async def test_a_method_whose_body_an_engine_may_take_for_its_next_request_is_refused(method: str) -> None:
    hidden = b"GET /sleep HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"{method} /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(hidden)}\r\n"
    async with engine(says(b"{}")) as one, front(spec("w", one.url)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(f"{head}Content-Type: text/plain\r\n\r\n".encode() + hidden)
        assert (await reader.readline()).split()[1] == b"405"
        writer.close()
        await gateway.request("GET", "/v1/embeddings")
    assert [(received.method, received.target) for received in one.received] == [("GET", "/v1/embeddings")]


async def test_an_unknown_path_is_said_to_be_one_and_a_flag_opens_it() -> None:
    async with engine(says(b"{}")) as one:
        async with front(spec("w", one.url)) as served:
            status, _, answer = await served.post("/v1/videos", {"model": MODEL})
            error = json.loads(answer)["error"]
            assert (status, error["type"], error["code"]) == (404, "invalid_request_error", 404)
            assert "the gateway has no path /v1/videos" in error["message"]
            assert one.received == []
        async with front(spec("w", one.url), client_paths=ClientPaths(["/v1/videos"])) as served:
            assert (await served.post("/v1/videos", {"model": MODEL}))[0] == 200


async def test_a_slash_at_the_end_of_a_path_makes_no_difference() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
        assert (await served.post("/v1/chat/completions/", CHAT))[0] == 200
        assert (await served.post("/v1/embeddings/?a=b", CHAT))[0] == 200
        assert [r.target for r in one.received] == ["/v1/chat/completions", "/v1/embeddings?a=b"]
        assert (await served.request("GET", "/v1/models/"))[0] == 200
        assert (await served.request("GET", "/health/"))[0] == 200


async def test_a_models_name_may_have_its_slash_escaped() -> None:
    from yarl import URL

    async with front(spec("w", "http://127.0.0.1:1", model="org/m")) as served:
        for path in ("/v1/models/org/m", "/v1/models/org%2Fm", "/v1/models/org%2fm"):
            async with served.http.get(URL(served.url + path, encoded=True)) as response:
                assert (response.status, (await response.json())["id"]) == (200, "org/m"), path


async def test_what_is_for_operators_needs_a_key_that_says_so() -> None:
    async with engine(says(b"slept")) as one:
        async with front(spec("w", one.url)) as served:
            assert (await served.post("/sleep", b""))[0] == 403
        async with front(spec("w", one.url), tokens=KEYS) as served:
            assert (await served.post("/sleep", b"", X_Api_Key="client", X_Kvscout_Tenant="team"))[0] == 403
            assert (await served.post("/sleep", b"", X_Api_Key="admin"))[2] == b"slept"
        assert [received.target for received in one.received] == ["/sleep"]


async def test_a_tenant_at_its_limit_of_requests_is_told_so_and_others_are_served() -> None:
    async with (
        engine(streams(FIRST := delta("x"), then=hangs)) as one,
        front(spec("w", one.url, tenant="team"), spec("w", one.url, tenant="other")) as served,
    ):
        limits = served.gateway.registry.limits
        limits.set({"team": {Limit.REQUESTS: 1}})

        async def over() -> bool:
            return not limits.use[Limit.REQUESTS]()

        body = {**CHAT, "stream": True}
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            headers = {"X-Kvscout-Tenant": "team"}
            async with served.http.post(served.url + path, json=body, headers=headers) as running:
                assert await running.content.readexactly(len(FIRST)) == FIRST
                for other in ("/v1/chat/completions", "/v1/embeddings"):
                    status, told, answer = await served.post(other, body, **headers)
                    assert (status, told["retry-after"]) == (429, "1")
                    assert json.loads(answer)["error"]["param"] == "limits.requests"
                    assert "tenant 'team' has 1 requests, its limit is 1" in json.loads(answer)["error"]["message"]
                async with served.http.post(
                    served.url + path, json=body, headers={"X-Kvscout-Tenant": "other"}
                ) as theirs:
                    assert await theirs.content.readexactly(len(FIRST)) == FIRST
            await eventually(over, what="the end of both")


async def test_a_key_is_asked_for_and_is_its_tenants() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url, tenant="team"), tokens=KEYS) as served:
        for key, status in (("", 401), ("wrong", 401), ("viewer", 403), ("client", 200), ("admin", 404)):
            given = {"Authorization": f"Bearer {key}"} if key else {}
            assert (await served.post("/v1/chat/completions", CHAT, **given))[0] == status, key
        assert (await served.post("/v1/chat/completions", CHAT, X_Api_Key="admin", X_Kvscout_Tenant="team"))[0] == 200
        assert (await served.request("GET", "/v1/models", X_Api_Key="viewer"))[0] == 200
        assert (await served.request("GET", "/metrics", X_Api_Key="client"))[0] == 403
        assert (await served.request("GET", "/metrics", X_Api_Key="admin"))[0] == 200
        assert (await served.request("GET", "/health"))[0] == 200
        for received in one.received:
            assert "authorization" not in received.headers
            assert "x-api-key" not in received.headers


async def test_engines_are_shown_their_own_key_or_else_the_clients(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("engine-key\n")
    async with engine(says(ANSWER)) as one:
        async with front(spec("w", one.url), engine_key_file=tmp_path / "key") as served:
            await served.post("/v1/chat/completions", CHAT, Authorization="Bearer client")
            await served.post("/v1/embeddings", CHAT, Authorization="Bearer client")
        async with front(spec("w", one.url)) as served:
            await served.post("/v1/chat/completions", CHAT, Authorization="Bearer client")
    keys = [r.headers.get("authorization") for r in one.received if r.target != "/tokenize"]
    assert keys == ["Bearer engine-key", "Bearer engine-key", "Bearer client"]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_engines_say_of_the_clients_own_key_is_the_clients_to_know(status: int, stream: bool) -> None:
    said = b'{"error": {"message": "Unauthorized"}}'
    async with engine(says(said, status, WWW_Authenticate="Bearer")) as one, engine(says(said, status)) as two:
        workers = [spec("a", one.url), spec("b", two.url)]
        for limit in (0, 3):
            config: dict[str, Any] = {"tokenize_timeout_seconds": 0.0, "migration_limit": limit}
            async with front(*workers, **config) as served:
                for number in range(1, 6):
                    for path in ("/v1/chat/completions", "/v1/responses"):
                        body = CHAT | {"stream": stream}
                        answer = await served.post(path, body, Authorization="Bearer wrong")
                        assert (answer[0], answer[2]) == (status, said)
                    # Once each, and it is no worker's fault.
                    assert len(one.received) + len(two.received) == 2 * number
                assert served.gateway.health.warnings() == []
                assert {seen.failures for seen in served.gateway.observations.by_rank.values()} == {0}
            one.received.clear()
            two.received.clear()


async def test_what_engines_say_of_our_own_key_is_not(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("old")
    async with engine(says(b"{}", 401)) as one:
        async with front(spec("w", one.url), engine_key_file=tmp_path / "key", tokenize_timeout_seconds=0.0) as served:
            for path in ("/v1/chat/completions", "/v1/responses"):
                assert (await served.post(path, CHAT, Authorization="Bearer client"))[0] == 503


HALF = "\\ud800"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (f'{{"model": "{HALF}", "prompt": "x"}}', "model"),
        (f'{{"model": "{MODEL}", "prompt": "x", "cache_salt": "{HALF}"}}', "cache_salt"),
        (f'{{"model": "{MODEL}", "prompt": [1, 2], "cache_salt": "{HALF}"}}', "cache_salt"),
    ],
)
async def test_half_a_character_in_a_name_is_refused(body: str, param: str) -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
        status, _, answer = await served.post("/v1/completions", body.encode())
        assert (status, json.loads(answer)["error"]["param"]) == (400, param)


async def test_half_a_character_in_a_prompt_is_the_engines_to_judge(tmp_path: Path) -> None:
    from support.trained_tokenizers import byte_level, save

    save(tmp_path, byte_level())
    async with engine(says(ANSWER)) as one:
        async with front(spec("w", one.url), tokenizers={"": tmp_path}, session_affinity="user") as served:
            text = f'{{"model": "{MODEL}", "prompt": "a{HALF}", "user": "{HALF}", "{HALF}": 1}}'
            assert (await served.post("/v1/completions", text.encode()))[0] == 200
            text = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a{HALF}"}}]}}'
            assert (await served.post("/v1/chat/completions", text.encode()))[0] == 200


async def test_a_byte_order_mark_before_a_body_is_left_out() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
        body = json.dumps(CHAT).encode()
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await served.post(path, b"\xef\xbb\xbf" + body))[0] == 200
        assert [received.body for received in one.received] == [body, body]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_target_that_is_not_ascii_is_refused(transport: Transport) -> None:
    with made_of(transport):
        async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
            host, _, port = served.url.removeprefix("http://").partition(":")
            for target in (
                "/v1/embeddings?x=\u00e9",
                "/v1/models?x=\u00e9",
                "/v1/models/\u00e9",
                "/v1/completions?\u00e9",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                writer.write(head.encode())
                assert (await reader.readline()).split()[1] == b"400", target
                writer.close()
            assert one.received == []


async def test_a_prompt_that_no_cache_holds_is_refused_as_engines_and_openai_do(tmp_path: Path) -> None:
    from support.trained_tokenizers import byte_level, save

    save(tmp_path, byte_level())
    small = {"total_kv_blocks": 2, "block_size": 4}
    async with engine(says(ANSWER)) as one:
        async with front(spec("w", one.url, **small), tokenizers={"": tmp_path}) as served:
            text = "hello world " * 20
            for path, more in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("/v1/completions", {"prompt": text}),
                ("/v1/completions", {"prompt": list(range(9))}),
                ("/v1/completions", {"prompt": [list(range(9)), [1]]}),
            ):
                status, _, answer = await served.post(path, {"model": MODEL, **more})
                error = json.loads(answer)["error"]
                assert (status, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] in more
                assert "This model's maximum context length is 8 tokens. However, your request has" in error["message"]
            # Each of several prompts fits.
            assert (await served.post("/v1/completions", {"model": MODEL, "prompt": [[1, 2, 3]] * 5}))[0] == 200


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "output_tokens"),
    [
        ({"prompt": [1] * 8, "max_tokens": 10}, 8, 10),
        ({"prompt": [1] * 8, "max_tokens": 10, "n": 3}, 8, 30),
        ({"prompt": [1] * 8, "max_tokens": 10, "n": 2, "best_of": 5}, 8, 50),
        ({"prompt": [[1] * 8, [2] * 4, [3] * 100], "max_tokens": 10}, 112, 30),
        ({"prompt": [[1] * 8, [2] * 4], "max_tokens": 10, "n": 2}, 12, 40),
        ({"prompt": [1] * 8, "max_tokens": 2**31, "n": 2**31}, 8, 2**32 - 1),
        ({"prompt": [1] * 8, "max_tokens": 10, "n": "3"}, 8, 10),
    ],
)
async def test_all_prompts_and_outputs_of_a_request_are_booked(
    asked: dict[str, Any], prompt_tokens: int, output_tokens: int
) -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        requests = []
        place = served.gateway.routing.place

        async def noted(request: Request) -> Decision:
            requests.append(request)
            return await place(request)

        served.gateway.routing.place = noted  # type: ignore[method-assign]
        assert (await served.post("/v1/completions", {"model": MODEL, **asked}))[0] == 200
        (request,) = requests
        assert (request.prompt.isl_tokens, request.output.max_tokens) == (prompt_tokens, output_tokens)
        assert request.output.expected_tokens == 0
        assert len(request.prompt.token_ids) == 4 * 8  # the first one decides where they run


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_scheduler_is_told_what_is_known_of_an_output_and_again_when_it_is_booked_anew(streamed: bool) -> None:
    script = streams(delta("a"), USAGE, DONE) if streamed else says(ANSWER)
    async with engine(script) as one, front(spec("w", one.url, adapters=(Adapter("sql"),))) as served:
        asked: list[scheduler_pb2.SelectRequest] = []
        kept: list[scheduler_pb2.ReserveRequest] = []
        scheduler: Any = served.gateway.scheduler

        async def nobody(request: Request, overlaps: Overlaps, booking: Booking | None, **_: Any) -> Any:
            asked.append(scheduler_pb2.SelectRequest.FromString(select_request(request, overlaps, booking)))
            raise UpstreamDown("away")

        free = scheduler.free

        def freed(booking: Booking, output_tokens: int = 0) -> None:
            kept.append(booking.reserve_request())
            free(booking, output_tokens)

        scheduler.reserve, scheduler.free = nobody, freed
        body = {**CHAT, "model": "sql", "max_tokens": 4096, "tools": [{"type": "function"}], "stream": streamed}
        assert (await served.post("/v1/chat/completions", body, X_Session_Id="s"))[0] == 200
        for message in (asked[0], kept[0]):
            assert (message.expected_output_tokens, message.max_output_tokens) == (0, 4096)
            assert message.output_class == "chat/tools@sql"
            assert message.session == Sessions().named("default", "s").session_id
            assert message.estimate_prefill_complete is not streamed
        assert (asked[0].no_lineage, asked[0].overlaps_unknown) == (False, True)
        # Of a whole answer nobody has seen a first token.
        assert (kept[0].running, kept[0].prefill_complete) == (True, streamed)


PAGE = {"Origin": "https://evil.example", "Content_Type": "text/plain"}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_foreign_page_reaches_nothing_where_no_tokens_are(transport: Transport) -> None:
    with made_of(transport):
        async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
            change = {"model": MODEL, "active_decode_blocks_threshold": 0.0}
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/embeddings", CHAT), ("/busy_threshold", change)):
                status, headers, answer = await served.post(path, body, **PAGE)
                assert (status, json.loads(answer)["error"]["type"]) == (403, "permission_error")
                assert "access-control-allow-origin" not in headers
            for path in ("/v1/models", "/metrics", "/dashboard/events", "/"):
                assert (await served.request("GET", path, Origin="https://evil.example"))[0] == 403
                # By a name that was given the address of this machine.
                assert (await served.request("GET", path, Host="evil.example"))[0] == 403
            assert (await served.request("GET", "/health", Host="evil.example"))[0] == 200
            assert one.received == []
            ours = {"Origin": served.url}
            assert (await served.post("/v1/embeddings", CHAT, **ours))[0] == 200


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_page_that_is_allowed_is_answered_as_browsers_ask(transport: Transport) -> None:
    page = "https://chat.example.com"
    asked = {"Origin": page, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    with made_of(transport):
        async with engine(says(ANSWER, Access_Control_Allow_Origin="*")) as one:
            workers = [spec("w", one.url), spec("w", one.url, tenant="team")]
            async with front(*workers, tokens=KEYS, cors_origins=(page,), tokenize_timeout_seconds=0.0) as served:
                for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/models"):
                    status, headers, _ = await served.request("OPTIONS", path, None, **asked)
                    assert (status, headers["access-control-allow-origin"]) == (204, page)
                    assert headers["access-control-allow-headers"] == "authorization"
                # A stream is refused here: the engine answers with a document.
                for key, whole, streamed in (("client", 200, 503), ("wrong", 401, 401)):
                    for body, expected in ((CHAT, whole), (CHAT | {"stream": True}, streamed)):
                        given = {"Origin": page, "Authorization": f"Bearer {key}"}
                        status, headers, _ = await served.post("/v1/chat/completions", body, **given)
                        assert (status, headers["access-control-allow-origin"]) == (expected, page)
                        assert headers["vary"] == "Origin"
                foreign = {**asked, "Origin": "https://evil.example"}
                assert (await served.request("OPTIONS", "/v1/chat/completions", None, **foreign))[0] in (401, 405)
                given = {"Origin": "https://evil.example", "Authorization": "Bearer client"}
                _, headers, _ = await served.post("/v1/chat/completions", CHAT, **given)
                assert "access-control-allow-origin" not in headers


async def test_only_admins_are_told_addresses(caplog: pytest.LogCaptureFixture) -> None:
    tokens = TokenTable(
        {
            _digest("client"): Identity(AccessRole.CLIENT, "default"),
            _digest("admin"): Identity(AccessRole.ADMIN, "*"),
        }
    )
    gone = "http://127.0.0.1:1"
    async with front(spec("w", gone), tokens=tokens, tokenize_timeout_seconds=0.0) as served:
        for key, expected in (("client", False), ("admin", True)):
            for path in ("/v1/chat/completions", "/v1/embeddings", "/busy_threshold"):
                body = CHAT if path.startswith("/v1") else {"model": MODEL}
                status, headers, answer = await served.post(path, body, X_Api_Key=key)
                assert (status, b"127.0.0.1" in answer) == (503, expected), (path, answer)
                assert not any("127.0.0.1" in value for value in headers.values())
    for address in (gone, NOBODY):
        assert address in caplog.text


@pytest.mark.parametrize("then", [breaks, hangs])
async def test_how_a_stream_ended_names_no_address(then: Callable[[web.Request], Awaitable[None]]) -> None:
    async with (
        engine(streams(delta("a"), then=then)) as one,
        front(spec("w", one.url), timeouts=SHORT, tokenize_timeout_seconds=0.0) as served,
    ):
        _, headers, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert b"the worker" in answer
        assert b"127.0.0.1" not in answer
        assert headers["x-kvscout-degraded"] == "tokenizer; scheduler"


async def test_a_session_stays_with_its_worker_and_leaves_one_that_fails() -> None:
    async with engine(says(ANSWER)) as one, engine(says(ANSWER)) as two:
        workers = [spec("a", one.url), spec("b", two.url)]
        async with front(*workers, session_affinity="user", tokenize_timeout_seconds=0.0) as served:
            for user in ("u1", "u2", "u3", "u4", "u5", "u6"):
                for _ in range(3):
                    assert (await served.post("/v1/chat/completions", CHAT | {"user": user}))[0] == 200
            by_user = [{json.loads(r.body)["user"] for r in each.received} for each in (one, two)]
            assert not by_user[0] & by_user[1]
            assert all(by_user)
            one.script = says(b"", 503)
            for user in by_user[0]:
                assert (await served.post("/v1/chat/completions", CHAT | {"user": user}))[0] == 200


async def test_the_clients_request_id_is_the_engines_and_without_one_there_is_ours() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
        _, headers, _ = await served.post("/v1/chat/completions", CHAT, X_Request_Id="mine")
        assert headers["x-request-id"] == one.received[0].headers["x-request-id"] == "mine"
        _, headers, _ = await served.post("/v1/chat/completions", CHAT)
        assert headers["x-request-id"] == one.received[1].headers["x-request-id"]
        assert headers["x-request-id"].startswith("gen-")


async def test_the_rank_that_was_chosen_is_the_engines_whatever_the_client_says() -> None:
    async with (
        engine(says(ANSWER)) as one,
        front(spec("w", one.url, dp_size=2), tokenize_timeout_seconds=0.0) as served,
    ):
        for _ in range(2):
            await served.post("/v1/chat/completions", CHAT, X_data_parallel_rank="9")
        assert {r.headers["x-data-parallel-rank"] for r in one.received} == {"0", "1"}


TOPOLOGY = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1},
    "bootstrap_host": ["10.0.0.9"],
    "bootstrap_room": 5,
    "data_parallel_rank": 3,
    "routed_dp_rank": 3,
    "rid": ["a", "b"],
}
ROUTING_HEADERS = {
    "X-Prefiller-Host-Port": "10.0.0.9:1",
    "X-Encoder-Hosts-Ports": "10.0.0.9:1",
    "X-SMG-Routing-Key": "k",
    "X-Gateway-Destination-Endpoint": "10.0.0.9:1",
    "X-Data-Parallel-Rank": "3",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
async def test_where_a_request_runs_is_not_its_clients_to_say(path: str, kind: str) -> None:
    body = CHAT | TOPOLOGY | {"prompt": "hello", "vllm_xargs": {"kv_transfer_params": {"remote_host": "h"}, "x": 1}}
    async with engine(says(ANSWER)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
        headers = {"Content-Type": kind, **ROUTING_HEADERS}
        async with served.http.post(served.url + path, data=json.dumps(body), headers=headers) as response:
            assert response.status == 200
        (got,) = one.received
        assert json.loads(got.body) == CHAT | {"prompt": "hello", "vllm_xargs": {"x": 1}}
        assert not {name.lower() for name in ROUTING_HEADERS} & got.headers.keys()


async def test_what_hides_where_a_request_runs_is_refused() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="kv_transfer_params"\r\n\r\n{}\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    )
    wide = json.dumps(CHAT | TOPOLOGY).encode("utf-16")
    packed = gzip.compress(json.dumps(CHAT | TOPOLOGY).encode())
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        multipart = "multipart/form-data; boundary=b"
        assert (await served.request("POST", "/v1/audio/transcriptions", form, Content_Type=multipart))[0] == 400
        assert (await served.request("POST", "/v1/embeddings", wide, Content_Type="text/plain"))[0] == 400
        for path in ("/v1/embeddings", "/v1/chat/completions"):
            status, _, said = await served.request("POST", path, packed, Content_Encoding="gzip")
            assert (status, b"must not be compressed" in said) == (415, True), path
        assert one.received == []


async def test_a_priority_is_what_the_keys_entry_allows() -> None:
    keys = {"plain": 0, "urgent": 5}
    tokens = TokenTable({_digest(key): Identity(AccessRole.CLIENT, "default", "", most) for key, most in keys.items()})
    async with engine(says(ANSWER)) as one:
        async with front(spec("w", one.url), tokens=tokens, tokenize_timeout_seconds=0.0) as served:
            for path in ("/v1/chat/completions", "/v1/responses"):
                for key in keys:
                    for asked in (-9, 3):
                        assert (await served.post(path, CHAT | {"priority": asked}, X_Api_Key=key))[0] == 200
        async with front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
            assert (await served.post("/v1/responses", CHAT | {"priority": -9}))[0] == 200
    priorities = [json.loads(r.body).get("priority") for r in one.received]
    assert priorities == [None, None, -5, 3] * 2 + [-9]


async def test_a_gateway_that_drains_says_so() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        assert (await served.request("GET", "/ready"))[0] == 200
        served.gateway.leave()
        assert (await served.request("GET", "/ready"))[0] == 503
        assert (await served.request("GET", "/health"))[0] == 200
        assert (await served.post("/v1/chat/completions", CHAT))[0] == 200
        served.gateway.exchanges.draining = True
        one.received.clear()
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            status, headers, _ = await served.post(path, CHAT)
            assert (status, "retry-after" in headers) == (503, True)
        assert one.received == []


async def test_thresholds_without_a_scheduler_are_unavailable_and_bad_ones_refused_before() -> None:
    async with front() as served:
        assert (await served.request("GET", "/busy_threshold"))[0] == 503
        assert (await served.post("/busy_threshold", {"model": "m"}))[0] == 503
        for bad in (
            b"{}",
            b'{"model": "\\ud800"}',
            b'{"model": "m", "active_decode_blocks_threshold": 1e999}',
            b'{"model": "m", "active_prefill_tokens_threshold": 1e999}',
            b'{"model": "m", "active_decode_blocks_threshold": 1' + b"0" * 400 + b"}",
            b'{"model": "m", "active_prefill_tokens_threshold": -1}',
            b'{"model": "m", "active_prefill_tokens_threshold": 18446744073709551616}',
        ):
            assert (await served.post("/busy_threshold", bad))[0] == 400
        assert (await served.request("DELETE", "/busy_threshold"))[0] == 405


async def test_without_workers_every_path_says_that_there_are_none() -> None:
    async with front() as served:
        assert (await served.request("GET", "/v1/models"))[2] == b'{"object": "list", "data": []}'
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await served.post(path, CHAT))[0] in (404, 503)


async def test_tokens_come_from_the_engine_in_time_and_are_compared_with_ours(tmp_path: Path) -> None:
    from support.trained_tokenizers import byte_level, save

    theirs = byte_level().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n").ids

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"tokens": theirs})
        return web.json_response({"choices": [], "usage": {"prompt_tokens": len(theirs)}})

    async def compared(served: Any) -> Callable[[], Awaitable[bool]]:
        async def is_done() -> bool:
            return bool(served.sample("kvscout_token_parity_total", outcome="match") == 1.0)

        return is_done

    async with engine(script) as one:
        async with front(spec("w", one.url)) as served:
            await served.post("/v1/chat/completions", CHAT)
            assert [r.target for r in one.received] == ["/tokenize", "/v1/chat/completions"]
            assert _prompt_tokens(served) == len(theirs)
        one.received.clear()
        save(tmp_path, byte_level())
        async with front(spec("w", one.url), tokenizers={"": tmp_path}) as served:
            await served.post("/v1/chat/completions", CHAT)
            assert [r.target for r in one.received][:1] == ["/v1/chat/completions"]
            await eventually(await compared(served), what="the tokens compared")
            assert _prompt_tokens(served) == len(theirs)
            assert served.sample("kvscout_token_parity_total", outcome="length_match") == 1.0


def _prompt_tokens(served: Any) -> int:
    return sum(seen.prompt_tokens for seen in served.gateway.observations.by_rank.values())


async def test_many_requests_at_once_leave_nothing_behind() -> None:
    async with (
        engine(streams(delta("a", "stop"), USAGE, DONE)) as one,
        front(spec("w", one.url), spec("p", one.url, role=Role.PREFILL), tokenize_timeout_seconds=0.0) as served,
    ):
        answers = await asyncio.gather(
            *(served.post("/v1/chat/completions", CHAT | {"stream": n % 2 == 0}) for n in range(60))
        )
        assert {status for status, _, _ in answers} == {200}
        assert served.gateway.exchanges.in_flight == 0


MANY_VALUES = b'{"model":"m","messages":[' + b"[]," * 2_000_000 + b"0]}"


async def test_a_body_with_too_many_values_is_refused_on_every_path_and_the_bound_is_named() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            status, _, answer = await served.post(path, MANY_VALUES)
            error = json.loads(answer)["error"]
            assert (status, error["param"], "2000000 values" in error["message"]) == (400, "body", True)
        assert one.received == []


async def test_long_bodies_and_answers_are_scanned_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread, scanned = threading.get_ident(), set[tuple[bool, bool]]()
    scan = json_scan.scan_object

    def noted(data: bytes, *, strict: bool = True) -> json_scan.Scanned:
        scanned.add((len(data) > json_fields.INLINE_BYTES, threading.get_ident() == loop_thread))
        return scan(data, strict=strict)

    monkeypatch.setattr("kvscout_common.http.json_fields.scan_object", noted)
    filler = "x" * json_fields.INLINE_BYTES
    for long in (False, True):
        answer = json.dumps({"usage": {"prompt_tokens": 7}, "choices": [{"text": filler if long else ""}]}).encode()
        async with engine(says(answer)) as one, front(spec("w", one.url), tokenize_timeout_seconds=0.0) as served:
            for path, name in (("/v1/chat/completions", "x"), ("/v1/embeddings", "input")):
                status, _, came = await served.post(path, CHAT | {name: filler if long else ""})
                assert (status, came) == (200, answer)
    assert scanned == {(False, True), (True, False)}
