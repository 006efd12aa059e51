"""Headers of a client's request that go to an engine, and of an engine's answer that go back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvscout_common.http.http import Headers
from kvscout_gateway.fronts.reserved import is_reserved_header

if TYPE_CHECKING:
    from kvscout_gateway.values.decision import Decision

JSON_HEADERS: Final = (("Content-Type", "application/json"),)
_OF_ONE_HOP: Final = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade", "host", "content-length", "expect")
)  # fmt: skip
KEYS: Final = frozenset(("authorization", "x-api-key"))
"""Where clients show their key: SDKs of OpenAI the first, of Anthropic either."""
_NOT_FOR_ENGINES: Final = frozenset(("accept-encoding", "cookie", *KEYS))
"""Compressed answers cannot be read on their way; keys are the gateway's."""
_NOT_FOR_CLIENTS: Final = frozenset(("date", "server", "set-cookie"))
_FOR_BROWSERS: Final = "access-control-"
"""Which pages may see an answer is the gateway's to say."""
_GATEWAYS_OWN: Final = "x-kvscout-"
MAX_VALUE: Final = 512
WORKER_HEADER: Final = "x-kvscout-worker"
"""Worker that a request went to. A refusal that does not come from an engine has none."""


def to_engine(client: Headers, own: Iterable[tuple[str, str]], *, with_key: bool) -> list[tuple[str, str]]:
    """Return the headers of a request to an engine.

    Args:
        client: What the client sent.
        own: What the gateway sends; goes before what the client sent under the same name.
        with_key: The client's key is the engine's: the gateway wants none, and has none for engines.
    """
    mine = [*own, ("Accept-Encoding", "identity")]
    taken = {name.lower() for name, _ in mine}
    taken |= _connection_options(client)
    return mine + [
        (name, value)
        for name, value in client
        if (lower := name.lower()) not in taken
        and lower not in _OF_ONE_HOP
        and not is_reserved_header(lower)
        and (lower not in _NOT_FOR_ENGINES or (with_key and lower in KEYS))
    ]


def to_client(engine: Headers) -> list[tuple[str, str]]:
    """Return the headers of an engine's answer that are the client's to see."""
    named = _connection_options(engine)
    return [
        (name, value)
        for name, value in engine
        if (lower := name.lower()) not in _OF_ONE_HOP
        and lower not in _NOT_FOR_CLIENTS
        and lower not in named
        and not lower.startswith((_FOR_BROWSERS, _GATEWAYS_OWN))
    ]


def of_decision(decision: Decision) -> list[tuple[str, str]]:
    """Return the headers that tell a client where its request went.

    An engine computes the last token of a prompt anew: of one that is wholly cached, the last block does not count.
    """
    cached_blocks = max(0, decision.overlap_blocks - (decision.uncached_tokens == 0))
    told = [
        (WORKER_HEADER, as_value(decision.worker.worker_id)),
        ("x-kvscout-cached-tokens", str(cached_blocks * decision.block_size)),
        ("x-kvscout-decision-ms", f"{decision.seconds * 1000:.3f}"),
    ]
    if (pull := decision.pull) is not None:
        told.append(("x-kvscout-pull", f"{as_value(pull.source.worker_id)} {pull.blocks * decision.block_size}"))
    return told


def to_balancer(client: Headers, own: Iterable[tuple[str, str]], *, with_key: bool) -> list[tuple[str, str]]:
    """Return the headers of a request to the user's balancer: all but the reserved ones; also cookies it may go by.

    Args:
        client: What the client sent.
        own: What the gateway sends; instead of what the client sent under the same name.
        with_key: The client's key is the engine's.
    """
    mine = [*((name, value) for name, value in own if value), ("Accept-Encoding", "identity")]
    dropped = {name.lower() for name, _ in mine} | _connection_options(client) | _OF_ONE_HOP
    if not with_key:
        dropped |= KEYS
    return mine + [
        (name, value)
        for name, value in client
        if (lower := name.lower()) not in dropped and not is_reserved_header(lower)
    ]


def from_balancer(answer: Headers) -> list[tuple[str, str]]:
    """Return the headers of its answer: all but those that say to browsers which pages may see it."""
    dropped = _connection_options(answer) | _OF_ONE_HOP
    return [
        (name, value)
        for name, value in answer
        if (lower := name.lower()) not in dropped and not lower.startswith(_FOR_BROWSERS)
    ]


def as_value(text: str) -> str:
    """Any text as the value of a header: in one line, in ASCII, not too long."""
    words = "".join(one if one.isprintable() else " " for one in text).split()
    return " ".join(words).encode("ascii", "replace").decode()[:MAX_VALUE]


def _connection_options(headers: Headers) -> set[str]:
    """Names of further headers that are for one hop only."""
    options: set[str] = set()
    for name, value in headers:
        if name.lower() == "connection":
            options.update(option.strip().lower() for option in value.split(","))
    return options
