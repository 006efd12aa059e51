"""Agents' requests through a real vLLM: are the cached tokens that kvscout predicts those that vLLM reports?

`make real-vllm-agents VENV=…` runs it. Starts the vLLM of VENV, on a CPU, with a model without weights, and kvscout in
one process before it, and sends conversations with tools one after the other, whole and streamed in turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
from support.dialect_answers import BY_NAME
from support.free_ports import free_ports
from support.gateway_stack import GatewayClient, connected
from support.process_metrics import scrape
from support.processes import Running, eventually, running
from support.vllm_renderer import MODEL, make_model

from kvscout.v1 import workers_pb2

REQUESTS: Final = 300
"""Of each dialect."""
TURNS: Final = 10
"""Of a conversation."""
BLOCK: Final = 32
START_SECONDS: Final = 600.0
QUIET_SECONDS: Final = 0.05
"""After so long without events those of a request have come."""
SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CHECKED, WRONG = "kvscout_predictions_checked_total", "kvscout_mispredictions_total"


@asynccontextmanager
async def vllm(venv: Path, folder: Path) -> AsyncIterator[workers_pb2.Worker]:
    """Run `vllm serve`; yields it as a worker."""
    port, events, replay = free_ports(3)
    publisher = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    command = (
        *(str(venv / "bin" / "vllm"), "serve", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1"),
        *("--port", str(port), "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", "4096", "--block-size", str(BLOCK), "--num-gpu-blocks-override", "600"),
        *("--kv-cache-memory-bytes", "64M", "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--kv-events-config", json.dumps(publisher)),
    )
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **quiet})
    try:
        async with aiohttp.ClientSession() as http:

            async def healthy() -> bool:
                if process.returncode is not None:
                    raise SystemExit("vLLM does not start")
                try:
                    async with http.get(f"http://127.0.0.1:{port}/health") as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(healthy, deadline_seconds=START_SECONDS, what="a vLLM that answers")
        places = workers_pb2.EventEndpoint(
            endpoint=f"tcp://127.0.0.1:{events}", replay_endpoint=f"tcp://127.0.0.1:{replay}"
        )
        yield workers_pb2.Worker(
            worker_id="vllm",
            model=MODEL,
            block_size=BLOCK,
            engine=workers_pb2.ENGINE_KIND_VLLM,
            http_endpoint=f"http://127.0.0.1:{port}",
            event_endpoints=[places],
        )
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def requests(dialect: str, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the bodies of conversations, turn by turn: texts, and calls of a tool with their results."""

    def text(words: int) -> str:
        names = draw.choices(("read", "file", "error", "test", "value"), k=words)
        return " ".join(f"{name}{draw.randrange(100)}" for name in names)

    said: list[Any] = []
    system = ""
    for number in range(REQUESTS):
        turn = number % TURNS
        if turn == 0:
            said, system = [], text(60)
        elif turn % 3 == 0:
            name, place = f"call_{number}", {"path": text(1)}
            if dialect == "messages":
                call = {"type": "tool_use", "id": name, "name": "read_file", "input": place}
                said += [{"role": "assistant", "content": [{"type": "text", "text": text(3)}, call]}]
                result = {"type": "tool_result", "tool_use_id": name, "content": text(9)}
                said += [{"role": "user", "content": [result]}]
            else:
                said += [
                    {"type": "function_call", "call_id": name, "name": "read_file", "arguments": json.dumps(place)},
                    {"type": "function_call_output", "call_id": name, "output": text(9)},
                ]
        else:
            said += [{"type": "message", "role": "assistant", "content": text(5)}]
        if turn % 3 or turn == 0:
            said += [{"type": "message", "role": "user", "content": text(12)}]
        body = {"model": MODEL, "stream": number % 2 == 1}
        if dialect == "messages":
            tool = {"name": "read_file", "description": "Read a file", "input_schema": SCHEMA}
            turns = [{name: value for name, value in one.items() if name != "type"} for one in said]
            yield body | {"system": system, "messages": turns, "tools": [tool], "max_tokens": 8}
        else:
            tool = {"type": "function", "name": "read_file", "description": "Read a file", "parameters": SCHEMA}
            yield body | {"instructions": system, "input": said, "tools": [tool], "max_output_tokens": 8}


async def compared(client: GatewayClient, gateway: Running, http: aiohttp.ClientSession, dialect: str) -> bool:
    """Send the requests of a dialect; tells what came of the predictions, and whether all were compared and right."""

    async def total(name: str) -> float:
        return sum(value for key, value in (await scrape(gateway)).items() if key.startswith(name))

    async def applied() -> tuple[int, float]:
        [source] = (await client.sources()).values()
        return source.applied, source.last_event_age_seconds

    before = await total(CHECKED), await total(WRONG)
    url = f"http://127.0.0.1:{gateway.ready['http_port']}{BY_NAME[dialect].api.path}"
    for body in requests(dialect, random.Random(dialect)):
        known, _ = await applied()
        async with http.post(url, json=body) as response:
            answer = await response.read()
            if response.status != 200:
                raise SystemExit(f"{dialect}: {response.status} {answer[:500]!r}")

        async def quiet(known: int = known) -> bool:
            number, age = await applied()
            return number > known and age > QUIET_SECONDS

        await eventually(quiet, what="the events of a request")
    checked, wrong = await total(CHECKED) - before[0], await total(WRONG) - before[1]
    print(f"{dialect}: {REQUESTS} requests, {checked:.0f} predictions compared with vLLM, {wrong:.0f} of them wrong")
    return checked == REQUESTS and wrong == 0


async def main() -> None:
    """Compare both dialects.

    Raises:
        SystemExit: With 1 if a prediction was wrong, or not compared.
    """
    venv = os.environ.get("VENV", "")
    if not venv:
        raise SystemExit("VENV names the virtual environment that vLLM is installed in")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / MODEL
        make_model(folder, "in_place")
        async with vllm(Path(venv), folder) as worker:
            async with running("kvscout_serve.main", "--http-port", "0", "--tokenizer", str(folder)) as serve:
                async with connected(serve, serve, serve) as client, aiohttp.ClientSession() as http:
                    await client.register(worker)
                    right = [await compared(client, serve, http, dialect) for dialect in ("messages", "responses")]
    raise SystemExit(not all(right))


if __name__ == "__main__":
    asyncio.run(main())
