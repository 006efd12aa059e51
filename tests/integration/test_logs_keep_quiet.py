"""No log and no trace of any service has a word or a token of a prompt, whatever its level and whatever goes wrong."""

from __future__ import annotations

import random
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from support.gateway_stack import MODEL, running_stack
from support.otlp_receiver import otlp_receiver
from support.processes import eventually
from support.scripted_engine import scripted_engine

from kvscout.v1 import workers_pb2
from kvscout_common import errors

DEBUG = ("--log-level", "debug")


async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that quotes what it was sent in its error, as engines do."""
    return web.json_response({"error": {"message": f"cannot compute {body}", "code": 500}}, status=500)


async def test_no_log_and_no_trace_has_what_prompts_say(capfd: pytest.CaptureFixture[str]) -> None:
    secret = f"secret{random.randrange(1 << 60):x}"
    tokens = [random.randrange(10**8, 2 * 10**8) for _ in range(64)]
    async with (
        scripted_engine(fails) as engine,
        otlp_receiver() as receiver,
        running_stack(
            "--http-port",
            "0",
            *DEBUG,
            *receiver.flags,
            scheduler_flags=[*DEBUG, *receiver.flags],
            indexer_flags=[*DEBUG, *receiver.flags],
        ) as stack,
        aiohttp.ClientSession() as http,
    ):
        broken = workers_pb2.Worker(
            worker_id="broken", model="broken", block_size=16, http_endpoint=engine.url,
            engine=workers_pb2.ENGINE_KIND_VLLM,
        )  # fmt: skip
        await stack.client.register(broken)
        url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1"
        messages = [{"role": "user", "content": f"{secret} " * 40}]
        for model, status in ((MODEL, 200), ("broken", 502), ("nowhere", 404)):
            for path, prompt in (("chat/completions", {"messages": messages}), ("completions", {"prompt": tokens})):
                async with http.post(f"{url}/{path}", json={"model": model, "max_tokens": 2, **prompt}) as answer:
                    await answer.read()
                    assert answer.status in (status, 500, 503), (model, path)
        # Too long, not readable, and not JSON: what is refused is quoted least of all.
        for body in (f'{{"model": "{MODEL}", "prompt": ["{secret}", {{}}]}}', f'{{"prompt": "{secret}'):
            async with http.post(f"{url}/completions", data=body) as answer:
                assert answer.status == 400
        await stack.client.generate(tokens, max_tokens=2)
        with pytest.raises((grpc.aio.AioRpcError, errors.KvscoutError)):
            await stack.client.generate(tokens, max_tokens=2, model="broken")

        async def logged() -> bool:
            logs.append(capfd.readouterr().err)
            return "broken" in "".join(logs)

        logs: list[str] = []
        await eventually(logged, what="a line about the engine that fails")
    text = "".join([*logs, capfd.readouterr().err])
    assert secret not in text
    assert not [token for token in tokens if str(token) in text]
    # What was still to be sent came as the services ended.
    spans = receiver.spans
    assert {"error.type", "kvscout.worker"} <= {name for span in spans for name in span.facts}
    traced = "".join(map(repr, spans))
    assert secret not in traced
    assert not [token for token in tokens if str(token) in traced]
