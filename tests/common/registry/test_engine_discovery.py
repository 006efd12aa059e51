"""Engines are asked for what registrations leave open: what they answer, and when they do not."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from support.mocker_process import running_mocker
from support.processes import eventually
from support.tcp_server import tcp_server
from support.web_servers import web_server

from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import INLINE_BYTES, MAX_PAGE_BYTES
from kvscout_common.http.factory import http_client
from kvscout_common.http.json_scan import load_json
from kvscout_common.registry.engine_discovery import Discovery
from kvscout_common.registry.engine_facts import EngineFacts, lacks_event_endpoints
from kvscout_common.registry.engine_query import MAX_MODELS, query_engine
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.rpc.service_info import shown
from kvscout_common.worker import EngineKind, EventEndpoint, Transport, WorkerSpec

MODELS = {"data": [{"id": "poet", "parent": "m"}, {"id": "m"}]}
METRICS = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1.0\n'


@asynccontextmanager
async def engine(pages: dict[str, Any]) -> AsyncIterator[str]:
    """An engine that answers with pages: text, JSON, a status code or what a function makes; what it has not is 404."""

    async def answer(request: web.Request) -> web.StreamResponse:
        page = pages.get(request.path, 404)
        if callable(page):
            made: web.StreamResponse = await page(request)
            return made
        if isinstance(page, int):
            return web.Response(status=page)
        return web.Response(text=page) if isinstance(page, str) else web.json_response(page)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    async with web_server(app) as url:
        yield url


async def ask(url: str, kind: EngineKind = EngineKind.VLLM) -> EngineFacts:
    async with http_client() as http:
        return await query_engine(http, url, kind)


async def test_vllm_tells_its_sources_models_and_cache() -> None:
    sources = {
        "1": {"publisher": "zmq", "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://10.0.0.9:5658", "topic": "kv"},
        "0": {"publisher": "zmq", "endpoint": "tcp://0.0.0.0:5557", "replay_endpoint": None, "topic": ""},
        "2": {"publisher": "null", "endpoint": "tcp://*:5559"},
    }
    metrics = "# HELP x\n" + METRICS % (0, 500) + METRICS % (1, 400)
    pages = {"/v1/models": MODELS, "/kv_event_sources": sources, "/metrics": metrics}
    async with engine(pages) as url:
        facts = await ask(url)
    assert facts == EngineFacts(
        url,
        (
            EventEndpoint(0, "tcp://127.0.0.1:5557"),
            EventEndpoint(1, "tcp://127.0.0.1:5558", "tcp://10.0.0.9:5658", "kv"),
        ),
        ("m", "poet"),
        16,
        399,
    )


async def test_vllms_list_form_and_sglangs_server_info_say_the_same() -> None:
    listed = [{"data_parallel_rank": 1, "endpoint": "tcp://[::]:5558", "topic": ""}]
    async with engine({"/v1/models": MODELS, "/kv_event_sources": listed}) as url:
        assert (await ask(url)).event_endpoints == (EventEndpoint(1, "tcp://127.0.0.1:5558"),)
    events = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "t",
        "block_size": 64,
        "dp_size": 2,
    }
    async with engine({"/v1/models": MODELS, "/server_info": {"kv_events": events}}) as url:
        facts = await ask(url, EngineKind.SGLANG)
    assert (facts.block_size, facts.total_kv_blocks) == (64, 0)
    assert facts.event_endpoints == (
        EventEndpoint(0, "tcp://127.0.0.1:5557", "", "t"),
        EventEndpoint(1, "tcp://127.0.0.1:5558", "", "t"),
    )


async def test_a_real_sglang_tells_its_sources_and_the_size_of_its_cache() -> None:
    server_info = {  # of SGLang 0.5.23, shortened
        "page_size": 16,
        "dp_size": 1,
        "max_total_num_tokens": 2048,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5717,
            "topic": "kv-events",
            "block_size": 16,
            "dp_size": 1,
            "replay_endpoint_port_base": 5817,
        },
    }
    async with engine({"/v1/models": MODELS, "/server_info": server_info}) as url:
        facts = await ask(url, EngineKind.SGLANG)
    assert (facts.block_size, facts.total_kv_blocks) == (16, 128)
    assert facts.event_endpoints == (EventEndpoint(0, "tcp://127.0.0.1:5717", "tcp://127.0.0.1:5817", "kv-events"),)


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
@pytest.mark.parametrize(
    "junk",
    [
        [],
        [3],
        {"0": 3},
        {"x": {"endpoint": "tcp://*:1"}},
        {"0": {"endpoint": 5}},
        {"0": {"endpoint": "tcp://*"}},
        {"9" * 5000: {"endpoint": "tcp://*:1"}, str(2**32): {"endpoint": "tcp://*:1"}},
        [{"data_parallel_rank": 2**32, "endpoint": "tcp://*:1"}, {"data_parallel_rank": "-1", "endpoint": "tcp://*:1"}],
        [
            {"data_parallel_rank": True, "endpoint": "tcp://*:1"},
            {"data_parallel_rank": "\ud800", "endpoint": "tcp://*:1"},
        ],
        {"0": {"endpoint": "tcp://\ud800:1"}, "1": {"endpoint": "tcp://*:99999"}, "2": {"endpoint": "tcp://a b:1"}},
        {
            "0": {"endpoint": "tcp://" + "h" * 10_000 + ":1"},
            "1": {"endpoint": "ipc://"},
            "2": {"endpoint": "inproc://x"},
        },
        {"kv_events": []},
        {"kv_events": {"publisher": "zmq", "endpoint_port_base": "many", "dp_size": -1, "block_size": 1e9}},
    ],
)
async def test_what_is_not_understood_stays_unknown(junk: Any, kind: EngineKind) -> None:
    metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="7"} 1\nvllm:cache_config_info{'
    pages = {"/v1/models": MODELS, "/kv_event_sources": junk, "/server_info": junk, "/metrics": metrics}
    async with engine(pages) as url:
        facts = await ask(url, kind)
    assert (facts.event_endpoints, facts.block_size, facts.total_kv_blocks) == ((), 0, 0)


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/v1/models": {"data": []}},
        {"/v1/models": 503},
        {"/v1/models": "no json"},
        {"/v1/models": {"data": 3}},
        {"/v1/models": {"data": [{"id": "\ud800"}, {"id": "m" * 257}, {"id": "a\nb"}, {"id": ""}]}},
        {"/v1/models": "[" * 100_000},
        {"/v1/models": "9" * 10_000},
        {"/v1/models": "x" * (MAX_PAGE_BYTES + 1)},
        {"/v1/models": MODELS, "/kv_event_sources": 500},
    ],
    ids=["nothing", "no model", "503", "no json", "a number", "no names", "deep", "long", "large", "500"],
)
async def test_an_engine_that_is_not_ready_is_unavailable(pages: dict[str, Any]) -> None:
    async with engine(pages) as url:
        with pytest.raises(Unavailable):
            await ask(url)


async def test_a_packed_answer_is_not_unpacked() -> None:
    async def packed(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(json.dumps(MODELS).encode()), headers={"Content-Encoding": "gzip"})

    async with engine({"/v1/models": packed}) as url:
        with pytest.raises(Unavailable, match="packed, as gzip"):
            await ask(url)


async def test_an_engine_sends_nobody_elsewhere() -> None:
    elsewhere: list[str] = []

    async def noted(request: web.Request) -> web.StreamResponse:
        elsewhere.append(request.path)
        return web.json_response(MODELS)

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/elsewhere")

    async with engine({"/v1/models": away, "/elsewhere": noted}) as url:
        with pytest.raises(Unavailable, match="answers 302"):
            await ask(url)
    assert elsewhere == []


async def test_a_status_line_of_no_text_is_shown_as_text() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 \xed\xa0\x80\xff\x00 \xff\r\n\r\n")

    async with tcp_server(answer) as port:
        with pytest.raises(Unavailable) as unavailable:
            await ask(f"http://127.0.0.1:{port}")
    assert unavailable.value.message.isprintable()


async def test_a_large_page_is_parsed_beside_the_event_loop() -> None:
    cards = [{"id": f"m{number}", "x": "y" * 200} for number in range(10_000)]
    loop_thread, parsing = threading.get_ident(), set()

    def noted(page: bytes, *, max_values: int) -> Any:
        parsing.add((len(page) > INLINE_BYTES, threading.get_ident() == loop_thread))
        return load_json(page, max_values=max_values)

    async with engine({"/v1/models": {"data": cards}, "/kv_event_sources": {}}) as url:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvscout_common.http.engine_http.load_json", noted)
            assert len((await ask(url)).models) == MAX_MODELS
    assert parsing == {(True, False), (False, True)}


def test_facts_fill_in_and_never_replace() -> None:
    told = (EventEndpoint(0, "tcp://h:1"), EventEndpoint(1, "tcp://h:2"))
    facts = EngineFacts("http://h", told, ("m",), 16, 100)
    bare = WorkerSpec("w", "m", 16, http_endpoint="http://h")
    filled = facts.complete(bare)
    assert (filled.event_endpoints, filled.dp_size, filled.total_kv_blocks) == (told, 2, 100)
    assert facts.contradictions(filled) == {}
    one_rank = replace(bare, dp_start_rank=1, total_kv_blocks=7)
    assert facts.complete(one_rank) == replace(one_rank, event_endpoints=told[1:])
    own = replace(bare, event_endpoints=(EventEndpoint(0, "tcp://other:1"),))
    assert facts.complete(own).event_endpoints == own.event_endpoints
    wrong = facts.complete(replace(bare, model="x", block_size=32, dp_start_rank=1, dp_size=2))
    assert facts.contradictions(wrong).keys() == {"block_size", "model", "dp_size"}


def test_only_engines_that_can_tell_are_asked() -> None:
    bare = WorkerSpec("w", "m", 16, http_endpoint="http://h")
    assert lacks_event_endpoints(bare)
    for other in (
        replace(bare, http_endpoint=""),
        replace(bare, transport=Transport.NONE),
        replace(bare, transport=Transport.JETSTREAM),
        replace(bare, engine=EngineKind.CUSTOM),
        replace(bare, event_endpoints=(EventEndpoint(0, "tcp://h:1"),)),
    ):
        assert not lacks_event_endpoints(other)


@asynccontextmanager
async def discovering(registry: Registry) -> AsyncIterator[Discovery]:
    discovery = Discovery(registry)
    task = asyncio.create_task(discovery.run())
    try:
        yield discovery
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_engine_that_starts_late_is_retried_told_of_and_completed() -> None:
    registry = Registry(lambda: 0.0)
    pages: dict[str, Any] = {}
    async with engine(pages) as url, discovering(registry) as discovery:
        registry.register(WorkerSpec("w", "m", 32, http_endpoint=url), source=Source.RPC, lease_seconds=9)

        async def told(part: str) -> bool:
            return any(part in warning for warning in shown(discovery.warnings()))

        await eventually(lambda: told("not known yet"))
        pages |= {
            "/v1/models": MODELS,
            "/kv_event_sources": {"0": {"endpoint": "tcp://*:5557"}},
            "/metrics": METRICS % (0, 50),
        }
        await eventually(lambda: told("block_size 32, the engine has 16"))
        entry = registry.get("default", "w")
        assert entry.spec.event_endpoints == (EventEndpoint(0, "tcp://127.0.0.1:5557"),)
        assert (entry.source, entry.lease_seconds, entry.registered.event_endpoints) == (Source.RPC, 9, ())
        registry.register(entry.registered, lease_seconds=9)  # as it registers again: what was found stays
        assert registry.get("default", "w").spec == entry.spec
        registry.update(replace(entry.registered, http_endpoint="http://127.0.0.1:1"))
        assert registry.get("default", "w").spec.event_endpoints == ()
        await eventually(lambda: told("not known yet"))
        registry.remove("default", "w")
        await eventually(lambda: not discovery.warnings())


async def test_event_endpoints_that_this_service_does_not_open_are_left_out_and_told() -> None:
    registry = Registry(lambda: 0.0, lambda spec: spec.require_allowed(()))
    pages = {
        "/v1/models": MODELS,
        "/kv_event_sources": {"0": {"endpoint": "ipc:///tmp/kv"}},
        "/metrics": METRICS % (0, 50),
    }
    async with engine(pages) as url, discovering(registry) as discovery:
        registry.register(WorkerSpec("w", "m", 16, http_endpoint=url))

        async def told() -> bool:
            return any("--allow-event-endpoints ipc" in warning for warning in shown(discovery.warnings()))

        await eventually(told)
        spec = registry.get("default", "w").spec
        assert (spec.event_endpoints, spec.total_kv_blocks) == ((), 49)


@pytest.mark.parametrize(
    ("kind", "flags", "ranks"),
    [(EngineKind.MOCK, ("--dp-size", "2"), 2), (EngineKind.SGLANG, ("--api", "sglang"), 1)],
)
async def test_a_mocker_is_found_with_all_its_ranks(kind: EngineKind, flags: tuple[str, ...], ranks: int) -> None:
    registry = Registry(lambda: 0.0)
    async with running_mocker(*flags) as mocker, discovering(registry) as discovery:
        registry.register(WorkerSpec("w", "mock", 16, engine=kind, http_endpoint=mocker.url))
        await eventually(lambda: bool(registry.get("default", "w").spec.event_endpoints))
        spec = registry.get("default", "w").spec
        assert [(e.dp_rank, e.endpoint, e.replay_endpoint) for e in spec.event_endpoints] == [
            (rank["dp_rank"], rank["events"], rank["replay"]) for rank in mocker.ranks
        ]
        assert (spec.dp_size, spec.total_kv_blocks, discovery.warnings()) == (ranks, 4095, [])
