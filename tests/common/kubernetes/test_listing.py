"""One collection of the API, followed through everything that goes wrong with an API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from support.kubernetes_api import PODS, FakeApi, fake_api, pod, refusal
from support.processes import eventually

from kvscout_common.kubernetes import listing
from kvscout_common.kubernetes.access import KubernetesAccess
from kvscout_common.kubernetes.listing import ListWatch, api_session
from kvscout_common.kubernetes.objects import Pod

VLLM = {"labelSelector": "app=vllm"}


class Follower:
    """A list-and-watch, and how often it said that something changed."""

    def __init__(self, api: FakeApi) -> None:
        self.changes = 0
        self.keys: list[str] = []
        """Of the objects that changed, one after the other."""
        self.list = ListWatch(KubernetesAccess(api.url, "default", "secret"), PODS, VLLM, Pod.read, self._count)

    def _count(self, keys: Collection[str]) -> None:
        self.changes += 1
        self.keys += keys

    async def names(self, *expected: str) -> None:
        async def known() -> bool:
            return sorted(self.list.objects) == [f"default/{name}" for name in expected]

        await eventually(known, deadline_seconds=20, what=f"{expected}, {self.list.problem}")

    async def problem(self, words: str) -> None:
        async def told() -> bool:
            return words in self.list.problem

        await eventually(told, deadline_seconds=20, what=f"{words!r} in {self.list.problem!r}")

    async def well(self) -> None:
        await eventually(lambda: not self.list.problem, deadline_seconds=20)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(listing, "LAST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(listing, "CONNECT_SECONDS", 0.5)


@asynccontextmanager
async def following(*names: str) -> AsyncIterator[tuple[FakeApi, Follower]]:
    async with fake_api() as api, api_session() as http:
        api.token = "secret"
        await api.put(PODS, *(pod(name, "10.0.0.1") for name in names))
        follower = Follower(api)
        task = asyncio.create_task(follower.list.run(http))
        try:
            yield api, follower
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_what_changes_is_known_without_another_list() -> None:
    async with following("a") as (api, follower):
        await follower.names("a")
        await api.put(PODS, pod("b", "10.0.0.2"), pod("other", "10.0.0.3", labels={"app": "x"}))
        await follower.names("a", "b")
        await api.put(PODS, pod("b", "10.0.0.2", labels={"app": "x"}))
        await follower.names("a")
        await api.delete(PODS, "a")
        await follower.names()
        assert (api.lists, api.watches) == (1, 1)
        assert follower.list.listed and not follower.list.problem


async def test_a_change_of_what_is_not_read_wakes_nobody() -> None:
    async with following("a") as (api, follower):
        await follower.names("a")
        before = follower.changes
        touched = pod("a", "10.0.0.1")
        touched["metadata"]["annotations"]["somebody.else/heartbeat"] = "7"
        await api.put(PODS, touched, pod("b", "10.0.0.2"))
        await follower.names("a", "b")
        assert follower.changes == before + 1


async def test_long_lists_come_in_pages() -> None:
    async with fake_api() as api, api_session() as http:
        api.page = 2
        await api.put(PODS, *(pod(name, "10.0.0.1") for name in "abcde"))
        follower = Follower(api)
        task = asyncio.create_task(follower.list.run(http))
        await follower.names(*"abcde")
        assert api.lists == 3
        task.cancel()


async def test_a_killed_api_server_costs_nothing_that_was_known_and_is_followed_again() -> None:
    async with following("a") as (api, follower):
        await follower.names("a")
        await api.kill()
        await follower.problem("does not answer")
        assert list(follower.list.objects) == ["default/a"]
        await api.start()
        await api.put(PODS, pod("b", "10.0.0.2"))
        await follower.names("a", "b")
        await follower.well()
        assert api.lists == 1, "the watch went on from where it was"


async def test_an_expired_watch_begins_anew_with_a_list() -> None:
    async with following("a", "b") as (api, follower):
        await follower.names("a", "b")
        await api.kill()
        await api.delete(PODS, "b")
        await api.expire()
        await api.start()
        await follower.names("a")
        assert api.lists == 2
        await api.expire()  # under a watch that runs
        await api.put(PODS, pod("c", "10.0.0.3"))
        await follower.names("a", "c")


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "401, Unauthorized"), (403, "403, pods is forbidden"), (429, "429"), (503, "503"), (410, "")],
)
async def test_a_refusal_is_said_and_asked_again(status: int, words: str) -> None:
    async with following("a") as (api, follower):
        await follower.names("a")
        left = 3

        async def refuse(request: web.Request) -> web.StreamResponse:
            nonlocal left
            left -= 1
            if not left:
                api.override = None
            message = {403: "pods is forbidden", 401: "Unauthorized"}.get(status, "later")
            return refusal(status, message, Retry_After="0.05")

        api.override = refuse
        await api.kill()
        await api.start()
        if words:
            await follower.problem(words)
        await api.put(PODS, pod("b", "10.0.0.2"))
        await follower.names("a", "b")
        await follower.well()


async def test_retry_after_is_waited_for_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("asyncio.sleep", noted)
    texts = ["7", "1e9", "inf", "nan", "-3", "Sun, 22 Nov 2026 08:00:00 GMT"]
    async with following("a") as (api, follower):

        async def refuse(request: web.Request) -> web.StreamResponse:
            text = texts.pop(0)
            if not texts:
                api.override = None
            return refusal(429, "slow down", Retry_After=text)

        api.override = refuse
        await follower.names("a")
    assert [seconds for seconds in slept if seconds > 1] == [7, 60, 60]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "not a JSON object"),
        (b"[" * 100_000, "lists and objects within one another"),
        (b"[]", "no object"),
        (b'{"items": 7, "metadata": {"resourceVersion": "1"}}', "no list"),
        (b'{"items": [], "metadata": {}}', "no list"),
        (b'{"items": [' + b"[]," * 200_000 + b"0]}", "more than 200000 values"),
        (b'{"items": [], "metadata": {"resourceVersion": "1", "continue": "x"}}', "more than 5,000 objects"),
    ],
)
async def test_a_hostile_list_is_refused(body: bytes, words: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async with following("a") as (api, follower):
        await follower.names("a")
        api.override = answer
        await api.kill()
        await api.expire()
        await api.start()
        follower.list._version = ""
        await follower.problem(words)
        assert list(follower.list.objects) == ["default/a"], "what was known stays"
        api.override = None
        await follower.well()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b"x" * 5_000_000, "more than 4,194,304 bytes"),
        (b"not json\n", "not a JSON object"),
        (b'{"type": "ADDED"}\n', "without an object"),
        (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is gone"}}\n', "etcd is gone"),
    ],
)
async def test_a_hostile_watch_is_ended(lines: bytes, words: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            api.override = None
            return await api._list(request)
        return web.Response(body=lines)

    async with following("a") as (api, follower):
        await follower.names("a")
        api.override = answer
        await api.kill()
        await api.start()
        await follower.problem(words)
        api.override = None
        await api.put(PODS, pod("b", "10.0.0.2"))
        await follower.names("a", "b")


async def test_pages_that_are_too_large_are_asked_for_in_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_OBJECTS", 8)
    monkeypatch.setattr(listing, "MAX_PAGE_BYTES", 10_000)
    names = [f"p{number}" for number in range(8)]
    async with fake_api() as api, api_session() as http:
        heavy = {"somebody.else/manifest": "x" * 3_000}
        await api.put(PODS, *(pod(name, "10.0.0.1", annotations=heavy) for name in names))
        follower = Follower(api)
        task = asyncio.create_task(follower.list.run(http))
        await follower.names(*names)
        assert [query["limit"] for _, query in api.asked if "limit" in query] == ["8", "4", "2", "2", "2", "2"]
        task.cancel()


async def test_a_page_that_does_not_end_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_PAGE_BYTES", 100_000)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(ConnectionError):
            while True:
                await response.write(b"[" * 10_000)
        return response

    async with fake_api() as api, api_session() as http:
        api.override = endless
        follower = Follower(api)
        task = asyncio.create_task(follower.list.run(http))
        await follower.problem("more than 100,000 bytes")
        task.cancel()


async def test_a_server_that_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LIST_SECONDS", 0.1)
    monkeypatch.setattr(listing, "WATCH_SECONDS", 0)
    monkeypatch.setattr(listing, "WATCH_GRACE_SECONDS", 0.1)
    hung = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await hung.wait()
        return web.Response()

    async with following("a") as (api, follower):
        api.override = hang
        await follower.problem("does not answer")
        api.override = None
        await follower.names("a")
        hung.set()


async def test_watches_that_end_at_once_are_not_asked_for_without_pause() -> None:
    async def ends(request: web.Request) -> web.StreamResponse:
        return web.Response() if "watch" in request.query else await api._list(request)

    async with following("a") as (api, follower):
        api.override = ends
        await follower.names("a")
        began, at = asyncio.get_running_loop().time(), api.watches
        await eventually(lambda: api.watches - at >= 10)
        assert asyncio.get_running_loop().time() - began > 9 * 0.05 * 0.5 / 2


async def test_what_cannot_be_read_is_left_out_and_named() -> None:
    async with following("a") as (api, follower):
        broken = pod("broken", "10.0.0.300")
        await api.put(PODS, broken, pod("c", "10.0.0.3"))
        await follower.names("a", "c")
        assert "broken: status.podIP" in follower.list.unreadable


async def test_more_objects_than_are_followed_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following("a", "b") as (api, follower):
        await follower.names("a", "b")
        monkeypatch.setattr(listing, "MAX_OBJECTS", 2)
        await api.put(PODS, pod("c", "10.0.0.3"))
        await eventually(lambda: "default/c: left out" in follower.list.unreadable)
        await follower.names("a", "b")


async def test_a_redirect_is_not_followed_with_the_token() -> None:
    seen: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with fake_api() as api, api_session() as http:
        api.override = elsewhere
        follower = Follower(api)
        task = asyncio.create_task(follower.list.run(http))
        await follower.problem("answers 302")
        assert set(seen) == {PODS}
        task.cancel()
