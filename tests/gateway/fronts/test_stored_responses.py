"""Workers of stored responses: as engines answered, or as they say when asked; bounded, and by tenant."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from support.dialect_answers import BY_NAME, error_of, named
from support.openai_stack import Engine, Front, Script, engine, front, hangs, spec, streams

from kvscout_common.worker import Role, WorkerSpec
from kvscout_gateway.fronts import stored_responses
from kvscout_gateway.fronts.stored_responses import named_by
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.request import Request

PATH, SAMPLE = "/v1/responses", BY_NAME["responses"]
QUIET: dict[str, Any] = {"tokenize_timeout_seconds": 0.0}


class Store:
    """An engine that keeps its responses, and knows nothing of others'."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[str, dict[str, Any]] = {}

    async def answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer as an engine does; see `Script`."""
        if request.method != "POST" or request.path.endswith("/cancel"):
            found = self.kept.get(request.path.split("/")[3])
            return web.json_response(found or {"error": {"message": "not found"}}, status=200 if found else 404)
        asked = json.loads(body)
        previous = asked.get("previous_response_id")
        if previous is not None and previous not in self.kept:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        made = SAMPLE.whole | {"id": f"resp_{self.name}{len(self.kept)}", "model": self.name}
        if asked.get("store", True):
            self.kept[made["id"]] = made
        if not asked.get("stream"):
            return web.json_response(made)
        created = named("response.created", response={"id": made["id"]})
        return await streams(created, *SAMPLE.outputs, *SAMPLE.end)(request, body)


async def made_by(served: Front, **fields: Any) -> str:
    """Return the name of a new response."""
    status, _, answer = await served.post(PATH, SAMPLE.body | fields)
    assert status == 200
    if fields.get("stream"):
        answer = answer.split(b"data: ")[1].split(b"\n")[0]
        return str(json.loads(answer)["response"]["id"])
    return str(json.loads(answer)["id"])


def workers(*engines: Engine) -> list[WorkerSpec]:
    return [spec(f"w{number}", one.url) for number, one in enumerate(engines)]


def searches(*engines: Engine) -> int:
    """Return how many times the engines were asked whether they have a response."""
    return sum(1 for one in engines for received in one.received if received.method == "GET")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_response_is_continued_where_it_is_stored_without_asking_anybody(stream: bool) -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            for _ in range(6):
                response_id = await made_by(served, stream=stream)
                for _ in range(2):
                    continued = await made_by(served, stream=stream, previous_response_id=response_id)
                    assert continued[:6] == response_id[:6]
            assert (one.received != [], two.received != [], searches(one, two)) == (True, True, 0)


def session_of(served: Front) -> list[int]:
    """Return a list to which the session of each request comes that is placed."""
    sessions: list[int] = []
    place = served.gateway.routing.place

    async def noted(request: Request) -> Decision:
        sessions.append(request.session.session_id)
        return await place(request)

    served.gateway.routing.place = noted  # type: ignore[method-assign]
    return sessions


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_continues_a_response_is_of_its_session(stream: bool) -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            sessions = session_of(served)
            response_id = await made_by(served, stream=stream, user="u")
            for _ in range(2):
                response_id = await made_by(served, stream=stream, previous_response_id=response_id)
            await made_by(served, stream=stream, previous_response_id=response_id, user="v")
            assert sessions[0] == sessions[1] == sessions[2] != 0
            assert sessions[3] not in (0, sessions[0])
        async with front(*workers(one, two), **QUIET) as served:  # a gateway that did not see how it began
            sessions = session_of(served)
            for _ in range(2):
                response_id = await made_by(served, stream=stream, previous_response_id=response_id)
            assert sessions[0] == sessions[1] != 0
        async with front(*workers(one, two), **QUIET, no_session_sources=("previous-response",)) as served:
            sessions = session_of(served)
            await made_by(served, stream=stream, previous_response_id=response_id)
            assert sessions == [0]


async def test_what_another_gateway_had_stored_is_found_by_asking_once() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            response_id = await made_by(served)
        async with front(*workers(one, two), **QUIET) as served:
            for _ in range(3):
                assert (await made_by(served, previous_response_id=response_id))[:6] == response_id[:6]
            assert searches(one, two) == 2


async def test_stored_responses_are_read_cancelled_and_deleted_where_they_are() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            for _ in range(4):
                response_id = await made_by(served)
                for method, below in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
                    status, _, answer = await served.request(method, f"{PATH}/{response_id}{below}?limit=1")
                    assert (status, json.loads(answer)["id"]) == (200, response_id)
            assert one.received[-1].target.endswith("?limit=1")


async def test_a_response_that_nobody_has_is_said_to_be_nowhere() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            for answered in (
                await served.post(PATH, SAMPLE.body | {"previous_response_id": "resp_x"}),
                await served.request("GET", f"{PATH}/resp_x"),
            ):
                document = json.loads(answered[2])
                assert (answered[0], document["error"]["code"]) == (404, "previous_response_not_found")
                assert "send the conversation itself" in error_of(SAMPLE, document)[1]
            assert served.gateway.front_context.exchanges.in_flight == 0


async def test_a_response_of_a_worker_that_is_gone_is_gone() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two, engine(Store("c").answer) as three:
        async with front(*workers(one, two, three), **QUIET) as served:
            response_id = await made_by(served)
            [at] = [number for number, each in enumerate((one, two, three)) if each.received]
            served.gateway.registry.remove("default", f"w{at}")
            status, _, answer = await served.post(PATH, SAMPLE.body | {"previous_response_id": response_id})
            assert (status, json.loads(answer)["error"]["param"]) == (404, "previous_response_id")


async def test_a_response_of_a_worker_that_does_not_answer_may_come_back() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        dead = spec("dead", "http://127.0.0.1:1")
        async with front(*workers(one, two), dead, **QUIET) as served:
            status, headers, answer = await served.post(PATH, SAMPLE.body | {"previous_response_id": "resp_x"})
            assert (status, headers["retry-after"]) == (503, "1")
            assert "cannot be reached" in error_of(SAMPLE, json.loads(answer))[1]
            served.gateway.front_context.stored.learn("default", "resp_y", "dead")
            status, _, _ = await served.post(PATH, SAMPLE.body | {"previous_response_id": "resp_y"})
            assert status == 503
            assert searches(one, two) == 2


async def test_the_only_worker_says_itself_what_it_has() -> None:
    async with engine(Store("a").answer) as one, front(spec("w", one.url), **QUIET) as served:
        status, _, answer = await served.post(PATH, SAMPLE.body | {"previous_response_id": "resp_x"})
        assert (status, json.loads(answer)) == (404, {"error": {"message": "not found"}})
        assert searches(one) == 0


@pytest.mark.parametrize("previous", [7, ["resp_x"], "", "../sleep", "resp x", "r" * 300, {"id": "resp_x"}, None])
async def test_what_is_no_name_is_the_engines_to_refuse(previous: Any) -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            await served.post(PATH, SAMPLE.body | {"previous_response_id": previous})
            assert (len(one.received) + len(two.received) > 0, searches(one, two)) == (True, 0)


async def test_what_the_client_does_not_want_stored_is_not_remembered() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            await made_by(served, store=False)
            assert len(served.gateway.front_context.stored) == 0
            await made_by(served)
            assert len(served.gateway.front_context.stored) == 1


async def test_a_tenant_finds_no_response_of_another_ones() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two, engine(Store("c").answer) as other:
        others = [spec("x", other.url, tenant="other"), spec("y", "http://127.0.0.1:1", tenant="other")]
        async with front(*workers(one, two), *others, **QUIET) as served:
            response_id = await made_by(served)
            status, _, _ = await served.request("GET", f"{PATH}/{response_id}", x_kvscout_tenant="other")
            assert status == 503
            assert searches(one, two) == 0
            assert searches(other) == 1


async def test_prefill_workers_are_not_asked() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two, engine(Store("p").answer) as prefill:
        async with front(*workers(one, two), spec("p", prefill.url, role=Role.PREFILL), **QUIET) as served:
            assert (await served.request("GET", f"{PATH}/resp_x"))[0] == 404
            assert prefill.received == []


async def test_searches_have_an_end_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_SEARCHES", 1)
    begun = asyncio.Event()

    async def silent(request: web.Request, _: bytes) -> web.StreamResponse:
        begun.set()
        await hangs(request)
        raise AssertionError

    quiet: Script = silent
    async with engine(quiet) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            first = asyncio.create_task(served.request("GET", f"{PATH}/resp_x"))
            await asyncio.wait_for(begun.wait(), 20)
            assert (await served.request("GET", f"{PATH}/resp_y"))[0] == 429
            assert (await first)[0] == 503
            assert (await served.request("GET", f"{PATH}/resp_b"))[0] == 503


async def test_many_that_name_the_same_response_at_once_share_a_search() -> None:
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            response_id = await made_by(served)
        one.received.clear()
        two.received.clear()
        async with front(*workers(one, two), **QUIET) as served:
            body = SAMPLE.body | {"previous_response_id": response_id}
            answers = await asyncio.gather(*(served.post(PATH, body) for _ in range(2 * stored_responses.MAX_SEARCHES)))
            assert {status for status, _, _ in answers} == {200}
            assert searches(one, two) == 2


async def test_a_client_that_leaves_a_search_ends_it_for_nobody() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    store = Store("a")
    store.kept["resp_x"] = SAMPLE.whole

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        begun.set()
        await go_on.wait()
        return await store.answer(request, body)

    async with engine(slow) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            stored = served.gateway.front_context.stored
            named = named_by("default", "GET", f"{PATH}/resp_x")
            assert named is not None
            leaves, stays = (asyncio.create_task(stored.worker_of(named)) for _ in range(2))
            await asyncio.wait_for(begun.wait(), 20)
            leaves.cancel()
            go_on.set()
            assert (await stays).worker_id == "w0"
            assert searches(one) == 1


async def test_what_is_remembered_is_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 2)
    now = 0.0
    async with engine(Store("a").answer) as one, engine(Store("b").answer) as two:
        async with front(*workers(one, two), **QUIET) as served:
            stored = served.gateway.front_context.stored
            stored._clock = lambda: now
            for number in range(3):
                stored.learn("default", f"resp_{number}", "w0")
            stored.learn("default", "", "w0")
            stored.learn("default", "a b", "w0")
            assert len(stored) == 2
            assert (await served.request("GET", f"{PATH}/resp_2"))[0] == 404
            assert searches(two) == 0
            now = stored_responses.KEPT_SECONDS
            assert (await served.request("GET", f"{PATH}/resp_2"))[0] == 404
            assert searches(two) == 1


@pytest.mark.parametrize(
    ("method", "path", "response_id"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("DELETE", "/v1/responses/resp_1", "resp_1"),
        ("POST", "/v1/responses/resp_1/cancel", "resp_1"),
        ("GET", "/v1/responses/resp_1/input_items", "resp_1"),
        ("POST", "/v1/responses/resp_1", None),
        ("POST", "/v1/responses/input_tokens", None),
        ("GET", "/v1/responses/input_tokens", None),
        ("GET", "/v1/responses", None),
        ("GET", "/v1/responses/a/b", None),
        ("GET", "/v1/responses/..", None),
    ],
)
def test_paths_name_responses(method: str, path: str, response_id: str | None) -> None:
    named = named_by("t", method, path)
    assert (named.response_id if named is not None else None) == response_id
