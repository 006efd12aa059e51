"""Certificates as the transports take them, in PEM."""

from __future__ import annotations

from typing import NamedTuple

MAX_PEM_BYTES = 1024 * 1024


class Pem(NamedTuple):
    """Certificate chain and key of a server, and the CA of its clients' certificates (None = clients need none)."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
