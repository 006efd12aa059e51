"""Broken set-ups of real services and engines, and what doctor says of each: the right cause, and no other one."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from support.broken_engines import MuteSocket, altered, between
from support.engine_events import batch, stored
from support.free_ports import free_ports
from support.gateway_stack import MODEL, GatewayClient, connected, fresh_prompt, mocker_worker, together
from support.mocker_process import running_mocker
from support.nats_server import nats_server
from support.processes import DEADLINE_SECONDS, Running, eventually, running
from support.trained_tokenizers import byte_level, save

from kvscout.v1 import workers_pb2
from kvscout_common.doctor.collection import Collection, NamedService
from kvscout_common.doctor.diagnosis import Finding, diagnose
from kvscout_common.doctor.prediction_checks import ENOUGH
from kvscout_common.doctor.snapshot import ServiceKind
from kvscout_common.hashing import native_available
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.process.descriptors import FEW

OF_THIS_MACHINE = {
    *(() if native_available() else ("reference-backend",)),
    *(() if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= FEW else ("descriptors-few",)),
}
NATS = {"nats-unreachable"}
NAMED = re.compile(r"worker ([\w-]+)")


async def findings(gateway: Running, *further: str, security: ClientSecurity = PLAINTEXT) -> list[Finding]:
    """What doctor says now."""
    named = [NamedService(gateway.address, ServiceKind.GATEWAY), *map(NamedService, further)]
    return diagnose(await Collection(security, timeout_seconds=DEADLINE_SECONDS).snapshot(named))


def by_worker(found: Iterable[Finding]) -> dict[str, set[str]]:
    """The findings of each worker."""
    table: dict[str, set[str]] = {}
    for finding in found:
        for evidence in finding.evidence:
            if match := NAMED.search(evidence):
                table.setdefault(match[1], set()).add(finding.id)
    return table


async def until_found(
    look: Callable[[], Awaitable[list[Finding]]], done: Callable[[list[Finding]], bool], what: str
) -> list[Finding]:
    """Looks until what is found is what is expected."""
    last: list[Finding] = []

    async def expected() -> bool:
        nonlocal last
        last = await look()
        return done(last)

    try:
        await eventually(expected, what=what, deadline_seconds=2 * DEADLINE_SECONDS)
    except AssertionError as error:
        said = "\n".join(f"{one.id}: {text}" for one in last for text in one.evidence)
        raise AssertionError(f"{error}\n{said}") from None
    return last


def ids(found: Iterable[Finding]) -> set[str]:
    """What is found that is no fault of the machine that runs the tests."""
    return {finding.id for finding in found} - OF_THIS_MACHINE


class World:
    """A gateway, an indexer, two schedulers that share nothing, and workers each of which is broken in its own way."""

    def __init__(self, gateway: Running, client: GatewayClient) -> None:
        self.gateway = gateway
        self.client = client

    async def serve(self, worker_id: str, prompt: Sequence[int], times: int = 1) -> None:
        """Runs a prompt on a worker, so many times."""
        for _ in range(times):
            await self.client.generate(prompt, max_tokens=1, pinned_worker_id=worker_id)

    async def complete(self, text: str) -> int:
        """The status of a completion of a text over HTTP, wherever it runs."""
        url = f"http://127.0.0.1:{self.gateway.ready['http_port']}/v1/completions"
        body = {"model": MODEL, "prompt": text, "max_tokens": 1}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Starts it, has the workers serve, and their engines say what they say."""
    silent_port, dead_port = free_ports(2)
    tokenizer = save(folder / "tokenizer", byte_level())
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        indexer, scheduler, other, engine, untold = await enter(
            together(
                running("kvscout_indexer.main"),
                # Draws among idle workers, so that each gets its share of what it fails.
                running("kvscout_scheduler.main", "--router-mode", "kv"),
                running("kvscout_scheduler.main", "--router-mode", "kv"),
                running_mocker(),
                running_mocker("--prompt-tokens-details", "never"),
            )
        )
        gateway = await enter(
            running(
                "kvscout_gateway.main",
                *("--indexer", indexer.address, "--scheduler", scheduler.address, "--scheduler", other.address),
                *("--indexer-timeout-ms", "2000", "--engine-health-seconds", "0.2"),
                *("--tokenizer", f"{MODEL}={tokenizer}"),
            )
        )
        made = World(gateway, await enter(connected(gateway, scheduler, indexer)))
        mute, unnamed, garbled = (stack.enter_context(MuteSocket()) for _ in range(3))
        salted = await enter(between(engine.url, lambda body: {**body, "cache_salt": "of the proxy"}))
        failing = await enter(between(engine.url, lambda _: None))
        untrue = await enter(
            between(engine.url, lambda body: body, lambda said: re.sub(rb'("cached_tokens": ?)\d+', rb"\g<1>0", said))
        )
        # Whoever comes later and cannot ask for them lacks the events of this one.
        await engine.complete(list(fresh_prompt(64)), max_tokens=1)
        publishes, replays = engine.ranks[0]["events"], engine.ranks[0]["replay"]

        async def register(
            worker_id: str, *, http: str = engine.url, events: str = publishes, replay: str = replays, **fields: Any
        ) -> None:
            worker = mocker_worker(worker_id, engine, **fields)
            worker.http_endpoint = http
            worker.event_endpoints[0].dp_rank = worker.dp_start_rank
            worker.event_endpoints[0].endpoint = events
            worker.event_endpoints[0].replay_endpoint = replay
            await made.client.register(worker)

        await register("well")
        await register("deaf", events=f"tcp://127.0.0.1:{silent_port}")
        await register("mute", events=mute.endpoint, replay="")
        await register("forgetful", http="", replay="", model="old")  # of one model all would be uncertain
        await register("ranked", dp_start_rank=1)
        await register("sized", block_size=32)
        await register("renamed", model="another")
        await register("gone", http=f"http://127.0.0.1:{dead_port}")
        await register("overfull", total_kv_blocks=2)
        await register("salted", http=salted)
        await register("failing", http=failing)
        await register("untrue", http=untrue)
        await register("astray", http="", transport=workers_pb2.EVENT_TRANSPORT_JETSTREAM, model="old")
        await register("unnamed", http="", events=unnamed.endpoint, replay="", block_size=4)
        await register("garbled", http="", events=garbled.endpoint, replay="", block_size=4)
        await made.client.register(mocker_worker("untold", untold))

        await made.serve("mute", fresh_prompt(64))
        await made.serve("well", fresh_prompt(64), 2)
        await made.serve("salted", fresh_prompt(64), 5)
        await made.serve("untold", prompt := fresh_prompt(64))
        await made.client.until_indexed(prompt, 4, block_size=16)
        await made.serve("untold", prompt, 4)
        await made.serve("untrue", prompt := fresh_prompt(64))
        await made.client.until_indexed(prompt, 4, block_size=16)
        await made.serve("untrue", prompt, ENOUGH)

        # One that fails is left out while there are others, to which what it fails goes.
        async def left_out() -> bool:
            await made.client.generate(fresh_prompt(32), max_tokens=1, allowed_worker_ids=["failing", "well"])
            return any("worker failing/0 fails" in said for said in (await made.client.status()).service.warnings)

        await eventually(left_out, what="the worker that fails left out")
        assert await made.complete("the quick brown fox jumps over the lazy dog " * 8) == 200

        async def said() -> bool:
            unnamed.send(batch(stored([1], range(4), lora_id=7)))
            garbled.send(b"\xc1 is no MessagePack")
            found = await made.client.sources()
            return bool(found["unnamed"].ignored) and found["garbled"].malformed > 0

        await eventually(said, what="what the test's own engines say")
        yield made


