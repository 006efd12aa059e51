"""Which addresses a registration may name, and which of them a service opens."""

from __future__ import annotations

import pytest

from kvscout_common.endpoints import (
    Allowed,
    address_problem,
    event_endpoint_problem,
    refusal,
    url_problem,
)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5:8000",
        "https://vllm.prod.svc",
        "http://[fd00::5]:8000/v1/proxy",
        "http://a_b-c.d.:1",
        "HTTP://h",
    ],
)
def test_urls_of_engines(url: str) -> None:
    assert url_problem(url) == ""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("10.0.0.5:8000", "not an http(s) URL"),
        ("ftp://h", "not an http(s) URL"),
        ("http://", "no host"),
        ("http://:8000", "no host"),
        ("http://h:0", "port"),
        ("http://h:65536", "not a URL"),
        ("http://h:x", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://user:password@h", "password"),
        ("http://@h", "password"),
        ("http://h?x=1", "its path"),
        ("http://h#x", "its path"),
        ("http://a b", "host"),
        ("http://h\r\nX: y", "printable"),
        ("http://\ud800", "printable"),
        ("http://hé", "host"),
        ("http://" + "h" * 300, "bytes"),
    ],
)
def test_what_is_no_url_of_an_engine(url: str, says: str) -> None:
    assert says in url_problem(url)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("h:1", ""),
        ("[::1]:65535", ""),
        ("10.0.0.1:7051", ""),
        ("h", "host"),
        ("h:", "port"),
        (":1", "no host"),
        ("::1:1", "brackets"),
        ("[h:1]:1", "host"),
        ("unix:/run/x", "port"),
        ("dns:///h:1", "brackets"),
        ("h:100000", "port"),
        ("h:٣", "port"),
    ],
)
def test_addresses_of_grpc_servers(address: str, says: str) -> None:
    problem = address_problem(address)
    assert says in problem
    assert bool(problem) == bool(says)


@pytest.mark.parametrize(
    ("address", "bind", "says"),
    [
        ("tcp://10.0.0.5:5557", False, ""),
        ("tcp://[fe80::1%eth0]:5557", False, ""),
        ("tcp://vllm-0.vllm:5557", False, ""),
        ("ipc:///run/kv.sock", False, ""),
        ("tcp://*:5557", True, ""),
        ("tcp://eth0:5557", True, ""),
        ("tcp://*:5657", False, "write tcp://HOST:5657"),
        ("tcp://0.0.0.0:5657", False, "write tcp://HOST:5657"),
        ("tcp://[::]:5657", False, "write tcp://HOST:5657"),
        ("tcp://:::5657", False, "write tcp://HOST:5657"),
        ("tcp://*:*", True, "port"),
        ("tcp://h:0", True, "port"),
        ("tcp://h", False, "no host"),
        ("tcp://a;b:1", False, "host"),
        ("inproc://x", False, "tcp://HOST:PORT"),
        ("pgm://h:1", False, "tcp://HOST:PORT"),
        ("h:1", False, "tcp://HOST:PORT"),
        ("", False, "tcp://HOST:PORT"),
        ("ipc://", False, "path"),
        ("ipc:///" + "x" * 107, False, "path"),
        ("ipc:///\x00", False, "printable"),
    ],
)
def test_addresses_of_events(address: str, bind: bool, says: str) -> None:
    problem = event_endpoint_problem(address, bind=bind)
    assert says in problem
    assert bool(problem) == bool(says)


@pytest.mark.parametrize(
    ("address", "bind", "needs"),
    [
        ("tcp://10.0.0.5:5557", False, None),
        ("tcp://127.0.0.1:5557", True, None),
        ("tcp://[::1]:5557", True, None),
        ("tcp://localhost:5557", True, None),
        ("tcp://0.0.0.0:5557", True, Allowed.BIND),
        ("tcp://*:5557", True, Allowed.BIND),
        ("tcp://10.0.0.5:5557", True, Allowed.BIND),
        ("ipc:///run/kv", False, Allowed.IPC),
        ("ipc:///run/kv", True, Allowed.IPC),
    ],
)
def test_what_an_operator_must_allow(address: str, bind: bool, needs: Allowed | None) -> None:
    told = refusal(address, (), bind=bind)
    assert bool(told) == (needs is not None)
    if needs is not None:
        assert f"--allow-event-endpoints {needs}" in told
        assert refusal(address, [needs], bind=bind) == ""
        assert refusal(address, set(Allowed) - {needs}, bind=bind)
