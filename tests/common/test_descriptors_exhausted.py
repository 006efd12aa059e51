"""A process that is out of descriptors says so, rests, and goes on when there are some again."""

import asyncio
import json
import os
import resource
import socket
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from support.processes import DEADLINE_SECONDS

from kvscout.v1 import scheduler_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.transport import Transport

SAID = {
    Transport.NATIVE: {
        b"kvscout.rpc: connections cannot be accepted",
        b"kvscout.http: connections cannot be accepted: Too many open files",
    },
    Transport.GRPCIO: {b"limit reached"},
}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_out_of_descriptors_a_server_says_so_and_rests() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvscout_scheduler.main", "--port", "0", "--metrics-port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            ready = json.loads(await process.stdout.readline())
        channel = open_channel(f"127.0.0.1:{ready['port']}")
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS)
        limit = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{process.pid}/fd")), limit[1]))
        with ExitStack() as stack:
            for port in (ready["port"], ready["metrics_port"]):
                for _ in range(10):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            missing = SAID[ready["transport"]]
            async with asyncio.timeout(DEADLINE_SECONDS):
                while missing:
                    line = await process.stderr.readline()
                    assert line, "it ended"
                    missing = {text for text in missing if text not in line}
            # Whom it has connected it serves, and it does not spin.
            before, since = cpu_seconds(process.pid), time.monotonic()
            while time.monotonic() - since < 1:
                await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS)
                await asyncio.sleep(0.1)
            assert cpu_seconds(process.pid) - before < 0.3 * (time.monotonic() - since)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limit)
        url = f"http://127.0.0.1:{ready['metrics_port']}/metrics"
        await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=DEADLINE_SECONDS).close())
        await channel.close()
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0
