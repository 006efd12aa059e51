"""Host names in ZMQ addresses."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvscout_blocks.source.host_names import host_name, resolved


@pytest.mark.parametrize(
    "endpoint", ["tcp://10.0.0.5:5557", "tcp://[::1]:5557", "ipc:///tmp/events", "inproc://events", "tcp://0.0.0.0:1"]
)
async def test_what_has_no_name_stays_as_it_is(endpoint: str) -> None:
    assert host_name(endpoint) == ""
    assert await resolved(endpoint) == endpoint


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [(["::1", "127.0.0.1"], "tcp://127.0.0.1:5557"), (["fd00::7"], "tcp://[fd00::7]:5557")],
    ids=["both", "IPv6 alone"],
)
async def test_a_name_gets_its_address_that_of_ipv4_if_it_has_one(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], expected: str
) -> None:
    async def look_up(loop: object, host: str, *_: object, **__: object) -> list[Any]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, 1, 6, "", (ip, 0)) for family, ip in zip(families, addresses, strict=True)]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", look_up)
    assert host_name("tcp://engine-0:5557") == "engine-0"
    assert await resolved("tcp://engine-0:5557") == expected


async def test_a_name_that_nobody_knows_or_that_is_none_is_an_os_error() -> None:
    for name in ("no.such.host.invalid", "a" * 64, ".."):
        with pytest.raises(OSError, match="cannot be resolved"):
            await resolved(f"tcp://{name}:5557")
