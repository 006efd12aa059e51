"""Log lines stay lines, short ones and few, whatever is quoted in them."""

import asyncio
import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
from support.processes import DEADLINE_SECONDS, eventually

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.observability.log_lines import (
    BURST_LINES,
    BoundedFormatter,
    GoneClientFilter,
    JsonFormatter,
    RateFilter,
)
from kvscout_common.rpc.channel import call, open_channel

cygrpc = importlib.import_module("grpc._cython.cygrpc")
"""It has no stubs."""
HOSTILE = "a\nb\r\x1b[2J\x9b\u202e\u2028\ud800\x00"


def record(message: str, *arguments: object, line: int = 1) -> logging.LogRecord:
    return logging.LogRecord("kvscout.test", logging.WARNING, "test.py", line, message, arguments, None)


@pytest.mark.parametrize("formatter", [BoundedFormatter("%(message)s"), JsonFormatter()])
def test_what_is_quoted_is_one_line_of_plain_text(formatter: logging.Formatter) -> None:
    line = formatter.format(record("worker %s of %d", HOSTILE, 3))
    assert line.isprintable()
    shown = json.loads(line)["message"] if isinstance(formatter, JsonFormatter) else line
    assert shown == r"worker a\nb\r\x1b[2J\x9b\u202e\u2028\ud800\x00 of 3"
    assert formatter.format(record(f"worker {HOSTILE}")).isprintable()


def test_lengths_are_bounded_and_both_ends_are_shown() -> None:
    formatter = BoundedFormatter("%(message)s")
    line = formatter.format(record("booking %s ends", "x" * 60_000 + "y"))
    assert len(line) < 400
    assert line.startswith("booking xxx") and line.endswith("xy ends") and "(60,001 characters)" in line
    assert len(formatter.format(record("\x1b" * 60_000))) < 10_000
    assert formatter.format(record("%d digits", 10**5000)).startswith("%d digits (")


def test_the_traceback_of_a_hostile_error_keeps_its_lines_and_adds_none() -> None:
    formatter = BoundedFormatter("%(message)s")
    try:
        raise ValueError("\x1b[2J" + "x" * 100_000)
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
    lines = formatter.format(failed).split("\n")
    assert lines[0] == "it failed" and lines[1].startswith("Traceback")
    assert all(line.isprintable() for line in lines)
    assert sum(map(len, lines)) < 20_000


def test_each_place_has_its_rate_and_says_what_it_left_out() -> None:
    now = [0.0]
    rate = RateFilter(lambda: now[0])
    passed = [rate.filter(record("one %d", number)) for number in range(1000)]
    assert passed == [True] * BURST_LINES + [False] * (1000 - BURST_LINES)
    assert rate.filter(record("another", line=2))
    now[0] += 1.5
    last = record("one %d", 1000)
    assert rate.filter(last)
    assert BoundedFormatter("%(message)s").format(last) == "one 1000 (… 950 more suppressed)"
    assert not rate.filter(record("one %d", 1001))


@pytest.mark.parametrize(
    ("logger", "error", "written"),
    [
        ("grpc._cython.cygrpc", cygrpc.ExecuteBatchError, False),
        ("grpc._cython.cygrpc", RuntimeError, True),
        ("kvscout.gateway", cygrpc.ExecuteBatchError, True),
    ],
)
def test_grpcios_traceback_of_a_client_that_went_away_is_no_error(
    logger: str, error: type[Exception], written: bool
) -> None:
    caught = record("ExecuteBatchError raised in core by servicer method [%s]", "/kvscout.v1.Gateway/DumpEvents")
    caught.name, caught.exc_info = logger, (error, error("SendStatusFromServerOperation"), None)
    assert GoneClientFilter().filter(caught) is written


async def test_bookings_with_long_ids_write_a_bounded_log(tmp_path: Path) -> None:
    workers, log = tmp_path / "workers.yaml", tmp_path / "log"
    workers.write_text("workers: [{worker_id: w, model: m, block_size: 16}]")
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvscout_scheduler.main", "--port", "0", "--metrics-port", "-1"),
            *("--workers-file", str(workers)),
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            port = json.loads(await process.stdout.readline())["port"]
        channel = open_channel(f"127.0.0.1:{port}")
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        for number in range(300):
            request = scheduler_pb2.ReserveRequest(
                request_id=f"{number}\n" + "x" * 60_000,
                model="m",
                worker=types_pb2.WorkerRank(worker_id="w"),
                isl_tokens=16,
                lease_seconds=1,
            )
            await call(stub.Reserve, request, timeout=DEADLINE_SECONDS)

        async def ended() -> bool:
            answer = await call(stub.ListActiveRequests, scheduler_pb2.ListActiveRequestsRequest(), timeout=10)
            return not answer.requests

        await eventually(ended)
        await channel.close()
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0
    lines = log.read_text().splitlines()
    assert sum(map(len, lines)) < 100_000
