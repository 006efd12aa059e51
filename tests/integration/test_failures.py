"""What goes wrong with requests of real services: what doctor says first, the counters, and the rows of the list."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from support import scheduler_policy_plugin
from support.gateway_stack import MODEL, GatewayClient, connected, fresh_prompt, mocker_worker
from support.mocker_process import running_mocker
from support.openai_stack import breaks, engine, hangs, says, streams
from support.processes import DEADLINE_SECONDS, Running, eventually, running

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_client import Failure, FaultOwner, Router
from kvscout_common.doctor.collection import Collection, NamedService
from kvscout_common.doctor.diagnosis import Finding, diagnose
from kvscout_common.doctor.overview import Overview, overview
from kvscout_common.doctor.request_checks import FEW
from kvscout_common.doctor.snapshot import ServiceKind, Snapshot
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.rpc.channel import call

REQUESTS = 2 * FEW
PATIENT = ("--indexer-timeout-ms", "2000", "--scheduler-timeout-ms", "3000")
TESTS = Path(__file__).resolve().parents[1]


class World:
    """A gateway, its HTTP port and its client."""

    def __init__(self, gateway: Running, client: GatewayClient, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.client = client
        self.http = http
        self.url = f"http://127.0.0.1:{gateway.ready['http_port']}"

    async def complete(self, prompt: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, str]:
        """Status of a completion over HTTP, and why it was degraded; "" = it was not."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-kvscout-degraded", "")

    async def snapshot(self) -> Snapshot:
        """What all services say of themselves."""
        named = [NamedService(self.gateway.address, ServiceKind.GATEWAY)]
        return await Collection(PLAINTEXT, timeout_seconds=DEADLINE_SECONDS).snapshot(named, engines=False)

    async def doctor(self) -> Finding:
        """The first thing that doctor says."""
        findings = diagnose(await self.snapshot())
        assert findings
        return findings[0]

    async def overview(self) -> Overview:
        """What `status` and `top` show."""
        return overview(await self.snapshot())

    async def failures(self, **wanted: Any) -> list[Failure]:
        """The list, of all tenants."""
        async with Router(self.gateway.address, tenant="*") as router:
            return await router.failures(**wanted)

    async def counts(self) -> dict[tuple[str, bool], int]:
        """How many there were, by cause and whether they were answered."""
        status = await call(self.client.stub.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=20)
        return {(one.cause, one.answered): one.total for one in status.failure_counts}


@asynccontextmanager
async def world(gateway: Running, scheduler: Running, indexer: Running) -> AsyncIterator[World]:
    """What tests ask of running services."""
    async with (
        connected(gateway, scheduler, indexer) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_SECONDS)) as http,
    ):
        yield World(gateway, client, http)


@asynccontextmanager
async def serving(*flags: str, environment: dict[str, str] | None = None) -> AsyncIterator[World]:
    """The same of `kvscout serve`."""
    async with running("kvscout_serve.main", *flags, environment=environment) as served:
        async with world(served, served, served) as made:
            yield made


@asynccontextmanager
async def with_services(*scheduler_flags: str, environment: dict[str, str]) -> AsyncIterator[World]:
    """The same of three services."""
    async with AsyncExitStack() as stack:
        indexer = await stack.enter_async_context(running("kvscout_indexer.main"))
        scheduler = await stack.enter_async_context(
            running("kvscout_scheduler.main", *scheduler_flags, environment=environment)
        )
        flags = ("--indexer", indexer.address, "--scheduler", scheduler.address, *PATIENT)
        gateway = await stack.enter_async_context(running("kvscout_gateway.main", *flags))
        yield await stack.enter_async_context(world(gateway, scheduler, indexer))


