"""A real Kubernetes API for tests: etcd and kube-apiserver as children, on free ports, with RBAC.

No kubelet, no scheduler, no controllers: pods get an address and become Ready by a patch of their status, and what is
deleted with a grace period stays until it is deleted without one.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from support.free_ports import free_ports

Object = dict[str, Any]
START_SECONDS = 90.0
MERGE = "application/merge-patch+json"
NODE = "node-1"
_GROUPS = {"v1": "/api/v1"}
_PLURALS = {"NetworkPolicy": "networkpolicies"}
_CLUSTER_WIDE = ("Namespace", "Node", "CustomResourceDefinition")


class Refused(Exception):
    """The API answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Cluster:
    """One cluster, as its administrator.

    Args:
        binaries: Folder with `bin/etcd`, `bin/kube-apiserver` and `inferencepools.yaml`.
    """

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = tempfile.TemporaryDirectory(prefix="kvscout-kubernetes-")
        self.folder = Path(self._folder.name)
        self._port, self._etcd_port, peer = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca = self.folder / "certs" / "apiserver.crt"
        self._token = "administrator"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.folder / "tokens.csv").write_text(f'{self._token},admin,1,"system:masters"\n')
        etcd = f"http://127.0.0.1:{self._etcd_port}"
        data = ("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync")
        peers = ("--listen-peer-urls", f"http://127.0.0.1:{peer}")
        self._run("etcd", "--listen-client-urls", etcd, "--advertise-client-urls", etcd, *data, *peers)
        self.start()

    def start(self) -> None:
        """Starts the API server, again."""
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.ca.parent}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder}/sa.key",
            f"--service-account-signing-key-file={self.folder}/sa.key",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if self.call("GET", "/readyz") == "ok":
                    return
            except (OSError, Refused) as error:
                if time.monotonic() > deadline or self._children["kube-apiserver"].poll() is not None:
                    raise AssertionError((self.folder / "kube-apiserver.log").read_text()[-3000:]) from error
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the API server; what is stored stays."""
        child = self._children.pop("kube-apiserver")
        child.kill()
        child.wait()

    def close(self) -> None:
        """Ends everything."""
        for child in self._children.values():
            child.kill()
            child.wait()
        self._folder.cleanup()

    def call(self, method: str, path: str, body: Any = None, *, token: str = "", kind: str = "application/json") -> Any:
        """One request; what is no JSON is a text.

        Raises:
            Refused: The API answered with an error.
        """
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token or self._token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from error
        return json.loads(text) if text.startswith("{") else text

    def create(self, *objects: Object) -> None:
        """Stores objects; a field that Kubernetes does not know is an error."""
        for one in objects:
            self.call("POST", f"{collection(one)}?fieldValidation=Strict", one)

    def install_pools(self) -> None:
        """Makes InferencePools known."""
        self.create(yaml.safe_load((self._binaries / "inferencepools.yaml").read_text()))
        path = "/apis/inference.networking.k8s.io/v1/inferencepools"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.call("GET", path)
            except Refused:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            else:
                return

    def token_of(self, namespace: str, account: str) -> str:
        """A token of a service account, as a pod gets one."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
        token: str = self.call("POST", path, asked)["status"]["token"]
        return token

    def pod(self, namespace: str, name: str, ip: str, labels: dict[str, str], **ports: int) -> None:
        """Creates a pod that runs and is Ready."""
        declared = [{"name": port, "containerPort": number} for port, number in ports.items()]
        spec = {
            "nodeName": NODE,
            "serviceAccountName": "default",
            "terminationGracePeriodSeconds": 30,
            "containers": [{"name": "engine", "image": "engine", "ports": declared}],
        }
        meta = {"name": name, "namespace": namespace, "labels": labels}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        self.set_ready(namespace, name, True, ip)

    def set_ready(self, namespace: str, name: str, ready: bool, ip: str) -> None:
        """What the kubelet would say of a pod."""
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [condition]}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self.call("PATCH", path, {"status": status}, kind=MERGE)

    def delete_pod(self, namespace: str, name: str, *, at_once: bool = False) -> None:
        """Asks for a pod to be deleted, or ends it as the kubelet does when it has stopped."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.call("DELETE", f"{path}?gracePeriodSeconds=0" if at_once else path)

    def _run(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("ab") as log:
            self._children[program] = subprocess.Popen(
                [self._binaries / "bin" / program, *arguments], stdout=log, stderr=subprocess.STDOUT
            )


def collection(one: Object) -> str:
    """Where objects of this kind and namespace are."""
    version, kind = one["apiVersion"], one["kind"]
    group = _GROUPS.get(version, f"/apis/{version}")
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    if kind in _CLUSTER_WIDE:
        return f"{group}/{plural}"
    return f"{group}/namespaces/{one['metadata']['namespace']}/{plural}"
