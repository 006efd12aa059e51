"""The page itself: HTML, style and script, put together to one document with nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from kvscout_common.http.http import Headers

_STYLES: Final = ("base.css", "board.css", "pages.css", "phone.css")
_SCRIPTS: Final = (
    *("text.js", "nodes.js", "headline.js", "doctor.js", "strip.js", "charts.js"),
    *("workers.js", "decisions.js", "failures.js", "rest.js"),
    *("pages.js", "ladder.js", "prefixes.js", "timelines.js", "stream.js"),
)
"""Each uses what those before it declare."""


class Page(NamedTuple):
    """Response to a browser."""

    headers: Headers
    body: bytes


@cache
def page() -> Page:
    """Return the page. Its policy lets the browser run these two texts and talk to their origin, nothing else: a name
    of an engine or a client could not run even if it came to stand in the page as markup."""
    folder = files(__name__)
    style, script = _joined(folder, _STYLES), '(() => {\n"use strict";\n' + _joined(folder, _SCRIPTS) + "})();\n"
    document = (folder / "index.html").read_text("utf-8")
    document = document.replace("/* style.css */", style).replace("/* script.js */", script)
    policy = (
        "default-src 'none'",
        f"style-src '{_digest(style)}'",
        f"script-src '{_digest(script)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = (
        ("Content-Type", "text/html; charset=utf-8"),
        ("Content-Security-Policy", "; ".join(policy)),
        ("Cache-Control", "no-cache"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
    )
    return Page(headers, document.encode())


def _joined(folder: Traversable, names: tuple[str, ...]) -> str:
    return "".join((folder / name).read_text("utf-8") for name in names)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
