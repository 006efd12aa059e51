"""Client credentials: TLS files and a bearer token that is followed while channels are open."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvscout_common.errors import ConfigError
from kvscout_common.identity.pem import MAX_PEM_BYTES
from kvscout_common.process.followed_file import POLL_SECONDS, FollowedFile, read_file

StrPath: TypeAlias = str | os.PathLike[str]

MAX_TOKEN_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Credentials of a client, and its check of the server. Empty = plaintext, anonymous."""

    ca: StrPath | None = None
    """CA of the server's certificate; turns TLS on."""
    certificate: StrPath | None = None
    key: StrPath | None = None
    token_file: StrPath | None = None

    @classmethod
    def from_flags(
        cls,
        tls_ca: Path | None,
        tls_client_cert: Path | None,
        tls_client_key: Path | None,
        token_file: Path | None,
    ) -> ClientSecurity:
        """Take the values of `flags.client_flags`.

        Raises:
            ConfigError: If certificate and key do not come together, or come without a CA.
        """
        if bool(tls_client_cert) != bool(tls_client_key):
            raise ConfigError("--tls-client-cert and --tls-client-key go together", field="tls_client_cert")
        if tls_client_cert and not tls_ca:
            raise ConfigError("needs --tls-ca", field="tls_client_cert")
        return cls(tls_ca, tls_client_cert, tls_client_key, token_file)

    def pems(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """Return what the files of CA, certificate and key hold; None = plaintext.

        Raises:
            ConfigError: One cannot be read.
        """
        if self.ca is None:
            return None
        ca = read_file(Path(self.ca), flag="tls_ca", max_bytes=MAX_PEM_BYTES)
        certificate, key = (
            read_file(Path(path), flag=flag, max_bytes=MAX_PEM_BYTES) if path else None
            for path, flag in ((self.certificate, "tls_client_cert"), (self.key, "tls_client_key"))
        )
        return ca, certificate, key


PLAINTEXT = ClientSecurity()


class TokenFile:
    """The token that a file holds now: it is renewed while channels are open.

    Args:
        path: The file, read immediately.
        secret: Warn of a file that everybody may read.

    Raises:
        ConfigError: It cannot be read.
    """

    def __init__(self, path: Path, *, secret: bool = True) -> None:
        self._token = ""
        self._looked_at = time.monotonic()
        self._file = FollowedFile("token", (path,), lambda: _read_token(path, secret), self._take)
        self._file.load()

    def token(self) -> str:
        """Return the token; looks at the file once a second at most."""
        now = time.monotonic()
        if now - self._looked_at >= POLL_SECONDS:
            self._looked_at = now
            self._file.look()
        return self._token

    def _take(self, token: str) -> None:
        self._token = token


def _read_token(path: Path, secret: bool) -> str:
    token = read_file(path, flag="token_file", max_bytes=MAX_TOKEN_BYTES, secret=secret).strip()
    if not token.isascii() or not token.decode("ascii").isprintable():
        raise ConfigError(f"{path} holds no token: one line of ASCII", field="token_file")
    return token.decode("ascii")