async def test_of_engines_that_are_each_broken_in_their_own_way_each_is_told_its_own_cause(tmp_path: Path) -> None:
    expected = {
        "deaf": {"events-unreachable"},
        "mute": {"events-silent", "replay-missing"},
        "forgetful": {"replay-missing", "history-incomplete"},
        "ranked": {"ranks-differ"},
        "sized": {"block-size-differs"},
        "renamed": {"model-differs"},
        "gone": {"engine-unreachable"},
        "overfull": {"removals-lost"},
        "salted": {"hashes-never-match"},
        "unnamed": {"replay-missing", "lora-unnamed"},
        "garbled": {"replay-missing", "events-unreadable"},
        "untold": {"cached-tokens-untold"},
        "failing": {"worker-failing"},
        "untrue": {"predictions-wrong"},
        "astray": {"events-misconfigured"},
    }
    async with world(tmp_path) as made:
        found = await until_found(
            lambda: findings(made.gateway), lambda found: by_worker(found) == expected, "the cause of each"
        )
        assert ids(found) - {"hit-rate-low"} == set().union(*expected.values()) | {"tokens-differ", "replicas-alone"}
        [silent] = [finding for finding in found if finding.id == "events-silent"]
        assert re.search(r"it ran \d requests?, and no KV event ever came from tcp://", silent.evidence[0])
        assert "the engine says that it publishes at tcp://" in silent.evidence[0]
        assert all(finding.what and finding.remedy and finding.evidence for finding in found)


