"""Which pages of the web may have a browser ask us: origins, CORS and the names that we are asked for by. Pure.

A browser sends what any page asks it to, from inside the network in which it runs. Where tokens guard a port a page
has none; where none do, an `Origin` that is not ours is refused unless it is allowed, and a port that only this machine
reaches is asked for by a name of this machine: any page can give its own name the address 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from kvscout_common.endpoints import is_loopback
from kvscout_common.errors import ConfigError, PermissionDenied
from kvscout_common.plain_text import printable

Headers: TypeAlias = Sequence[tuple[str, str]]

ANY: Final = "*"
FLAG: Final = "cors_origin"
PREFLIGHT_SECONDS: Final = 600
"""Seconds for which browsers may remember the answer to a preflight."""
METHODS: Final = "GET, POST, PUT, PATCH, DELETE"
EXPOSED: Final = "Retry-After, X-Request-Id, X-Kvscout-Degraded"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
"""Names of headers, in a list."""
_MAX_NAMES: Final = 2048
"""Characters of such a list."""


class WebOrigins:
    """Origins that may call one port."""

    def __init__(self, *, guarded: bool, host: str, allowed: Iterable[str] = ()) -> None:
        """Take what is configured.

        Args:
            guarded: Tokens are needed.
            host: The address that is bound.
            allowed: Origins of pages that may ask, `scheme://host[:port]` each; `*` = any. We may be asked for by their
                hosts as well, as a proxy in front does.

        Raises:
            ConfigError: One of them is none.
        """
        origins = frozenset(one.rstrip("/").lower() for one in allowed)
        for one in origins:
            if one != ANY and not _ORIGIN.fullmatch(one):
                raise ConfigError(f"{printable(one)} is neither scheme://host[:port] nor *", field=FLAG)
        self._guarded = guarded
        self._origins = origins
        self._any = ANY in origins
        self._names = frozenset((host.lower(), *(_name_of(one.partition("://")[2]) for one in origins)))
        self._by_name = not guarded and not self._any and is_loopback(host)

    def require(self, headers: Headers) -> None:
        """Refuse a request that a page may not make.

        Args:
            headers: Of the request.

        Raises:
            PermissionDenied: Its page is not allowed, or it asks for us by a name that is not ours.
        """
        host = _value(headers, "host")
        if self._by_name and host and not self._is_ours(_name_of(host)):
            raise PermissionDenied(
                f"without --auth-tokens this port is for this machine alone, not for {printable(host)}: ask for"
                " localhost, or name the page that may with --cors-origin"
            )
        if self._guarded:
            return
        origin = _value(headers, "origin").lower()
        if origin and not self._allows(origin) and origin.partition("://")[2] != host.lower():
            raise PermissionDenied(
                f"pages of {printable(origin)} may not ask here without --auth-tokens; --cors-origin allows it"
            )

    def answer_headers(self, headers: Headers) -> Headers:
        """Return what has a browser show the answer to the page that asked; empty where there is none, or it is not
        allowed.

        Args:
            headers: Of the request.
        """
        if not self._origins:
            return ()
        origin = _value(headers, "origin")
        varies = ("Vary", "Origin")  # caches would give one page's answer to another
        if not origin or not self._allows(origin.lower()):
            return (varies,)
        return (("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", EXPOSED), varies)

    def preflight(self, method: str, headers: Headers) -> Headers | None:
        """Return the headers of the answer to a preflight of an allowed page; None = the request is none.

        Args:
            method: Of the request.
            headers: Of it.
        """
        if method != "OPTIONS":
            return None
        origin, asked = _value(headers, "origin"), _value(headers, "access-control-request-method")
        if not asked or not origin or not self._allows(origin.lower()):
            return None
        names = _value(headers, "access-control-request-headers")
        known = len(names) <= _MAX_NAMES and _NAMES.fullmatch(names)
        return (
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Allow-Methods", METHODS),
            *((("Access-Control-Allow-Headers", names),) if known else ()),
            ("Access-Control-Max-Age", str(PREFLIGHT_SECONDS)),
            ("Vary", "Origin, Access-Control-Request-Headers"),
        )

    def _allows(self, origin: str) -> bool:
        return self._any or origin in self._origins

    def _is_ours(self, name: str) -> bool:
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_of(host: str) -> str:
    """Return the host in a Host header, or behind a scheme."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]").rstrip(".").lower()


def _value(headers: Headers, name: str) -> str:
    for one, value in headers:
        if one.lower() == name:
            return value.strip()
    return ""
