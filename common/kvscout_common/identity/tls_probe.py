"""Why a connection that nobody answers over may be one of TLS on one side only, or lack a certificate.

gRPC says of all of these that it could not connect. One more handshake distinguishes them.
"""

from __future__ import annotations

import asyncio
import ssl

from kvscout_common.identity.client_security import ClientSecurity

PROBE_SECONDS = 2.0
"""Longest time for it; who waits for an answer has waited already."""
SETTLE_SECONDS = 0.3
"""After a handshake of TLS 1.3 the server says within this whether it misses a certificate."""


async def tls_trouble(address: str, security: ClientSecurity) -> str:
    """Return what is wrong with TLS at an address, in a few words that follow it; "" = nothing that can be seen.

    Args:
        address: host:port.
        security: How it was called.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _handshake(host.strip("[]"), int(port), security)
    except (OSError, TimeoutError, ValueError):
        return ""  # nobody is there, or says anything


async def _handshake(host: str, port: int, security: ClientSecurity) -> str:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    if security.ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(security.ca)
        if security.certificate is not None:
            context.load_cert_chain(security.certificate, security.key)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        return f"has a certificate that is not to be trusted: {error.verify_message}"
    except ssl.SSLError as error:
        if security.ca is None:
            return ""  # no TLS, and none was wanted
        return _WANTS_CERTIFICATE if "ALERT" in (error.reason or "") else "speaks no TLS: call it without a CA"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "" if security.ca is None else "speaks no TLS: call it without a CA"
    try:
        if security.ca is None:
            return "speaks TLS: give the CA of its certificate (--tls-ca, ClientSecurity.ca)"
        async with asyncio.timeout(SETTLE_SECONDS):
            # An HTTP/2 server speaks or waits; one that hangs up on a client that has said nothing has seen who it is.
            return "" if await reader.read(1) else _WANTS_CERTIFICATE
    except (ssl.SSLError, ConnectionError):
        return _WANTS_CERTIFICATE
    except TimeoutError:
        return ""
    finally:
        writer.transport.abort()


_WANTS_CERTIFICATE = (
    "wants a client certificate of a CA that it knows (--tls-client-cert and --tls-client-key, "
    "ClientSecurity.certificate and key)"
)