async def kvscout(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(2 * DEADLINE_SECONDS):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.fixture
def policies(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that have the policies of another package."""
    scheduler_policy_plugin.install(tmp_path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(TESTS)))}


def raised_in(policy: type, method: str) -> str:
    """Where a policy raises: file and line."""
    lines, first = inspect.getsourcelines(getattr(policy, method))
    offset = next(number for number, line in enumerate(lines) if "raise " in line)
    return f"scheduler_policy_plugin.py:{first + offset}"


@pytest.mark.parametrize("start", [serving, with_services])
async def test_a_policy_that_always_raises_costs_no_request_and_is_named_first_everywhere(
    start: Any, policies: dict[str, str]
) -> None:
    async with start("--router-mode", "always-raising", environment=policies) as made, running_mocker() as mocker:
        await made.client.register(mocker_worker("w0", mocker))
        for _ in range(REQUESTS):
            assert await made.complete(fresh_prompt(32).tolist()) == (200, "policy")
        generated = await made.client.generate(fresh_prompt(32))
        assert generated.route.degraded
        routed = await made.client.route(fresh_prompt(32), request_id="by-hand")
        assert routed.booked
        place = raised_in(scheduler_policy_plugin.AlwaysRaising, "costs")
        line = f"policy 'always-raising': KeyError: 'no such column' ({place})"
        assert routed.degraded_reasons == [f"policy failed: {line}"]
        selected = await call(
            made.client.scheduler.Select,
            scheduler_pb2.SelectRequest(model=MODEL, isl_tokens=32, explain=True),
            timeout=20,
        )
        assert (selected.policy_problem, selected.explanation.policy) == (line, "kv-time")

        first = await made.doctor()
        assert (first.id, first.severity.value) == ("policy-failing", "error")
        assert any(
            "'always-raising'" in one and f"KeyError: 'no such column' ({place})" in one for one in first.evidence
        )
        shown = await made.overview()
        assert not shown.well
        assert shown.troubles[0].startswith("policy-failing: policy 'always-raising'")
        assert shown.failed == {"caller": 0, "engine": 0, "router": 0}
        assert await made.counts() == {("policy", True): REQUESTS + 2}
        rows = await made.failures(cause="policy", answered=True)
        assert [one.front for one in rows] == ["Route", "Generate", *["/v1/completions"] * REQUESTS]
        assert all((one.owner, one.worker_ids) == (FaultOwner.ROUTER, ("w0",)) for one in rows)
        assert all(line in one.message for one in rows)
        assert await made.failures() == []

        where = ("--gateway", made.gateway.address)
        code, text = await kvscout("status", *where)
        assert code == 1
        assert "policy-failing: policy 'always-raising'" in text
        _, text = await kvscout("top", "--once", "--interval", "0.1", *where)
        assert "policy-failing" in text
        assert "all well" not in text


async def test_a_policy_that_sometimes_raises_is_reported_with_how_often(policies: dict[str, str]) -> None:
    async with serving("--router-mode", "raising", environment=policies) as made, running_mocker() as mocker:
        await made.client.register(mocker_worker("w0", mocker))
        degraded = 0
        while degraded < FEW:
            answer = await made.client.generate(fresh_prompt(32))
            degraded += answer.route.degraded
        first = await made.doctor()
        assert first.id == "policy-failing"
        assert any(f"failed {degraded:,} times" in one and "out of ideas" in one for one in first.evidence)
        assert await made.counts() == {("policy", True): degraded}


async def test_one_failure_of_a_policy_is_no_finding(policies: dict[str, str]) -> None:
    async with serving(environment=policies) as made, running_mocker() as mocker:
        await made.client.register(mocker_worker("w0", mocker))
        override = types_pb2.RouterConfigOverride(policy="always-raising")
        answer = await made.client.generate(fresh_prompt(32), router_config_override=override)
        assert answer.route.degraded
        assert "policy-failing" not in {finding.id for finding in diagnose(await made.snapshot())}
        assert (await made.overview()).troubles == ()
        assert len(await made.failures(answered=True)) == 1


async def test_engines_that_tokenize_too_slowly_are_named_with_the_source() -> None:
    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            await hangs(request)
        return web.json_response({"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})

    async with serving("--no-kv-events", "--tokenize-timeout-ms", "20") as made, engine(answer) as slow:
        await made.client.register(worker("w0", slow.url))
        for _ in range(REQUESTS):
            assert await made.complete("a prompt of text") == (200, "tokenizer")
        first = await made.doctor()
        assert first.id == "tokens-late"
        assert f"the engine's tokenize of model {MODEL!r} did not have the tokens of {REQUESTS} of" in first.evidence[0]
        assert await made.counts() == {("tokens", True): REQUESTS}
        assert "requests-degraded" not in {finding.id for finding in diagnose(await made.snapshot())}
        rows = await made.failures(cause="tokens", answered=True)
        assert len(rows) == REQUESTS
        assert all("placed without: tokenizer" in one.message or "tokenize" in one.message for one in rows)


async def test_prompts_that_no_source_has_tokens_of_are_degraded_requests() -> None:
    async with serving("--tokenize-timeout-ms", "0") as made, running_mocker() as mocker:
        await made.client.register(mocker_worker("w0", mocker))
        for _ in range(REQUESTS):
            assert (await made.complete("a prompt of text"))[0] == 200
        first = await made.doctor()
        assert first.id == "requests-degraded"
        assert f"{REQUESTS} of {REQUESTS} requests" in first.evidence[0]
        assert "were placed without tokens" in first.evidence[0]


async def hanging(request: web.Request, _: bytes) -> web.StreamResponse:
    """An engine that is well, and never completes anything."""
    if request.path == "/v1/completions":
        await hangs(request)
    return web.json_response({})


def worker(worker_id: str, url: str, **fields: Any) -> workers_pb2.Worker:
    """A worker whose events nobody reads."""
    return workers_pb2.Worker(
        worker_id=worker_id,
        model=MODEL,
        block_size=16,
        dp_size=1,
        http_endpoint=url,
        engine=workers_pb2.ENGINE_KIND_VLLM,
        **fields,
    )


@pytest.mark.parametrize(
    ("script", "status", "cause", "finding"),
    [
        (says(b'{"error": {"message": "CUDA out of memory"}}', 500), 500, "refused", "requests-failing"),
        (says(b'{"error": {"message": "too many"}}', 429), 429, "overload", "requests-failing"),
        (streams(then=breaks), 503, "worker", "requests-failing"),
    ],
)
async def test_failures_of_an_engine_are_listed_by_class_with_their_worker(
    script: Any, status: int, cause: str, finding: str
) -> None:
    async with serving() as made, engine(script) as broken:
        await made.client.register(worker("w0", broken.url))
        for _ in range(REQUESTS):
            got, _ = await made.complete(fresh_prompt(32).tolist(), stream=True)
            assert got == status
        assert finding in {found.id for found in diagnose(await made.snapshot())}
        assert await made.counts() == {(cause, False): REQUESTS}
        rows = await made.failures(owner=FaultOwner.ENGINE, worker_id="w0")
        assert [(one.cause, one.status, one.worker_ids) for one in rows] == [(cause, str(status), ("w0",))] * REQUESTS
        assert all("CUDA" not in one.message for one in rows), "engines quote prompts in what they say"
        assert (await made.overview()).failed == {"caller": 0, "engine": REQUESTS, "router": 0}


async def test_a_request_that_another_worker_ran_is_listed_as_answered_with_both() -> None:
    async with serving() as made, engine(says(b"{}", 500)) as broken, running_mocker() as mocker:
        await made.client.register(worker("w0", broken.url))
        await made.client.register(mocker_worker("w1", mocker))

        async def moved() -> bool:
            await made.client.generate(fresh_prompt(32))
            return bool(await made.failures(answered=True, cause="refused"))

        await eventually(moved, what="a request that moved")
        (one,) = (await made.failures(answered=True, cause="refused"))[:1]
        assert (one.answered, one.owner, one.worker_ids, one.status) == (True, FaultOwner.ENGINE, ("w0", "w1"), "")
        assert await made.failures() == []


async def refused(made: World, **request: Any) -> Failure:
    """The row of a request that is refused, the newest one."""
    before = await made.failures(limit=1)
    await made.complete(**{"prompt": fresh_prompt(32).tolist(), **request})

    async def newer() -> Failure | None:
        newest = await made.failures(limit=1)
        return newest[0] if newest != before else None

    row: Failure = await eventually(newer, what="the failure listed")
    return row


async def test_each_refusal_has_its_cause_and_owner() -> None:
    flags = ("--no-kv-events", "--router-queue-threshold", "0.5", "--router-queue-limit", "1")
    async with serving(*flags) as made, engine(hanging) as slow:
        await made.client.register(worker("w0", slow.url, max_num_batched_tokens=64))
        one = await refused(made, model="no-such-model")
        assert (one.cause, one.owner, one.status) == ("unknown", FaultOwner.CALLER, "404")
        one = await refused(made, headers={"x-kvscout-deadline-ms": "soon"})
        assert (one.cause, one.owner, one.status) == ("request", FaultOwner.CALLER, "400")
        # One runs, one waits, and there is no place for a third.
        calls = [made.client.start(fresh_prompt(64), max_tokens=50)]
        await made.client.until_active()
        calls.append(made.client.start(fresh_prompt(64), max_tokens=50))

        async def waits() -> bool:
            answer = await call(made.client.scheduler.GetStatus, types_pb2.GetStatusRequest(), timeout=20)
            return sum(pool.queued for pool in answer.pools) == 1

        await eventually(waits, what="a request that waits")
        for _ in range(FEW):
            one = await refused(made)
            assert (one.cause, one.owner, one.status) == ("queue", FaultOwner.ROUTER, "429")
        with pytest.raises(grpc.aio.AioRpcError):
            await made.client.generate(fresh_prompt(64))
        (one,) = await made.failures(limit=1)
        assert (one.cause, one.front, one.status) == ("queue", "Generate", "RESOURCE_EXHAUSTED")
        first = await made.doctor()
        assert first.id == "requests-refused"
        assert "failed (queue)" in first.evidence[0]
        for each in calls:
            each.cancel()
        await made.client.until_idle()

        async def gone() -> bool:
            return bool(await made.failures(cause="gone"))

        await eventually(gone, what="clients that went away")
        one = (await made.failures(cause="gone"))[0]
        assert (one.owner, one.status) == (FaultOwner.CALLER, "")
        await call(made.client.stub.DrainWorker, workers_pb2.DrainWorkerRequest(worker_id="w0"), timeout=20)
        for _ in range(FEW):
            one = await refused(made)
            assert (one.cause, one.owner, one.status) == ("unserved", FaultOwner.ROUTER, "503")
        assert (await made.doctor()).id == "requests-unserved"


async def test_deadlines_and_busy_workers_are_the_routers_and_limits_of_tenants_the_callers(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    entries = [
        {"token": "secret-of-an-operator", "role": "admin", "tenant": "*"},
        {"token": "secret-of-a-team", "role": "client", "tenant": "team"},
    ]
    tokens.write_text(json.dumps({"tokens": entries, "limits": [{"tenant": "team", "requests": 0}]}))
    token_file = tmp_path / "token"
    token_file.write_text("secret-of-an-operator")
    for file in (tokens, token_file):
        file.chmod(0o600)
    async with running("kvscout_serve.main", "--auth-tokens", str(tokens)) as served, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{served.ready['http_port']}/v1/completions"
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
        for key, status in (("secret-of-a-team", 429), ("no-such-secret", 401)):
            for _ in range(FEW):
                async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                    assert answer.status == status
        where = ("--gateway", served.address, "--token-file", str(token_file))
        _, text = await kvscout("failures", "--json", *where)
        rows = json.loads(text)
        assert [(one["cause"], one["owner"], one["tenant"], one["status"]) for one in rows] == [
            *[("key", "caller", "", "401")] * FEW,
            *[("limit", "caller", "team", "429")] * FEW,
        ]
        _, text = await kvscout("failures", "--cause", "limit", *where)
        assert text.count("tenant 'team' has 0 requests, its limit is 0") == FEW
        code, text = await kvscout("doctor", *where)
        assert code == 1
        assert "tenant-limited" in text
        token_file.write_text("secret-of-a-team")
        _, text = await kvscout("failures", "--json", *where)
        assert {one["tenant"] for one in json.loads(text)} == {"team"}, "a tenant sees its own alone"
        # What a client asks for besides requests is no failure, nor is what scanners try.
        async with http.get(f"http://127.0.0.1:{served.ready['http_port']}/favicon.ico") as answer:
            assert answer.status == 401
        token_file.write_text("secret-of-an-operator")
        _, text = await kvscout("failures", "--json", *where)
        assert len(json.loads(text)) == 2 * FEW


async def test_busy_workers_are_the_routers_failure() -> None:
    async with serving("--no-kv-events") as made, engine(hanging) as slow:
        await made.client.register(worker("w0", slow.url))
        request = types_pb2.SetBusyThresholdsRequest(model=MODEL, active_prefill_tokens_threshold=1)
        await call(made.client.stub.SetBusyThresholds, request, timeout=20)
        running_call = made.client.start(fresh_prompt(4_000), max_tokens=500)
        await made.client.until_active()
        for _ in range(FEW):
            one = await refused(made)
            assert (one.cause, one.owner, one.status) == ("busy", FaultOwner.ROUTER, "429")
        assert (await made.doctor()).id == "requests-refused"
        running_call.cancel()


async def test_an_answer_that_takes_too_long_is_the_engines_failure() -> None:
    async with serving("--engine-answer-seconds", "1") as made, engine(hanging) as slow:
        await made.client.register(worker("w0", slow.url))
        prompt = fresh_prompt(32).tolist()
        answers = await asyncio.gather(*(made.complete(prompt) for _ in range(REQUESTS)))
        assert {status for status, _ in answers} == {504}
        rows = await made.failures(owner=FaultOwner.ENGINE)
        assert len(rows) == REQUESTS
        assert {(one.cause, one.status, one.worker_ids) for one in rows} == {("time", "504", ("w0",))}
        assert "requests-failing" in {found.id for found in diagnose(await made.snapshot())}


async def test_a_client_that_closes_its_connection_is_a_callers_failure() -> None:
    slow = ("--speedup", "1", "--step-base-ms", "200")
    async with serving() as made, running_mocker(*slow) as mocker:
        await made.client.register(mocker_worker("w0", mocker))
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 500, "stream": True}
        async with made.http.post(f"{made.url}/v1/completions", json=body, headers={"x-request-id": "r-1"}) as answer:
            await answer.content.readany()
            answer.close()

        async def listed() -> bool:
            return bool(await made.failures(cause="gone"))

        await eventually(listed, what="a client that went away")
        (one,) = await made.failures()
        assert (one.request_id, one.owner, one.status) == ("r-1", FaultOwner.CALLER, "")
        assert (one.front, one.worker_ids) == ("/v1/completions", ("w0",))
        assert (await made.overview()).troubles == ()


async def test_a_deadline_that_passes_is_the_routers_failure() -> None:
    async with serving("--router-queue-threshold", "0.5") as made, engine(hanging) as slow:
        await made.client.register(worker("w0", slow.url, max_num_batched_tokens=64))
        call_ = made.client.start(fresh_prompt(64), max_tokens=500)
        await made.client.until_active()
        one = await refused(made, headers={"x-kvscout-deadline-ms": "50"})
        assert (one.cause, one.owner, one.status) == ("deadline", FaultOwner.ROUTER, "504")
        call_.cancel()


async def test_the_list_comes_in_pages_and_goes_on_from_a_number() -> None:
    async with serving() as made:
        for _ in range(5):
            await made.complete([1, 2, 3], model="no-such-model")
        stub = made.client.stub
        request = gateway_pb2.ListFailuresRequest(page_size=2)
        numbers = []
        while True:
            page = await call(stub.ListFailures, request, timeout=20)
            assert page.total == 5
            numbers.append([one.number for one in page.failures])
            request.page_token = page.next_page_token
            if not request.page_token:
                break
        assert numbers == [[5, 4], [3, 2], [1]]
        newer = await call(stub.ListFailures, gateway_pb2.ListFailuresRequest(after_number=3), timeout=20)
        assert [one.number for one in newer.failures] == [5, 4]
        with pytest.raises(Exception, match="page_token"):
            await call(stub.ListFailures, gateway_pb2.ListFailuresRequest(page_token="x"), timeout=20)


async def test_failures_are_followed_as_they_happen() -> None:
    async with serving() as made:
        await made.complete([1], model="before")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvscout_cli.main", "failures", "--follow", "--json"),
            *("--gateway", made.gateway.address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(process.stdout.readline())
        number = 0
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            while not reading.done():
                number += 1
                await made.complete([1], model=f"after-{number}")
                await asyncio.wait([reading], timeout=0.5)
        one = json.loads(reading.result())
        assert one["model"].startswith("after-")
        assert one["cause"] == "unknown"
        process.terminate()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await process.wait()
