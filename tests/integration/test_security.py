"""A real process with TLS and tokens, called as clients of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import Running, eventually, running

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import PermissionDenied, Unauthenticated, Unavailable
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc.channel import call, open_channel, stream

TIMEOUT = 30.0


@pytest.fixture
def secured(tmp_path: Path) -> tuple[list[str], dict[str, ClientSecurity]]:
    """Flags of a server with TLS and tokens, and clients of several kinds by name."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "server.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other-ca.pem")
    tokens = {"admin": "of-the-admin", "team": "of-the-team", "stranger": "of-nobody"}
    for name, token in tokens.items():
        (tmp_path / f"{name}.token").write_text(token + "\n")
    (tmp_path / "tokens.yaml").write_text(
        "tokens:\n"
        f"  - {{token: {tokens['admin']}, role: admin, tenant: '*'}}\n"
        f"  - {{token: {tokens['team']}, role: viewer, tenant: team}}\n"
    )
    flags = [
        "--tls-cert", str(tmp_path / "server.pem"),
        "--tls-key", str(tmp_path / "server.key"),
        "--auth-tokens", str(tmp_path / "tokens.yaml"),
    ]  # fmt: skip
    ca = tmp_path / "ca.pem"
    clients = {name: ClientSecurity(ca=ca, token_file=tmp_path / f"{name}.token") for name in tokens}
    clients["anonymous"] = ClientSecurity(ca=ca)
    clients["plaintext"] = ClientSecurity()
    clients["distrustful"] = ClientSecurity(ca=tmp_path / "other-ca.pem", token_file=tmp_path / "admin.token")
    return flags, clients


async def test_tls_and_tokens_let_in_who_has_both(secured: tuple[list[str], dict[str, ClientSecurity]]) -> None:
    flags, clients = secured
    async with running("kvscout_indexer.main", *flags) as process:
        await register(process, clients["admin"])
        for name, refusal in (
            ("anonymous", Unauthenticated),
            ("stranger", Unauthenticated),
            ("team", PermissionDenied),  # a viewer
            ("plaintext", Unavailable),
            ("distrustful", Unavailable),
        ):
            with pytest.raises(refusal):
                await register(process, clients[name])
        # Probes have no token.
        channel = open_channel(process.address, clients["anonymous"])
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close()


async def test_a_token_is_bound_to_its_tenant(secured: tuple[list[str], dict[str, ClientSecurity]]) -> None:
    flags, clients = secured
    async with running("kvscout_indexer.main", *flags) as process:
        await register(process, clients["admin"])
        await register(process, clients["admin"], tenant="team")
        channel = open_channel(process.address, clients["team"])
        stub = indexer_pb2_grpc.IndexerStub(channel)
        own = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(tenant="team"), timeout=TIMEOUT)
        assert [entry.worker.tenant for entry in own.workers] == ["team"]
        for tenant in ("", "other"):
            with pytest.raises(PermissionDenied):
                await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(tenant=tenant), timeout=TIMEOUT)
        # "*" is all tenants that the caller may see.
        seen = await call(stub.ListWorkers, workers_pb2.ListWorkersRequest(tenant="*"), timeout=TIMEOUT)
        assert [entry.worker.tenant for entry in seen.workers] == ["team"]
        status = await call(stub.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=TIMEOUT)
        assert [index.tenant for index in status.indexes] == ["team"]
        # Elsewhere "*" is not narrowed, and refused.
        with pytest.raises(PermissionDenied):
            [batch async for batch in stream(stub.Dump, indexer_pb2.DumpRequest(tenant="*"), timeout=TIMEOUT)]
        await channel.close()


async def register(process: Running, security: ClientSecurity, tenant: str = "") -> None:
    """Registers a worker as a client of this kind."""
    channel = open_channel(process.address, security)
    worker = workers_pb2.Worker(worker_id="w", model="m", block_size=16)
    request = workers_pb2.RegisterWorkerRequest(worker=worker, tenant=tenant)
    try:
        await call(indexer_pb2_grpc.IndexerStub(channel).RegisterWorker, request, timeout=TIMEOUT)
    finally:
        await channel.close()


async def test_what_is_wrong_with_a_worker_is_told_to_its_own_tenant_only(tmp_path: Path) -> None:
    roles = {"admin": ("admin", "*"), "ours": ("viewer", "ours"), "theirs": ("viewer", "theirs")}
    entries = [f"{{token: of-{name}, role: {role}, tenant: '{tenant}'}}" for name, (role, tenant) in roles.items()]
    (tmp_path / "tokens.yaml").write_text(f"tokens: [{', '.join(entries)}]")
    channels = {}
    flags = ("--auth-tokens", str(tmp_path / "tokens.yaml"))
    async with running("kvscout_indexer.main", *flags) as process:
        for name in roles:
            (tmp_path / name).write_text(f"of-{name}")
            channels[name] = open_channel(process.address, ClientSecurity(token_file=tmp_path / name))
        worker = workers_pb2.Worker(
            worker_id="w", model="m", tenant="theirs", block_size=4, http_endpoint="http://127.0.0.1:9"
        )
        stub = indexer_pb2_grpc.IndexerStub(channels["admin"])
        await call(stub.RegisterWorker, workers_pb2.RegisterWorkerRequest(tenant="theirs", worker=worker))

        async def told(name: str) -> list[str]:
            asked = types_pb2.GetStatusRequest(tenant="*")
            answer = await call(indexer_pb2_grpc.IndexerStub(channels[name]).GetStatus, asked, timeout=TIMEOUT)
            return [text for text in answer.service.warnings if "worker w" in text]

        async def known() -> bool:
            return bool(await told("admin"))

        await eventually(known, what="that the engine does not answer")
        assert [len(await told(name)) for name in roles] == [1, 0, 1]
        for channel in channels.values():
            await channel.close()
