"""The page itself: HTML, style and script, put together to one document with nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from kvscout_common.http.http import Headers


class Page(NamedTuple):
    """Response to a browser."""

    headers: Headers
    body: bytes


@cache
def page() -> Page:
    """Return the page. Its policy lets the browser run these two texts and talk to their origin, nothing else: a name
    of an engine or a client could not run even if it came to stand in the page as markup."""
    folder = files(__name__)
    style, script = ((folder / name).read_text("utf-8") for name in ("style.css", "script.js"))
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


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
