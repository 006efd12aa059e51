"""How the API is reached: as a pod with files that are renewed, or by a kubeconfig."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml
from support.kubernetes_api import PODS, fake_api

from kvscout_common.errors import ConfigError
from kvscout_common.identity import client_security
from kvscout_common.kubernetes import access
from kvscout_common.kubernetes.access import FollowedTls, KubernetesAccess, find_access, from_service_account

Save = Callable[[dict[str, Any]], Path]


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(document: dict[str, Any]) -> Path:
        (tmp_path / "config").write_text(yaml.safe_dump(document))
        return tmp_path / "config"

    return write


def config(server: str, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "prod"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
    }


async def status(found: KubernetesAccess) -> int:
    async with aiohttp.ClientSession() as http:
        url = found.server + PODS
        async with http.get(url, headers=found.headers(), ssl=found.ssl()) as response:
            return response.status


async def test_a_pods_token_and_ca_are_those_that_its_files_hold_now(
    tmp_path: Path, authority: trustme.CA, server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_security, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(access, "POLL_SECONDS", 0.0)
    (tmp_path / "namespace").write_text("prod\n")
    (tmp_path / "token").write_text("first\n")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    async with fake_api(server_tls) as api:
        api.token = "second"
        found = from_service_account(api.url, tmp_path)
        assert found.namespace == "prod"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(found)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        assert await status(found) == 401
        (tmp_path / "token").write_text("second\n")
        assert await status(found) == 200
        (tmp_path / "ca.crt").write_text("rubbish")
        assert await status(found) == 200, "the last good one stays"


async def test_a_kubeconfig_shows_a_token_or_a_certificate(
    save: Save, authority: trustme.CA, server_tls: ssl.SSLContext, tmp_path: Path
) -> None:
    ca = base64.b64encode(authority.cert_pem.bytes()).decode()
    async with fake_api(server_tls) as api:
        api.token = "secret"
        (tmp_path / "token").write_text("secret")
        for user in ({"token": "secret"}, {"tokenFile": "token"}):
            found = find_access(save(config(api.url, {"certificate-authority-data": ca}, user)))
            assert (found.namespace, await status(found)) == ("prod", 200)
        anybody = find_access(save(config(api.url, {"insecure-skip-tls-verify": True}, {"token": "secret"})))
        assert await status(anybody) == 200
    authority.configure_trust(server_tls)
    server_tls.verify_mode = ssl.CERT_REQUIRED
    own = authority.issue_cert("somebody")
    user = {
        "client-certificate-data": base64.b64encode(own.cert_chain_pems[0].bytes()).decode(),
        "client-key-data": base64.b64encode(own.private_key_pem.bytes()).decode(),
    }
    async with fake_api(server_tls) as api:
        assert await status(find_access(save(config(api.url, {"certificate-authority-data": ca}, user)))) == 200


async def test_a_kubectl_proxy_is_an_api_as_good_as_any(save: Save) -> None:
    async with fake_api() as api:
        assert await status(find_access(save(config(api.url)))) == 200


def test_a_process_in_a_pod_is_known_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access.from_service_account, "__defaults__", (tmp_path,))
    with pytest.raises(ConfigError, match=r"cannot read .*namespace"):
        find_access(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"})
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"not in a Kubernetes pod, and there is no .*kube/config"):
        find_access(None, {})
    with pytest.raises(ConfigError, match="several files"):
        find_access(None, {"KUBECONFIG": "a:b"})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "current-context"),
        ({"current-context": "x"}, "no context named 'x'"),
        (config("http://h") | {"clusters": 7}, "no cluster named 'c'"),
        (config("ftp://h"), "not an http"),
        (config("http://u:p@h"), "must not name a user"),
        (config("http://h", user={"exec": {"command": "gke-gcloud-auth-plugin"}}), "kubectl proxy"),
        (config("http://h", {"proxy-url": "http://p"}), "proxy-url"),
        (config("https://h", {"certificate-authority-data": "%%%"}), "not base64"),
        (config("https://h", {"certificate-authority": "missing.pem"}), "cannot read"),
        (config("https://h", {"certificate-authority-data": base64.b64encode(b"x").decode()}), "PEM"),
    ],
)
def test_a_wrong_kubeconfig_is_refused_by_the_name_of_its_flag(save: Save, document: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        find_access(save(document))
    assert refused.value.field == "kubeconfig"


def test_a_ca_of_the_machine_is_the_default() -> None:
    assert FollowedTls(None).context().verify_mode is ssl.CERT_REQUIRED
