"""The service of `kvscout bench http`: nothing but the pump, as a process.

Over HTTP it passes every request to an engine and the answer back, byte for byte. Over gRPC its `Generate` asks an
engine for as many chunks as the request says, and makes gRPC messages of the answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import grpc

from kvscout.v1 import gateway_pb2
from kvscout_bench.gateway_engines import MODEL
from kvscout_bench.gateway_prompts import random_tokens
from kvscout_bench.gateway_stack import Stack
from kvscout_bench.peer import BENCH_ENVIRONMENT
from kvscout_bench.service_process import ReadyProcess
from kvscout_common.http.factory import connect, serve_http
from kvscout_common.http.http import Form, HttpCall, HttpRequest, HttpServer
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.config import ServerConfig
from kvscout_common.transport import Transport
from kvscout_gateway.values.dialects import OPENAI

CONNECT_SECONDS = 5.0
_SERVICE = "kvscout.v1.Gateway"
_JSON = (("content-type", "application/json"),)


def pump_stack(engines: list[str], flags: Sequence[str], transport: str) -> Stack:
    """Start the pump before the first of some engines.

    Args:
        engines: Addresses.
        flags: Of our services; it has none.
        transport: Carries the calls.

    Raises:
        DriverFailed: It does not become ready.
    """
    command = [sys.executable, "-m", "kvscout_bench.http_pump", "--engine", engines[0], "--transport", transport]
    running = ExitStack()
    pump = running.enter_context(ReadyProcess("pump", command, environment=BENCH_ENVIRONMENT))
    grpc_address, http_address = (f"127.0.0.1:{pump.ready[name]}" for name in ("port", "http_port"))
    return Stack({"pump": pump}, running, grpc_address=grpc_address, http_address=http_address)


class _Pump:
    """Both fronts.

    Args:
        engine: Address.
    """

    def __init__(self, engine: str) -> None:
        self._url = f"http://{engine}"
        self._client = connect()
        self._server: HttpServer | None = None

    async def listen(self) -> int:
        """Serve HTTP; return the port."""
        self._server = serve_http(self._pass_on)
        return await self._server.listen("127.0.0.1", 0)

    def add_to(self, server: Any) -> None:
        """Serve gRPC."""
        handler: Any = grpc.unary_stream_rpc_method_handler(self._generate)
        handlers = {"Generate": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        server.add_registered_method_handlers(_SERVICE, handlers)

    async def close(self) -> None:
        """End what `listen` began."""
        if self._server is not None:
            await self._server.stop(0.0)
        await self._client.close()

    async def _pass_on(self, call: HttpCall) -> None:
        request = HttpRequest(self._url + call.path, method=call.method, headers=_JSON, body=await call.body())
        answer = await self._client.send(request, connect_seconds=CONNECT_SECONDS)
        await call.start(answer.status, answer.headers)
        await answer.relay(call, Form.BYTES, OPENAI)
        await call.end()

    async def _generate(self, request: bytes, context: Any) -> None:
        message = gateway_pb2.GenerateRequest.FromString(request)
        limit = message.stop_conditions.max_tokens
        sent = HttpRequest(f"{self._url}/v1/completions", headers=_JSON, body=_body(len(message.token_ids), limit))
        answer = await self._client.send(sent, connect_seconds=CONNECT_SECONDS)
        await answer.relay(context, Form.MESSAGES, OPENAI, max_tokens=limit)


@cache
def _body(tokens: int, limit: int) -> bytes:
    """As long as it would be: writing it is not what is measured."""
    prompt = list(random_tokens(tokens, seed=1))
    return f'{{"model": "{MODEL}", "prompt": {prompt}, "max_tokens": {limit}, "stream": true}}'.encode()


def _build(engine: str) -> Callable[[], Any]:
    async def build() -> App:
        pump = _Pump(engine)
        return App(
            name="pump",
            services=[(_SERVICE, pump.add_to)],
            close=pump.close,
            ready={"http_port": await pump.listen()},
        )

    return build


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM; the first line of its output has the ports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--transport", choices=list(Transport), type=Transport, required=True)
    options = parser.parse_args(arguments)
    run(ServerConfig(transport=options.transport, log_level="error"), _build(options.engine))


if __name__ == "__main__":
    main(sys.argv[1:])
