"""Shadow mode: what the balancer gets and what the client gets is as if nobody stood between, over both transports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from support.dialect_answers import SAMPLES, Sample, last_error
from support.http_peers import TRANSPORTS, made_of
from support.openai_stack import (
    CHAT,
    DONE,
    MODEL,
    Engine,
    Front,
    breaks,
    delta,
    engine,
    event,
    front,
    hangs,
    says,
    scheduler_of,
    spec,
    streams,
)
from support.processes import eventually
from yarl import URL

from kvscout_common.identity.identity import AccessRole, Identity, TokenTable, _digest
from kvscout_common.transport import Transport
from kvscout_gateway.fronts.shadow import score
from kvscout_gateway.fronts.shadow.config import ShadowConfig
from kvscout_gateway.values.booking import UNBOOKED_ATTEMPT, Booking
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.request import Request

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

USAGE = event({"id": "1", "choices": [], "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}})


@asynccontextmanager
async def shadowing(
    transport: Transport, balancer: Engine | str, tokens: TokenTable | None = None
) -> AsyncIterator[Front]:
    """A front in front of this balancer; no scheduler answers."""
    url = balancer if isinstance(balancer, str) else balancer.url
    workers = (spec("w0", "http://10.0.0.1:8000"), spec("w1", "http://10.0.0.2:8000"))
    with made_of(transport):
        async with front(*workers, tokens=tokens, shadow=ShadowConfig(url), tokenize_timeout_seconds=0.0) as one:
            yield one


def reasons(one: Front) -> dict[str, int]:
    """Why requests were not compared."""
    return {reason: count for _, span in one.gateway.shadow_report.totals() for reason, count in span.reasons().items()}


async def until_counted(one: Front, **expected: int) -> None:
    await eventually(lambda: asyncio.sleep(0, reasons(one) == expected), what=f"{expected}, there is {reasons(one)}")


async def test_a_request_goes_on_as_it_came_with_its_cookies_and_keys_and_comes_back_as_it_was_answered(
    transport: Transport,
) -> None:
    answer = b'{"choices": [], "odd": 1.0e3}'
    async with (
        engine(says(answer, Set_Cookie="route=a", X_Served_By="10.0.0.2:8000", Server="nginx")) as balancer,
        shadowing(transport, balancer) as one,
    ):
        body = json.dumps({**CHAT, "max_tokens": 3}, indent=3).encode()
        sent = {"Cookie": "route=a", "Authorization": "Bearer engine's", "X_Forwarded_For": "9.9.9.9"}
        status, headers, received = await one.post("/v1/chat/completions?beta=1", body, **sent)
        assert (status, received, headers["set-cookie"], headers["server"]) == (200, answer, "route=a", "nginx")
        (got,) = balancer.received
        assert (got.method, got.target, got.body) == ("POST", "/v1/chat/completions?beta=1", body)
        assert (got.headers["cookie"], got.headers["authorization"]) == ("route=a", "Bearer engine's")
        assert got.headers["x-forwarded-for"] == "9.9.9.9, 127.0.0.1"
        assert got.headers["x-forwarded-host"] == one.url.removeprefix("http://")
        await until_counted(one, tokens=1)
        assert one.gateway.exchanges.in_flight == 0


async def test_every_other_path_and_refusal_is_the_balancers_too(transport: Transport) -> None:
    async with engine(says(b"no", status=418)) as balancer, shadowing(transport, balancer) as one:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/v1/models/org%2Fm"),
            ("DELETE", "/v1/responses/x"),
            ("POST", "/tokenize"),
        ):
            status, _, body = await one.request(method, path, b"{}" if method == "POST" else None)
            assert (status, body) == (418, b"no"), path
        # What cannot be read here could say anything to an engine that can.
        for body in (b"{ no json", b'{"rid": 1, "rid": 1}'):
            assert (await one.post("/v1/completions", body))[0] == 400
        assert len(balancer.received) == 4
        assert reasons(one) == {}
        assert (await one.request("GET", "/health"))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/flush_cache", "/sleep", "/v1/load_lora_adapter", "/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep",
     "/v1/models/%252e%252e", "/v1/models/..%5c..%5csleep", "/v1/admin/x"],
)  # fmt: skip
async def test_what_is_for_operators_reaches_the_balancer_with_an_admins_key_only(
    transport: Transport, path: str
) -> None:
    keys = {"client": Identity(AccessRole.CLIENT, "default"), "admin": Identity(AccessRole.ADMIN, "*")}
    tokens = TokenTable({_digest(key): identity for key, identity in keys.items()})
    async with engine(says(b"done")) as balancer:
        for tokens_file, key, allowed in ((None, "", False), (tokens, "client", False), (tokens, "admin", True)):
            async with shadowing(transport, balancer, tokens=tokens_file) as one:
                named = {"x-api-key": key} if key else {}
                async with one.http.post(URL(one.url + path, encoded=True), headers=named) as response:
                    assert (response.status == 200) is allowed, (key, response.status)
        assert len(balancer.received) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_where_a_request_runs_is_not_its_clients_to_say(transport: Transport, path: str) -> None:
    async with engine(says(b"{}")) as balancer, shadowing(transport, balancer) as one:
        body = {**CHAT, "kv_transfer_params": {"remote_host": "h"}, "vllm_xargs": {"rid": 1, "x": 1}, "rid": ["a"]}
        headers = {"X_Prefiller_Host_Port": "h:1", "X_SMG_Routing_Key": "k", "X_Data_Parallel_Rank": "3"}
        assert (await one.post(path, body, **headers))[0] == 200
        (got,) = balancer.received
        assert json.loads(got.body) == {**CHAT, "vllm_xargs": {"x": 1}}
        assert not {name.lower().replace("_", "-") for name in headers} & got.headers.keys()


async def test_a_stream_is_asked_for_its_usage_and_the_client_does_not_see_it(transport: Transport) -> None:
    chunks = delta("a"), delta("b", "stop")
    async with engine(streams(*chunks, USAGE, DONE)) as balancer, shadowing(transport, balancer) as one:
        status, _, body = await one.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert (status, body) == (200, b"".join(chunks) + DONE)
        assert json.loads(balancer.received[0].body)["stream_options"] == {"include_usage": True}
        options = {"include_usage": True}
        _, _, body = await one.post("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": options})
        assert body == b"".join(chunks) + USAGE + DONE
        total = one.gateway.observations.total
        assert (total.prompt_tokens, total.cached_tokens) == (14, 6)
        assert one.sample("kvscout_ttft_seconds_count", tenant="default", model=MODEL) == 2


async def test_an_error_as_the_first_word_of_a_stream_reaches_the_client(transport: Transport) -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    async with engine(streams(event(error), DONE)) as balancer, shadowing(transport, balancer) as one:
        status, _, body = await one.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert status == 200
        assert json.loads(body.removeprefix(b"data: "))["error"]["message"] == "out of memory"
        await until_counted(one, failed=1)


async def test_a_balancer_that_is_not_there_is_503_and_one_that_breaks_off_breaks_off(transport: Transport) -> None:
    async with shadowing(transport, "http://127.0.0.1:1") as one:
        status, _, body = await one.post("/v1/chat/completions", CHAT)
        assert status == 503
        assert json.loads(body)["error"]["message"] == "the balancer does not answer"
        await until_counted(one, failed=1)
    async with engine(streams(delta("a"), then=breaks)) as balancer, shadowing(transport, balancer) as one:
        with pytest.raises(Exception, match=r"(?i)payload|transfer|disconnect|closed"):
            await one.post("/v1/chat/completions", {**CHAT, "stream": True})
        await until_counted(one, failed=1)
        assert one.gateway.exchanges.in_flight == 0


async def test_a_client_that_leaves_ends_its_request_at_the_balancer(transport: Transport) -> None:
    async with engine(streams(first := delta("a"), then=hangs)) as balancer, shadowing(transport, balancer) as one:
        async with one.http.post(f"{one.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert await response.content.readexactly(len(first)) == first
            response.close()
        await eventually(lambda: asyncio.sleep(0, balancer.aborted), what="the balancer is told")
        await until_counted(one, failed=1)


async def test_nothing_that_scores_holds_a_request_up(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "LATE_SECONDS", 0.1)

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 4}})

    async with engine(script) as balancer, shadowing(transport, balancer) as one:
        stuck = asyncio.Event()

        async def hangs_for_ever(*_: object) -> None:
            stuck.set()
            await asyncio.Event().wait()

        one.gateway.routing.place = hangs_for_ever  # type: ignore[method-assign,assignment]
        body = {"model": MODEL, "prompt": [1, 2, 3, 4]}
        assert (await one.post("/v1/completions", body))[0] == 200
        await stuck.wait()
        assert (await one.post("/v1/completions", body))[0] == 200
        await until_counted(one, late=2)


async def test_a_path_that_could_name_another_host_is_refused(transport: Transport) -> None:
    async with engine(says(b"{}")) as balancer, shadowing(transport, balancer) as one:
        host, port = one.url.removeprefix("http://").split(":")
        # The absolute form means this gateway, whatever host it names: "/" is its own page.
        for target in ("@evil.example/", "*", "http://evil.example/"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            line = (await reader.readline()).split()
            assert int(line[1]) in ((200, 404) if target.startswith("http") else (400, 404)), target
            writer.close()
        assert balancer.received == []


TEXT = event({"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": None}]})


def counted(output_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 4, "completion_tokens": output_tokens}


@pytest.mark.parametrize("streamed", [True, False])
async def test_only_a_stream_tells_when_a_prompt_was_computed_and_both_tell_how_long_the_output_was(
    transport: Transport, streamed: bool
) -> None:
    def held() -> list[Booking]:
        return [each for each in scheduler_of(one.gateway).bookings.in_flight() if each.worker.worker_id]

    async def until_booked(request: web.Request, body: bytes) -> web.StreamResponse:
        await eventually(lambda: asyncio.sleep(0, len(held()) == 1), what="a booking")
        kept.extend(held())
        if not streamed:
            return web.json_response({"choices": [], "usage": counted(5)})
        return await streams(TEXT, event({"choices": [], "usage": counted(5)}), DONE)(request, body)

    kept: list[Booking] = []
    async with engine(until_booked) as balancer, shadowing(transport, balancer) as one:
        body = {"model": MODEL, "prompt": [1, 2, 3, 4], "max_tokens": 4096, "stream": streamed}
        assert (await one.post("/v1/completions", body))[0] == 200
        await eventually(lambda: asyncio.sleep(0, not held()), what="its end")
        (booking,) = kept
        assert (booking.prefilled, booking.output.unseen) == (streamed, not streamed)
        assert (booking.output_tokens, booking.output.max_tokens) == (5, 4096)


async def test_what_is_placed_after_its_first_token_is_booked_as_what_runs(transport: Transport) -> None:
    goes_on, kept = asyncio.Event(), []

    async def until_rebooked(_: web.Request) -> None:
        await eventually(lambda: asyncio.sleep(0, any(each.prefilled for each in held())), what="a booking")
        kept.extend(held())

    def held() -> list[Booking]:
        return scheduler_of(one.gateway).bookings.in_flight()

    async with (
        engine(streams(TEXT, then=until_rebooked)) as balancer,
        shadowing(transport, balancer) as one,
    ):
        place = one.gateway.routing.place

        async def late(request: Request) -> Decision:
            await goes_on.wait()
            decision = await place(request)
            assert decision.booking is not None
            decision.booking.attempt_id &= ~UNBOOKED_ATTEMPT  # as if a scheduler had booked it
            return decision

        one.gateway.routing.place = late  # type: ignore[method-assign]
        body = {"model": MODEL, "prompt": [1, 2, 3, 4], "stream": True}
        async with one.http.post(f"{one.url}/v1/completions", json=body) as response:
            assert await response.content.readexactly(len(TEXT)) == TEXT
            goes_on.set()
            await response.read()
        (booking,) = kept
        assert booking.scheduler is None
        assert booking.attempt_id & UNBOOKED_ATTEMPT, "it is another attempt than that which is freed"
        assert booking.reserve_request().prefill_complete
        await eventually(lambda: asyncio.sleep(0, not held()), what="its end")


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_dialect_is_passed_on_and_its_usage_is_read(
    transport: Transport, sample: Sample, stream: bool
) -> None:
    answer = streams(*sample.preamble, *sample.outputs, *sample.end) if stream else says(sample.answer(stream=False))
    async with engine(answer) as balancer, shadowing(transport, balancer) as one:
        body = sample.body | {"stream": stream}
        if stream and sample.api.asks_for_usage:
            body["stream_options"] = {"include_usage": True}
        status, _, received = await one.post(sample.api.path, body)
        assert (status, received) == (200, sample.answer(stream=stream))
        assert json.loads(balancer.received[0].body) == body
        total = one.gateway.observations.total
        assert (total.prompt_tokens, total.cached_tokens) == (7, 4)
        await until_counted(one, tokens=1)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
async def test_an_error_before_any_output_is_an_event_of_its_dialect(transport: Transport, sample: Sample) -> None:
    failing = streams(*sample.preamble, sample.failure)
    async with engine(failing) as balancer, shadowing(transport, balancer) as one:
        _, _, body = await one.post(sample.api.path, sample.body | {"stream": True})
        assert last_error(sample, body)["error"]["message"] == "out of luck"
        await until_counted(one, failed=1)
