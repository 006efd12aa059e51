"""Which pages of the web may ask: none but those that are named, and by no name that is not this machine's."""

from __future__ import annotations

import pytest

from kvscout_common.errors import ConfigError, PermissionDenied
from kvscout_common.http.web_origins import WebOrigins

HERE = ("Host", "localhost:8000")


def open_here(*allowed: str, host: str = "127.0.0.1") -> WebOrigins:
    """Of a port without tokens."""
    return WebOrigins(guarded=False, host=host, allowed=allowed)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost:8000.evil.example", "file://"])
def test_a_foreign_page_may_not_ask_where_no_tokens_are(origin: str) -> None:
    with pytest.raises(PermissionDenied, match="--cors-origin"):
        open_here().require([HERE, ("origin", origin)])
    # Where tokens are a page has none.
    WebOrigins(guarded=True, host="127.0.0.1").require([("Host", "evil.example"), ("Origin", origin)])


def test_programs_and_our_own_page_may() -> None:
    for headers in ([HERE], [], [HERE, ("Origin", "http://localhost:8000")], [("Host", "[::1]:80"), ("ORIGIN", "")]):
        open_here().require(headers)
    open_here(host="0.0.0.0").require([("Host", "gw.internal"), ("Origin", "https://GW.internal")])


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "evil.example."])
def test_a_port_of_this_machine_is_asked_for_by_its_names(host: str) -> None:
    with pytest.raises(PermissionDenied, match="--auth-tokens"):
        open_here().require([("Host", host), ("Origin", f"http://{host}")])
    open_here(host="0.0.0.0").require([("Host", host)])
    open_here("*").require([("Host", host)])
    for name in ("localhost", "127.0.0.1:9", "[::1]:8000", "a.localhost:1", "LOCALHOST."):
        open_here().require([("Host", name)])


def test_an_allowed_page_is_answered_and_its_host_is_ours() -> None:
    origins = open_here("https://chat.example.com", "app://obsidian.md/")
    for origin in ("https://chat.example.com", "HTTPS://Chat.example.com", "app://obsidian.md"):
        headers = [HERE, ("Origin", origin)]
        origins.require(headers)
        assert ("Access-Control-Allow-Origin", origin) in origins.answer_headers(headers)
    origins.require([("Host", "chat.example.com")])
    assert origins.answer_headers([HERE]) == (("Vary", "Origin"),)
    with pytest.raises(PermissionDenied):
        origins.require([HERE, ("Origin", "http://chat.example.com")])


def test_a_preflight_of_an_allowed_page_is_answered_with_what_it_asks_for() -> None:
    origins = open_here("https://a.example")
    asked = [("Origin", "https://a.example"), ("Access-Control-Request-Method", "POST")]
    names = ("Access-Control-Request-Headers", "authorization,content-type, x-stainless-os")
    answer = dict(origins.preflight("OPTIONS", [*asked, names]) or ())
    assert answer["Access-Control-Allow-Origin"] == "https://a.example"
    assert "POST" in answer["Access-Control-Allow-Methods"]
    assert answer["Access-Control-Allow-Headers"] == names[1]
    for bad in ("a\r\nb", "x" * 3000, "a b", "a,,b", '"'):
        given = origins.preflight("OPTIONS", [*asked, (names[0], bad)])
        assert given is not None
        assert "Access-Control-Allow-Headers" not in dict(given)
    assert origins.preflight("POST", asked) is None
    assert origins.preflight("OPTIONS", asked[:1]) is None
    assert origins.preflight("OPTIONS", [("Origin", "https://b.example"), asked[1]]) is None
    assert open_here().preflight("OPTIONS", asked) is None
    assert open_here().answer_headers(asked) == ()


@pytest.mark.parametrize("origin", ["", "a.example", "https://", "https://a.example/x", "https://u@a", "**"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        open_here(origin)
