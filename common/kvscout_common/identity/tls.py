"""The server's side of TLS: certificates that are renewed under a running server."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import grpc

from kvscout_common.errors import ConfigError
from kvscout_common.identity.pem import MAX_PEM_BYTES, Pem
from kvscout_common.process.followed_file import FollowedFile, read_file
from kvscout_common.settings.config import TlsFiles


class ServerCertificates:
    """Certificates of new connections; those that exist keep the ones that they began with.

    Args:
        files: Read immediately, and followed.

    Raises:
        ConfigError: They are wrong.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.current: Pem
        """Certificates for new connections."""
        self.renewed: list[Callable[[Pem], None]] = []
        """Called with each renewal."""
        paths = [files.certificate, files.key, *([files.client_ca] if files.client_ca else [])]
        self.file = FollowedFile("certificate", paths, self._read, self._apply)
        self.file.load()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for `add_secure_port` of one server."""
        served = self.current

        def newest() -> Any:
            # Asked by grpc before each handshake, in a thread of its own; None = as before.
            nonlocal served
            if served is self.current:
                return None
            served = self.current
            return _configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            newest,
            require_client_authentication=self._files.client_ca is not None,
        )

    def _apply(self, pem: Pem) -> None:
        self.current = pem
        for renew in self.renewed:
            renew(pem)

    def _read(self) -> Pem:
        files = self._files
        certificate = read_file(files.certificate, flag="tls_cert", max_bytes=MAX_PEM_BYTES)
        key = read_file(files.key, flag="tls_key", max_bytes=MAX_PEM_BYTES, secret=True)
        client_ca = (
            read_file(files.client_ca, flag="tls_client_ca", max_bytes=MAX_PEM_BYTES) if files.client_ca else None
        )
        # What grpc is given and cannot use it says of each handshake, to nobody: here it is an error, and of a file.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(files.certificate, files.key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{files.certificate} and {files.key} are not a pair: {error}", field="tls_cert"
            ) from error
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{files.client_ca} holds no certificate: {error}", field="tls_client_ca") from error
        return Pem(certificate, key, client_ca)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.client_ca)
