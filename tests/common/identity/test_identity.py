"""Tokens, roles and tenants, on a real server."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.grpc_server import serving

from kvscout.v1 import indexer_pb2, scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from kvscout_common.errors import ConfigError, PermissionDenied, Unauthenticated
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.identity.identity import ALLOWED, AccessRole, TokenTable, current_identity, tenants_of
from kvscout_common.rpc.channel import call

A_TOKEN = "tokens: [{token: a, role: admin}]\n"


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers everything asked here."""

    async def Renew(self, request: Any, context: Any) -> scheduler_pb2.RenewResponse:
        return scheduler_pb2.RenewResponse()

    async def RegisterWorker(self, request: Any, context: Any) -> workers_pb2.RegisterWorkerResponse:
        return workers_pb2.RegisterWorkerResponse(
            worker=workers_pb2.Worker(worker_id=f"{current_identity().role}@{current_identity().tenant}")
        )

    async def Lifecycle(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            yield scheduler_pb2.LifecycleResponse()


def add(server: grpc.aio.Server) -> None:
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(Scheduler(), server)  # type: ignore[abstract]
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenTable:
    path = tmp_path / "tokens.yaml"
    path.write_text(
        "tokens:\n"
        "  - {token: root, role: admin, tenant: '*'}\n"
        "  - {token: team, role: worker, tenant: a}\n"
        "  - {token: app, role: client}\n"
    )
    return TokenTable.load(path)


def presenting(tmp_path: Path, token: str) -> ClientSecurity:
    path = tmp_path / "token"
    path.write_text(token + "\n")
    return ClientSecurity(token_file=path)


def registering(tenant: str, inner: str = "") -> workers_pb2.RegisterWorkerRequest:
    return workers_pb2.RegisterWorkerRequest(tenant=tenant, worker=workers_pb2.Worker(worker_id="w", tenant=inner))


async def test_without_a_table_everybody_is_admitted() -> None:
    async with serving(add) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        answer = await call(stub.RegisterWorker, registering("anything"))
    assert answer.worker.worker_id == "admin@*"


async def test_no_token_and_an_unknown_token_are_unauthenticated(tokens: TokenTable, tmp_path: Path) -> None:
    async with serving(add, tokens=tokens) as channel:
        with pytest.raises(Unauthenticated, match="no bearer token"):
            await call(scheduler_pb2_grpc.SchedulerStub(channel).RegisterWorker, registering(""))
    async with serving(add, tokens=tokens, security=presenting(tmp_path, "guess")) as channel:
        with pytest.raises(Unauthenticated, match="unknown token"):
            await call(scheduler_pb2_grpc.SchedulerStub(channel).RegisterWorker, registering(""))


async def test_a_role_may_call_what_the_table_says_and_nothing_else(tokens: TokenTable, tmp_path: Path) -> None:
    async with serving(add, tokens=tokens, security=presenting(tmp_path, "team")) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        assert (await call(stub.RegisterWorker, registering("a"))).worker.worker_id == "worker@a"
        with pytest.raises(PermissionDenied, match="role worker may not call Renew"):
            await call(stub.Renew, scheduler_pb2.RenewRequest(tenant="a"))


async def test_a_token_reaches_its_own_tenant_only_however_deep_another_is_named(
    tokens: TokenTable, tmp_path: Path
) -> None:
    async with serving(add, tokens=tokens, security=presenting(tmp_path, "team")) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        for request in (registering("b"), registering(""), registering("a", "b")):
            with pytest.raises(PermissionDenied, match="not for tenant"):
                await call(stub.RegisterWorker, request)
    async with serving(add, tokens=tokens, security=presenting(tmp_path, "app")) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        own = scheduler_pb2.RequestRef(request_id="r")
        await call(stub.Renew, scheduler_pb2.RenewRequest(requests=[own]))
        foreign = scheduler_pb2.RequestRef(request_id="r", tenant="a")
        with pytest.raises(PermissionDenied):
            await call(stub.Renew, scheduler_pb2.RenewRequest(requests=[own, foreign]))


async def test_each_message_of_a_stream_is_checked(tokens: TokenTable, tmp_path: Path) -> None:
    async with serving(add, tokens=tokens, security=presenting(tmp_path, "app")) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        foreign = scheduler_pb2.LifecycleOperation(free=scheduler_pb2.RequestRef(tenant="a"))
        messages = [scheduler_pb2.LifecycleRequest(), scheduler_pb2.LifecycleRequest(operations=[foreign])]
        answers = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Lifecycle(iter(messages)):
                answers += 1
    assert (answers, caught.value.code()) == (1, grpc.StatusCode.PERMISSION_DENIED)


async def test_health_needs_no_token(tokens: TokenTable) -> None:
    async with serving(add, tokens=tokens) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_rpc_of_every_service_is_in_some_role() -> None:
    from kvscout.v1 import bridge_pb2, gateway_pb2
    from kvscout_gateway.http.router import ROUTES

    granted = frozenset[str]().union(*ALLOWED.values())
    services = [
        service
        for module in (indexer_pb2, scheduler_pb2, gateway_pb2, bridge_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    # Changing state for everybody, and recording everybody, is the administrator's.
    admin_only = {"ClearCooldowns", "RecordRequests", "ResetWorker", "SetBusyThresholds"}
    methods = {method.name for service in services for method in service.methods}
    assert methods - granted == admin_only
    # What only browsers ask for has a name there, too.
    over_http = {name for methods_of in ROUTES.values() for name in methods_of.values()}
    assert granted <= methods | over_http


def test_tenants_are_found_in_repeated_and_nested_messages() -> None:
    message = scheduler_pb2.LifecycleRequest(
        tenant="outer",
        operations=[
            scheduler_pb2.LifecycleOperation(
                renew=scheduler_pb2.RenewRequest(
                    requests=[scheduler_pb2.RequestRef(tenant="deep"), scheduler_pb2.RequestRef()]
                )
            ),
            scheduler_pb2.LifecycleOperation(select=scheduler_pb2.SelectRequest(tenant="b")),
        ],
    )
    assert list(tenants_of(message)) == ["outer", "deep", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the list 'tokens'"),
        ("tokens: []", "no list 'tokens'"),
        ("tokens: [{role: admin}]", "tokens.0: needs exactly one of token, sha256"),
        ("tokens: [{token: a, role: king}]", "tokens.0.role: must be one of viewer, worker, client, admin"),
        ("tokens: [{token: a, role: admin}, {token: a, role: viewer}]", "tokens.1: the same token twice"),
        (
            "tokens: [{token: a, role: admin, team: b}]",
            "tokens.0: has a key other than name, priority, role, sha256, tenant, token",
        ),
        (
            "tokens: [{token: a, role: admin}]\nroles: []",
            "must have the list 'tokens', beside it 'limits', and nothing else",
        ),
        ("tokens: [{token: a, role: client, priority: -1}]", "tokens.0.priority: must be a whole number from 0"),
        ("tokens: [{token: a, role: client, priority: true}]", "tokens.0.priority: must be a whole number"),
        ("tokens: [{token: 0123, role: admin}]", "tokens.0.token: must be text: put it in quotes"),
        ("tokens: [{sha256: abc, role: admin}]", "tokens.0.sha256: must be 64 hexadecimal digits"),
        ("tokens: [", "cannot read"),
        ("tokens: [{token: a, role: admin}]\nlimits: {}", "limits: must be a list"),
        (f"{A_TOKEN}limits: [a]", "limits.0: has a key other than tenant, requests"),
        (f"{A_TOKEN}limits: [{{tenant: a, cores: 1}}]", "limits.0: has a key other than tenant, requests"),
        (f"{A_TOKEN}limits: [{{streams: 1}}]", "limits.0.tenant: must name a tenant"),
        (f"{A_TOKEN}limits: [{{tenant: a, streams: -1}}]", "limits.0.streams: must be a whole number"),
        (f"{A_TOKEN}limits: [{{tenant: a, workers: yes}}]", "limits.0.workers: must be a whole number"),
        (f"{A_TOKEN}limits: [{{tenant: a}}, {{tenant: a}}]", "limits.1: the tenant 'a' twice"),
    ],
)
def test_a_wrong_tokens_file_names_the_entry_and_not_the_token(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        TokenTable.load(path)


def test_a_token_can_be_given_by_its_digest(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "tokens.yaml"
    path.write_text(f"tokens: [{{sha256: {hashlib.sha256(b'view').hexdigest()}, role: viewer, tenant: a}}]")
    identity = TokenTable.load(path).identify("view")
    assert (identity.role, identity.tenant) == (AccessRole.VIEWER, "a")


def test_a_priority_is_an_entrys_own_and_without_one_only_an_admins(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(
        "tokens: [{token: a, role: admin}, {token: b, role: client}, {token: c, role: client, priority: 7},"
        " {token: d, role: admin, priority: 3}]"
    )
    table = TokenTable.load(path)
    assert [table.identify(token).max_priority for token in "abcd"] == [None, 0, 7, 3]
