"""Snapshots of peers that are not there, hang, or name more than anybody can ask."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
from aiohttp import web
from support.fake_gateway import fake_gateway
from support.web_servers import web_server

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor import collection
from kvscout_common.doctor.collection import Collection, NamedService
from kvscout_common.doctor.snapshot import Service, ServiceKind
from kvscout_common.identity.client_security import PLAINTEXT


async def test_a_service_that_accepts_and_says_nothing_is_given_up_and_holds_nobody_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        async with asyncio.timeout(10):
            snapshot = await Collection(PLAINTEXT, timeout_seconds=0.3).snapshot(
                [NamedService(address, ServiceKind.INDEXER)]
            )
    [service] = snapshot.services
    assert (service.address, service.kind, service.info) == (address, ServiceKind.INDEXER, None)
    assert service.error


async def test_of_more_services_than_can_be_asked_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_ASKED", 3)
    named = [NamedService(f"127.0.0.1:{port}", ServiceKind.INDEXER) for port in range(1, 9)]
    snapshot = await Collection(PLAINTEXT).snapshot([*named, *named])
    assert (len(snapshot.services), snapshot.left_out) == (3, 5)


async def test_what_tells_no_health_of_a_service_is_not_taken_for_one() -> None:
    async with fake_gateway() as gateway:
        snapshot = await Collection(PLAINTEXT, timeout_seconds=2.0).snapshot(
            [NamedService(gateway.address, ServiceKind.GATEWAY)]
        )
        [service] = snapshot.services
        assert service.info is None
        assert service.error == "no gateway: something else answers there"


@pytest.mark.parametrize("address", ["", "nowhere", "dns://x", "127.0.0.1:99999", "a:1\x1b[2J"])
async def test_what_is_no_address_is_not_tried(address: str) -> None:
    [service] = (await Collection(PLAINTEXT).snapshot([NamedService(address)])).services
    assert service.error.startswith("is not an address: ")
    assert service.error.isprintable()


def test_helpers_of_a_kind_that_is_not_known_are_left_alone() -> None:
    helpers = [
        gateway_pb2.HelperStatus(kind=gateway_pb2.HELPER_KIND_UNSPECIFIED, address="o:1"),
        gateway_pb2.HelperStatus(kind=gateway_pb2.HELPER_KIND_INDEXER, address="i:1"),
    ]
    status = gateway_pb2.GatewayGetStatusResponse(helpers=helpers)
    service = Service("g:1", ServiceKind.GATEWAY, status=status)
    assert collection._named_by(service) == [NamedService("i:1", ServiceKind.INDEXER, "g:1")]


@pytest.mark.parametrize("page", ["{}", "null", "[]", '{"stats": [{"name": "x", "value": "much"}]}', "<html>"])
async def test_what_answers_like_no_envoy_is_named_and_not_counted(page: str) -> None:
    async def stats(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="application/json")

    app = web.Application()
    app.router.add_get("/stats", stats)
    async with web_server(app) as url:
        [proxy] = (await Collection(PLAINTEXT).snapshot([], proxies=[f"{url}/"])).proxies
    assert (proxy.url, proxy.counters) == (url, {})
    assert url in proxy.error or "no admin interface of Envoy" in proxy.error


@pytest.mark.parametrize("url", ["127.0.0.1:9901", "nowhere", "ftp://127.0.0.1", "http://127.0.0.1:1"])
async def test_an_admin_interface_that_is_not_there_is_an_error_of_the_proxy(url: str) -> None:
    [proxy] = (await Collection(PLAINTEXT).snapshot([], proxies=[url])).proxies
    assert proxy.error and not proxy.counters
