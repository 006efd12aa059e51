"""Certificates as the transports take them, in PEM."""

from __future__ import annotations

import ssl
import tempfile
from typing import NamedTuple

MAX_PEM_BYTES = 1024 * 1024


class Pem(NamedTuple):
    """Certificate chain and key of a server, and the CA of its clients' certificates (None = clients need none)."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


def load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate chain and its key, which Python's ssl reads from files alone.

    Raises:
        OSError: They cannot be used.
    """
    with tempfile.NamedTemporaryFile(prefix="kvscout-") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)
