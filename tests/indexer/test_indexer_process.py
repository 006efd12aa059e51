"""The indexer as a process: its endings, its limits, its metrics, its workers file."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.engine_events import batch, chain, prompt, stored
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.process_metrics import scrape
from support.processes import DEADLINE_SECONDS, eventually, start
from support.recorded_engine import recorded_engine

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_common.hashing import native_available
from kvscout_common.rpc.channel import call, open_channel

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_0_in_the_midst_of_a_replay(number: signal.Signals) -> None:
    async with recorded_engine() as engine, indexer_process() as (client, running):
        engine.answering.clear()
        await client.register(engine)
        await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_REPLAYING)
        running.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await running.process.wait() == 0


async def test_a_signal_ends_it_with_0_while_one_content_comes_under_20_000_engine_hashes() -> None:
    hostile = batch(*(stored([number], prompt(1)) for number in range(1, 20_001)))
    async with recorded_engine() as engine, indexer_process() as (client, running):
        await client.register(engine)
        await engine.subscribed()
        await engine.publish(*[hostile] * 20)
        await client.until(lambda s: s.applied > 0)
        running.process.terminate()
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await running.process.wait() == 0


async def test_a_defect_while_ingesting_ends_it_with_1() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    running = await start("support.faulty_indexer", environment=environment)
    channel = open_channel(running.address)
    stub = indexer_pb2_grpc.IndexerStub(channel)

    async def rpc(name: str, request: object) -> object:
        return await call(getattr(stub, name), request, timeout=10)

    client = IndexerClient(rpc)
    try:
        async with recorded_engine() as engine:
            await client.register(engine)
            await engine.subscribed()
            assert await client.overlaps(prompt(1)) == {}
            await engine.publish(*chain(1))
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert await running.process.wait() == 1
    finally:
        await channel.close()
        await running.stop()


async def test_a_port_in_use_ends_it_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvscout_indexer.main",
            "--port", str(occupant.getsockname()[1]), "--metrics-port", "-1",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, log = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert b"cannot bind" in log


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--router-ttl", "0"], "--router-ttl"),
        (["--router-prune-target-ratio", "2"], "--router-prune-target-ratio"),
        (["--max-blocks", "-1"], "--max-blocks"),
        (["--tls-cert", __file__], "tls"),
        (["--host", "0.0.0.0"], "auth"),
    ],
)
async def test_flags_that_are_wrong_end_it_with_2(flags: list[str], says: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_indexer.main", "--port", "0", "--metrics-port", "0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, log = await process.communicate()
    assert process.returncode == 2
    assert says in log.decode()


async def test_a_message_above_the_limit_is_refused_and_the_next_one_answered() -> None:
    async with indexer_process("--max-message-bytes", "4096") as (client, _):
        await client.register()
        with pytest.raises(ResourceExhausted):
            await client.matches(range(4096))
        assert (await client.matches(range(500))).num_blocks == 125


async def test_its_metrics_show_what_became_of_events() -> None:
    async with recorded_engine() as engine, indexer_process() as (client, running):
        await client.register(engine)
        await engine.subscribed()
        await engine.publish(*chain(4), b"\xc1", batch(stored([9], prompt(1, first=50), parent=77)))
        await client.until_applied(5)
        samples = await scrape(running)
    source = f'dp_rank="0",model="{MODEL}",tenant="default",worker="w"'
    index = f'block_size="4",model="{MODEL}",tenant="default"'
    assert samples[f"kvscout_index_blocks{{{index}}}"] == 4
    assert samples[f"kvscout_index_orphans{{{index}}}"] == 1
    assert samples[f"kvscout_index_bytes{{{index}}}"] > 0
    labels = source.replace(",model", ',kind="{kind}",model')
    assert samples["kvscout_events_total{" + labels.replace("{kind}", "applied") + "}"] == 6
    assert samples["kvscout_events_total{" + labels.replace("{kind}", "malformed") + "}"] == 1
    assert samples[f"kvscout_source_live{{{source}}}"] == 1
    assert samples[f"kvscout_event_lag_batches{{{source}}}"] == 0
    assert samples[f"kvscout_event_age_seconds{{{source}}}"] >= 0


async def test_its_metrics_name_a_limited_number_of_ranks_and_count_all_of_them_by_state() -> None:
    async with recorded_engine() as engine, indexer_process("--metrics-worker-ranks", "3") as (client, running):
        await client.register(engine, worker_id="live")
        await engine.subscribed()
        await engine.publish(*chain(4))
        await client.until_applied(3, "live")
        for number in range(20):
            await client.register(worker_id=f"w{number}", transport=workers_pb2.EVENT_TRANSPORT_NONE)
        samples = await scrape(running)
    rows = Counter(name.partition("{")[0] for name in samples)
    assert rows["kvscout_source_live"] == 3 + 1
    assert rows["kvscout_events_total"] == 9 * (3 + 1)
    pool = f'model="{MODEL}",tenant="default"'
    assert samples[f'kvscout_source_live{{dp_rank="0",{pool},worker="live"}}'] == 1
    assert samples[f'kvscout_source_live{{dp_rank="",{pool},worker=""}}'] == 0
    assert samples["kvscout_metrics_summed_worker_ranks"] == 18
    states = {name: value for name, value in samples.items() if name.startswith("kvscout_sources{")}
    assert states == {
        f'kvscout_sources{{model="{MODEL}",state="live",tenant="default"}}': 1,
        f'kvscout_sources{{model="{MODEL}",state="none",tenant="default"}}': 20,
    }


def names_of_threads(pid: int) -> list[str]:
    """Names of a process's threads, as the system has them."""
    return [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]


async def test_engines_that_several_threads_read_are_live_and_found_exactly() -> None:
    async with AsyncExitStack() as entered:
        engines = [await entered.enter_async_context(recorded_engine()) for _ in range(6)]
        client, running = await entered.enter_async_context(indexer_process("--ingest-threads", "2"))
        if native_available():
            assert names_of_threads(running.process.pid).count("ingest") == 2
        for number, engine in enumerate(engines):
            engine.lose(*chain(2 + number)[:2])  # a replay has them
            await client.register(engine, worker_id=f"w{number}")
            await engine.subscribed()
            await client.until_applied(1, f"w{number}")
        # All at once, each of another length.
        await asyncio.gather(*(engine.publish(*chain(2 + number)[2:]) for number, engine in enumerate(engines)))
        for number in range(len(engines)):
            status = await client.until_applied(1 + number, f"w{number}")
            assert (status.state, status.applied) == (indexer_pb2.SOURCE_STATE_LIVE, 2 + number)
        assert await client.overlaps(prompt(20)) == {(f"w{number}", 0): 2 + number for number in range(len(engines))}


async def test_workers_of_its_file_are_indexed_and_follow_the_file(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text("workers: []\n")
    async with recorded_engine() as engine, indexer_process("--workers-file", str(file)) as (client, _):
        engine.lose(*chain(2))
        file.write_text(
            "workers:\n"
            f"  - {{worker_id: w, model: {MODEL}, block_size: 4, event_endpoints: [\n"
            f"      {{dp_rank: 0, endpoint: '{engine.endpoint}', replay_endpoint: '{engine.replay_endpoint}'}}]}}\n"
        )

        async def overlap(expected: int) -> bool:
            try:
                return await client.overlap(prompt(2)) == expected
            except KvscoutError:  # the model is not known yet
                return False

        await eventually(lambda: overlap(2), what="the worker of the file")
        file.write_text("workers: []\n")
        await eventually(lambda: overlap(0), what="the worker's removal")
        status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
        assert not status.sources