async def test_services_that_are_not_where_or_what_they_should_be_are_told_apart(tmp_path: Path) -> None:
    (dead_port,) = free_ports(1)
    slow = {**os.environ, "KVSCOUT_NATIVE": "0"}
    late = altered(tmp_path / "late", os.environ, clock_ahead=3600)
    async with together(
        running("kvscout_indexer.main", environment=slow), running("kvscout_scheduler.main", environment=late)
    ) as (indexer, scheduler):
        shards = ("--indexer", f"0/2={indexer.address}", "--indexer", f"1/2=127.0.0.1:{dead_port}")
        schedulers = ("--scheduler", indexer.address, "--scheduler", scheduler.address)
        few = altered(tmp_path / "few", os.environ, descriptors=512)
        async with running("kvscout_gateway.main", *shards, *schedulers, environment=few) as gateway:
            expected = {
                "no-workers",
                "service-unreachable",
                "wrong-service",
                "shards-differ",
                "reference-backend",
                "clocks-differ",
                "descriptors-few",
            }
            found = await until_found(
                lambda: findings(gateway),
                lambda found: {finding.id for finding in found} == expected,
                "the cause of each",
            )
    told = {finding.id: " ".join(finding.evidence) for finding in found}
    assert f"indexer 127.0.0.1:{dead_port}" in told["service-unreachable"]
    assert f"scheduler {indexer.address} (named by {gateway.address}) is an indexer" in told["wrong-service"]
    assert f"expects shard 0/2 at indexer {indexer.address}, which has 0/1" in told["shards-differ"]
    assert f"indexer {indexer.address}" in told["reference-backend"]
    assert told["clocks-differ"] == f"scheduler {scheduler.address} is 3,600 s ahead"
    assert re.search(rf"gateway {gateway.address}: \d+ of 512 open", told["descriptors-few"])


async def test_a_gateway_that_its_scheduler_refuses_and_does_not_know_the_workers_of_is_told_both(
    tmp_path: Path,
) -> None:
    files = {
        "tokens.yaml": "tokens: [{token: t, role: admin, tenant: '*'}]",
        "token": "t",
        "workers.yaml": "workers: [{worker_id: w, model: m, block_size: 16}]",
        "others.yaml": "workers: [{worker_id: w, model: m, block_size: 32}]",
    }
    for name, text in files.items():
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(text)
    closed = ("--auth-tokens", str(tmp_path / "tokens.yaml"), "--workers-file", str(tmp_path / "others.yaml"))
    async with running("kvscout_scheduler.main", *closed) as scheduler:
        flags = ("--scheduler", scheduler.address, "--no-indexer", "--workers-file", str(tmp_path / "workers.yaml"))
        async with running("kvscout_gateway.main", *flags) as gateway:
            security = ClientSecurity(token_file=tmp_path / "token")
            expected = {"helper-failing", "registrations-differ"}
            found = await until_found(
                lambda: findings(gateway, security=security), lambda found: ids(found) == expected, "both causes"
            )
    told = {finding.id: " ".join(finding.evidence) for finding in found}
    assert "no bearer token" in told["helper-failing"]
    assert "block_size" in told["registrations-differ"]


async def test_of_nats_its_absence_its_namespaces_and_its_jetstream_are_told_apart() -> None:
    async with nats_server() as nats, AsyncExitStack() as stack:
        here, there = (("--nats-server", nats.url, "--namespace", name) for name in ("here", "there"))
        replicas = [
            running("kvscout_scheduler.main", *there, "--router-replica-sync", "--replica-id", name)
            for name in ("first", "second")
        ]
        first, second = await stack.enter_async_context(together(*replicas))
        flags = ("--scheduler", first.address, "--no-indexer", *here)
        gateway = await stack.enter_async_context(running("kvscout_gateway.main", *flags))
        client = await stack.enter_async_context(connected(gateway, first, first))
        await client.register(workers_pb2.Worker(worker_id="w", model=MODEL, block_size=16))
        second.process.kill()
        await second.process.wait()

        async def look() -> list[Finding]:
            return await findings(gateway)

        expected = {"nats-namespaces-differ", "scheduler-without-workers", "replica-silent"}
        found = await until_found(look, lambda found: ids(found) == expected, "what differs")
        told = {finding.id: finding.evidence[0] for finding in found}
        assert (
            told["nats-namespaces-differ"] == f"'here': gateway {gateway.address}; 'there': scheduler {first.address}"
        )
        assert (
            f"scheduler {first.address} knows no worker, gateway {gateway.address} 1"
            in told["scheduler-without-workers"]
        )
        assert "replica second" in told["replica-silent"]

        await nats.kill()
        await until_found(look, lambda found: ids(found) > NATS, "that NATS is gone")
        nats.jetstream = False
        await nats.start()
        expected = {"nats-without-jetstream"}
        await until_found(look, lambda found: ids(found) & (NATS | expected) == expected, "that JetStream is")
