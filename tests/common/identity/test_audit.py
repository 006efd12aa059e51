"""Whoever changes what others get leaves a line; who only asks leaves none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.grpc_server import serving

from kvscout.v1 import indexer_pb2_grpc, workers_pb2
from kvscout_common.errors import NotFound
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.observability.log_lines import BURST_LINES, RateFilter


class Workers(indexer_pb2_grpc.IndexerServicer):
    """Knows the worker "a"."""

    async def RemoveWorker(self, request: Any, context: Any) -> workers_pb2.RemoveWorkerResponse:
        if request.worker_id != "a":
            raise NotFound("nobody")
        return workers_pb2.RemoveWorkerResponse()

    async def ListWorkers(self, request: Any, context: Any) -> workers_pb2.ListWorkersResponse:
        return workers_pb2.ListWorkersResponse()


@pytest.fixture
def tokens(tmp_path: Path) -> TokenTable:
    file = tmp_path / "tokens.yaml"
    file.write_text(
        "tokens:\n"
        '- {token: alices, role: admin, tenant: "*", name: alice}\n'
        "- {token: nobodys, role: worker, tenant: team}\n"
        "- {token: clients, role: client, tenant: team}\n"
    )
    file.chmod(0o600)
    return TokenTable.load(file)


async def test_a_change_is_told_with_who_what_and_how_it_ended(
    tokens: TokenTable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvscout.audit")
    workers: Any = Workers()  # type: ignore[abstract]  # rpcs without a method answer UNIMPLEMENTED
    add = lambda server: indexer_pb2_grpc.add_IndexerServicer_to_server(workers, server)  # noqa: E731
    async with serving(add, tokens=tokens) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        for token, worker_id in (("alices", "a"), ("nobodys", "b\nforged line"), ("clients", "a")):
            request = workers_pb2.RemoveWorkerRequest(tenant="team", worker_id=worker_id)
            calling = stub.RemoveWorker(request, metadata=(("authorization", f"Bearer {token}"),))
            assert (await calling.code() is grpc.StatusCode.OK) is (token == "alices")
        await stub.ListWorkers(workers_pb2.ListWorkersRequest(), metadata=(("authorization", "Bearer alices"),))
    lines = [record.getMessage() for record in caplog.records if record.name == "kvscout.audit"]
    assert lines == [
        "RemoveWorker by alice (admin of tenant *), tenant team, worker_id a: OK",
        "RemoveWorker by an unnamed token (worker of tenant team), tenant team, worker_id b\nforged line: NotFound",
    ]  # the formatter of our handlers escapes what would be a line of its own


def test_lines_of_admins_are_all_written_and_those_of_others_rate_limited() -> None:
    passes = RateFilter(clock=lambda: 0.0)
    record = logging.LogRecord("kvscout.audit", logging.INFO, "audit.py", 1, "x", None, None)
    assert sum(passes.filter(record) for _ in range(2 * BURST_LINES)) == BURST_LINES
    record.unlimited = True
    assert all(passes.filter(record) for _ in range(2 * BURST_LINES))


def test_a_name_is_part_of_an_identity(tokens: TokenTable) -> None:
    assert tokens.identify("alices") == Identity(AccessRole.ADMIN, "*", "alice")
    assert tokens.identify("clients").name == ""
