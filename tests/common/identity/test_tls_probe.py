"""What is wrong with TLS between a client and a server is told in words, over both transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import trustme
from support.fake_gateway import fake_gateway
from support.tcp_server import tcp_server
from transport.echo_service import native

from kvscout_client import NotSecured, Router
from kvscout_common.hashing import native_available
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.pem import Pem
from kvscout_common.identity.tls_probe import tls_trouble


class Issued(NamedTuple):
    """Certificates of one authority, in files and as PEM."""

    ca: str
    certificate: str
    key: str
    pem: Pem


def issue(folder: Path) -> Issued:
    folder.mkdir()
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    chain, key = b"".join(pem.bytes() for pem in made.cert_chain_pems), made.private_key_pem.bytes()
    for name, content in (("ca", authority.cert_pem.bytes()), ("cert", chain), ("key", key)):
        (folder / name).write_bytes(content)
    ca, certificate, private = (str(folder / name) for name in ("ca", "cert", "key"))
    return Issued(ca, certificate, private, Pem(chain, key, authority.cert_pem.bytes()))


@asynccontextmanager
async def grpcio_port(pem: Pem | None) -> AsyncIterator[int]:
    def add(server: grpc.aio.Server) -> int:
        if pem is None:
            return server.add_insecure_port("127.0.0.1:0")
        credentials = grpc.ssl_server_credentials(
            [(pem.key, pem.certificate)], pem.client_ca, pem.client_ca is not None
        )
        return server.add_secure_port("127.0.0.1:0", credentials)

    async with fake_gateway(add_port=add) as gateway:
        yield int(gateway.address.rpartition(":")[2])


@asynccontextmanager
async def native_port(pem: Pem | None) -> AsyncIterator[int]:
    async with native(pem) as served:
        yield served.port


SERVED = [grpcio_port, *([native_port] if native_available() else [])]


@pytest.mark.parametrize("served", SERVED)
async def test_each_disagreement_has_its_words(
    served: Callable[[Pem | None], AbstractAsyncContextManager[int]], tmp_path: Path
) -> None:
    ours, others = issue(tmp_path / "ours"), issue(tmp_path / "others")
    plain, with_ca = ClientSecurity(), ClientSecurity(ca=ours.ca)
    known = ClientSecurity(ours.ca, ours.certificate, ours.key)
    foreign = ClientSecurity(ours.ca, others.certificate, others.key)
    one_way = ours.pem._replace(client_ca=None)
    for pem, security, expected in (
        (None, plain, ""),
        (None, with_ca, "speaks no TLS"),
        (one_way, plain, "speaks TLS: give the CA"),
        (one_way, with_ca, ""),
        (one_way, ClientSecurity(ca=others.ca), "has a certificate that is not to be trusted"),
        (ours.pem, with_ca, "wants a client certificate"),
        (ours.pem, foreign, "wants a client certificate"),
        (ours.pem, known, ""),
    ):
        async with served(pem) as port:
            trouble = await tls_trouble(f"127.0.0.1:{port}", security)
            assert trouble.startswith(expected), (pem is None, security, trouble)
            assert bool(trouble) == bool(expected)


@pytest.mark.parametrize("served", SERVED)
async def test_a_client_says_so_instead_of_nobody_answers(
    served: Callable[[Pem | None], AbstractAsyncContextManager[int]], tmp_path: Path
) -> None:
    ours = issue(tmp_path / "ours")
    async with served(ours.pem._replace(client_ca=None)) as port:
        async with Router(f"127.0.0.1:{port}", timeout_seconds=10, retries=0) as router:
            with pytest.raises(NotSecured, match=f"127.0.0.1:{port} speaks TLS: give the CA"):
                await router.status()
            with pytest.raises(NotSecured, match="speaks TLS"):
                await anext(router.generate([1]))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost", "unix:/tmp/x", "dns:///a:x", ":1", "[::1]:1", "a b:2"])
async def test_where_nobody_is_nothing_is_known(address: str) -> None:
    assert await tls_trouble(address, ClientSecurity()) == ""


async def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_common.identity.tls_probe.PROBE_SECONDS", 0.2)
    left = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    async with tcp_server(hold) as port:
        assert await tls_trouble(f"127.0.0.1:{port}", ClientSecurity()) == ""
        await asyncio.wait_for(left.wait(), 30)
