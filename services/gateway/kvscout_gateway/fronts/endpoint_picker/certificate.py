"""The certificate of a picker that was given none: proxies dial it over TLS, and do not verify whom they reach."""

from __future__ import annotations

import datetime

from kvscout_common.errors import ConfigError
from kvscout_common.identity.pem import Pem

NAME = "kvscout-endpoint-picker"
VALID_DAYS = 3650
"""Longer than the process lives; it is made at each start, and its key is written nowhere."""


def self_signed(now: datetime.datetime) -> Pem:
    """Return a certificate that nobody else has signed.

    Args:
        now: With its time zone.

    Raises:
        ConfigError: The library for it is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            "needs --tls-cert, or --endpoint-picker-plaintext, or what `pip install kvscout[picker]` brings",
            field="endpoint_picker_port",
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME), x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pem(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        None,
    )
