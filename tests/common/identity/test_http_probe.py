"""A port of HTTP that is called as if it were one of gRPC is told so."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.fake_gateway import fake_gateway

from kvscout_client import NotGrpc, Router
from kvscout_common.identity.http_probe import http_trouble


async def test_a_port_of_http_is_told_to_be_one_and_one_of_grpc_is_not() -> None:
    async with TestServer(web.Application()) as server, fake_gateway() as gateway:
        assert (await http_trouble(f"127.0.0.1:{server.port}")).startswith("is an HTTP port: ")
        assert await http_trouble(gateway.address) == ""


async def test_nobody_and_nonsense_are_no_http() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-x\r\n")
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for address in (f"127.0.0.1:{port}", "127.0.0.1:1", "nowhere", "a:b"):
            assert await http_trouble(address) == ""


async def test_a_client_of_a_port_of_http_gets_an_error_that_says_so() -> None:
    async with (
        TestServer(web.Application()) as server,
        Router(f"127.0.0.1:{server.port}", timeout_seconds=5.0) as router,
    ):
        with pytest.raises(NotGrpc, match=f"127.0.0.1:{server.port} is an HTTP port"):
            await router.list_workers()
