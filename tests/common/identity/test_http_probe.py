"""A port of HTTP that is called as if it were one of gRPC is told so."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from support.fake_gateway import fake_gateway
from support.tcp_server import tcp_server
from support.web_servers import web_server

from kvscout_client import NotGrpc, Router
from kvscout_common.identity.http_probe import http_trouble


async def test_a_port_of_http_is_told_to_be_one_and_one_of_grpc_is_not() -> None:
    async with web_server(web.Application()) as url, fake_gateway() as gateway:
        assert (await http_trouble(url.removeprefix("http://"))).startswith("is an HTTP port: ")
        assert await http_trouble(gateway.address) == ""


async def test_nobody_and_nonsense_are_no_http() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-x\r\n")

    async with tcp_server(silent) as port:
        for address in (f"127.0.0.1:{port}", "127.0.0.1:1", "nowhere", "a:b"):
            assert await http_trouble(address) == ""


async def test_a_client_of_a_port_of_http_gets_an_error_that_says_so() -> None:
    async with web_server(web.Application()) as url:
        address = url.removeprefix("http://")
        async with Router(address, timeout_seconds=5.0) as router:
            with pytest.raises(NotGrpc, match=f"{address} is an HTTP port"):
                await router.list_workers()
