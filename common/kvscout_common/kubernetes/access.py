"""Address of the Kubernetes API and credentials for it: a pod's service account, or a kubeconfig.

What a pod is given is renewed in its files while it runs, the token about every hour: they are followed.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvscout_common.endpoints import bracketed, url_problem
from kvscout_common.errors import ConfigError
from kvscout_common.identity.client_security import MAX_TOKEN_BYTES, TokenFile
from kvscout_common.identity.pem import MAX_PEM_BYTES, load_chain
from kvscout_common.process.followed_file import POLL_SECONDS, FollowedFile, read_file, read_yaml

FLAG: Final = "kubeconfig"
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_KUBECONFIG_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class KubernetesAccess:
    """One API, as one user of it."""

    server: str
    """Its base URL."""
    namespace: str
    """Namespace of objects that name none."""
    token: TokenFile | str = ""
    tls: FollowedTls | None = None
    """None = plain HTTP."""

    def headers(self) -> dict[str, str]:
        """Return what each request shows; looks at the token's file once a second at most."""
        token = self.token if isinstance(self.token, str) else self.token.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def ssl(self) -> ssl.SSLContext | bool:
        """Whom to trust and what to show, as aiohttp takes it."""
        return self.tls.context() if self.tls is not None else True


class FollowedTls:
    """A client's TLS, with files that may be renewed.

    Args:
        ca: CA of the server; None = those that this machine trusts.
        own: Own certificate chain and key.
        trust_anybody: The server shows whatever it likes.

    Raises:
        ConfigError: A file cannot be read, or is no PEM.
    """

    def __init__(
        self, ca: Path | bytes | None, own: tuple[Path | bytes, Path | bytes] | None = None, trust_anybody: bool = False
    ) -> None:
        self._ca, self._own, self._trust_anybody = ca, own, trust_anybody
        self._looked_at = time.monotonic()
        paths = [part for part in (ca, *(own or ())) if isinstance(part, Path)]
        self._file = FollowedFile("TLS of the Kubernetes API", paths, self._make, self._take)
        self._file.load()

    def context(self) -> ssl.SSLContext:
        """Return the one of now; looks at the files once a second at most."""
        now = time.monotonic()
        if now - self._looked_at >= POLL_SECONDS:
            self._looked_at = now
            self._file.look()
        return self._context

    def _take(self, context: ssl.SSLContext) -> None:
        self._context = context

    def _make(self) -> ssl.SSLContext:
        try:
            if self._ca is None:
                context = ssl.create_default_context()
            else:
                context = ssl.create_default_context(cadata=_content(self._ca).decode("ascii"))
            # Strict rules of RFC 5280, which Python 3.13 turns on, refuse the CAs of many clusters.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if self._trust_anybody:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if self._own is not None:
                load_chain(context, *map(_content, self._own))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"no certificate or key in PEM: {error}", field=FLAG) from error
        return context


def find_access(kubeconfig: Path | None, environment: Mapping[str, str] = os.environ) -> KubernetesAccess:
    """Find the API: by a kubeconfig, as a pod does, or as `kubectl` does.

    Args:
        kubeconfig: The file of the flag; None = none given.
        environment: Of the process.

    Raises:
        ConfigError: There is no way, or it cannot be read; says what was looked for.
    """
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig)
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if host:
        return from_service_account(f"https://{bracketed(host)}:{port}")
    named = environment.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if os.pathsep in named:
        raise ConfigError("KUBECONFIG names several files: give one of them with --kubeconfig", field=FLAG)
    if not Path(named).is_file():
        raise ConfigError(
            f"this process is not in a Kubernetes pod, and there is no {named}: give --kubeconfig", field=FLAG
        )
    return from_kubeconfig(Path(named))


def from_service_account(server: str, folder: Path = SERVICE_ACCOUNT) -> KubernetesAccess:
    """Return the access of this pod's service account.

    Raises:
        ConfigError: It has none that it may use.
    """
    namespace = read_file(folder / "namespace", flag=FLAG, max_bytes=4096).decode("ascii", "replace").strip()
    return KubernetesAccess(
        _checked(server), namespace, TokenFile(folder / "token", secret=False), FollowedTls(folder / "ca.crt")
    )


def from_kubeconfig(path: Path) -> KubernetesAccess:
    """Return the access of a kubeconfig's current context: tokens and certificates, no programs that fetch them.

    Raises:
        ConfigError: It cannot be read, or wants what is not supported.
    """
    document = read_yaml(path, flag=FLAG, max_bytes=MAX_KUBECONFIG_BYTES)
    current = document.get("current-context") if isinstance(document, dict) else None
    if not current:
        raise ConfigError(f"{path} has no current-context", field=FLAG)
    context = _named(path, document, "contexts", "context", current)
    cluster = _named(path, document, "clusters", "cluster", context.get("cluster"))
    user = _named(path, document, "users", "user", context["user"]) if context.get("user") else {}
    for wanted in ("exec", "auth-provider", "username"):
        if wanted in user:
            raise ConfigError(
                f"{path}: the user of {current!r} logs in by {wanted!r}, which needs kubectl: run `kubectl proxy`, and"
                " give a kubeconfig whose server is http://127.0.0.1:8001",
                field=FLAG,
            )
    for wanted in ("proxy-url", "tls-server-name"):
        if wanted in cluster:
            raise ConfigError(f"{path}: {wanted} of a cluster is not supported", field=FLAG)
    server = _checked(str(cluster.get("server", "")))
    token: TokenFile | str = str(user.get("token", ""))[:MAX_TOKEN_BYTES]
    if "tokenFile" in user:
        token = TokenFile(path.parent / str(user["tokenFile"]))
    certificate, key = _part(path, user, "client-certificate"), _part(path, user, "client-key")
    tls = None
    if server.startswith("https:"):
        own = (certificate, key) if certificate is not None and key is not None else None
        anybody = cluster.get("insecure-skip-tls-verify") is True
        tls = FollowedTls(_part(path, cluster, "certificate-authority"), own, anybody)
    return KubernetesAccess(server, str(context.get("namespace") or "default"), token, tls)


def _named(path: Path, document: Mapping[str, Any], listed: str, kind: str, name: Any) -> Mapping[str, Any]:
    entries = document.get(listed)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("name") == name and isinstance(entry.get(kind), Mapping):
            found: Mapping[str, Any] = entry[kind]
            return found
    raise ConfigError(f"{path} has no {kind} named {name!r}", field=FLAG)


def _part(path: Path, entry: Mapping[str, Any], key: str) -> Path | bytes | None:
    if f"{key}-data" in entry:
        try:
            return base64.b64decode(str(entry[f"{key}-data"]), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{path}: {key}-data is not base64", field=FLAG) from error
    return path.parent / str(entry[key]) if key in entry else None


def _checked(server: str) -> str:
    if problem := url_problem(server):
        raise ConfigError(f"the server of the Kubernetes API {problem}", field=FLAG)
    return server.rstrip("/")


def _content(part: Path | bytes) -> bytes:
    return part if isinstance(part, bytes) else read_file(part, flag=FLAG, max_bytes=MAX_PEM_BYTES)
