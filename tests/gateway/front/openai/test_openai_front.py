"""The OpenAI front over real connections: bodies and answers unharmed, failures moved, told or passed on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai_stack import CHAT, DONE, MODEL, USAGE, breaks, delta, engine, event, front, hangs, says, spec, streams
from processes import eventually

from kvscout_common.identity import AccessRole, Identity, TokenTable, _digest
from kvscout_common.tenant_limits import Limit
from kvscout_common.worker import Adapter, Role
from kvscout_gateway.engines.health import MISSED_CHECKS

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
        [received] = [one for one in one.received if one.target != "/tokenize"]
        assert (received.body, received.target) == (body, "/v1/chat/completions?a=b%20c")
        assert received.headers["traceparent"] == "00-1"
        assert received.headers["content-type"] == "application/json"


async def test_a_stream_is_passed_on_as_it_came_and_its_usage_where_it_was_asked_for() -> None:
    pieces = [delta("a"), b": ping\n\n", delta("b", "stop"), USAGE, DONE]
    async with engine(streams(*pieces)) as one, front(spec("w", one.url)) as served:
        asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        _, headers, answer = await served.post("/v1/chat/completions", asked)
        assert answer == b"".join(pieces)
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        _, _, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})
        assert answer == b"".join([*pieces[:3], DONE])
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


async def test_an_unknown_model_is_not_found_and_a_wrong_method_is_said() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"model": "nope"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        assert (await served.request("GET", "/v1/completions"))[0] == 405
        assert one.received == []


async def test_a_body_beyond_the_limit_is_refused_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvscout_common.config import ServerConfig

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

                async def arrived() -> bool:
                    return bool(one.received)

                await eventually(arrived, what="the request at its engine")
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

        async def over() -> bool:
            return served.gateway.exchanges.in_flight == 0

        await eventually(over, what="the request over")
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
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + MODEL.encode() + b"\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n--b--\r\n'
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
    first = b"event: response.created\ndata: {}\n\n"
    async with engine(streams(first, then=breaks)) as one, front(spec("w", one.url)) as served:
        async with served.http.post(f"{served.url}/v1/responses", json={"model": MODEL}) as response:
            assert await response.content.readexactly(len(first)) == first
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
     "/reset_prefix_cache", "/v1//sleep", "/v1/unload_lora_adapter", "/v1/chat/completions/%2e%2e/x", "/metrics/"],
)  # fmt: skip
async def test_what_is_for_operators_reaches_no_engine_with_a_clients_key(path: str) -> None:
    async with engine(says(b"{}")) as one, front(spec("w", one.url, tenant="team"), tokens=KEYS) as served:
        from yarl import URL

        async with served.http.post(URL(served.url + path, encoded=True), headers={"x-api-key": "client"}) as response:
            assert response.status == 403
        assert one.received == []


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


async def test_a_gateway_that_drains_says_so() -> None:
    async with engine(says(ANSWER)) as one, front(spec("w", one.url)) as served:
        assert (await served.request("GET", "/ready"))[0] == 200
        served.gateway.exchanges.draining = True
        assert (await served.request("GET", "/ready"))[0] == 503
        assert (await served.request("GET", "/health"))[0] == 200
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            status, headers, _ = await served.post(path, CHAT)
            assert (status, "retry-after" in headers) == (503, True)
        assert one.received == []


async def test_thresholds_without_a_scheduler_are_unavailable_and_bad_ones_refused_before() -> None:
    async with front() as served:
        assert (await served.request("GET", "/busy_threshold"))[0] == 503
        assert (await served.post("/busy_threshold", {"model": "m"}))[0] == 503
        assert (await served.post("/busy_threshold", {}))[0] == 400
        assert (await served.request("DELETE", "/busy_threshold"))[0] == 405


async def test_without_workers_every_path_says_that_there_are_none() -> None:
    async with front() as served:
        assert (await served.request("GET", "/v1/models"))[2] == b'{"object": "list", "data": []}'
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await served.post(path, CHAT))[0] in (404, 503)


async def test_tokens_come_from_the_engine_in_time_and_are_compared_with_ours(tmp_path: Path) -> None:
    from trained_tokenizers import byte_level, save

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
