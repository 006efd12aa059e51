"""The services of this project in this process, with their real handlers and a tokens file, on either transport."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvscout.v1 import bridge_pb2, gateway_pb2, indexer_pb2, scheduler_pb2
from kvscout_bridge.config import BridgeConfig
from kvscout_bridge.main import build as build_bridge
from kvscout_common.http.byte_budget import make_budget
from kvscout_common.http.factory import serve_http
from kvscout_common.identity.identity import TokenTable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.rpc import serving
from kvscout_common.rpc.guard import Guard
from kvscout_common.rpc.serving import App
from kvscout_common.settings.config import ServerConfig
from kvscout_common.transport import Transport, choose, chosen
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.main import build as build_gateway
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.main import build as build_indexer
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.main import build as build_scheduler

NOBODY = "127.0.0.1:1"
OURS, THEIRS = "ours", "theirs"
ROLES = ("viewer", "worker", "client", "admin")
DESCRIPTORS = {
    "indexer": indexer_pb2.DESCRIPTOR,
    "scheduler": scheduler_pb2.DESCRIPTOR,
    "gateway": gateway_pb2.DESCRIPTOR,
    "bridge": bridge_pb2.DESCRIPTOR,
}
"""Of each service, the file with its one gRPC service."""


class Guarded(NamedTuple):
    """A service."""

    app: App
    port: int
    picker_port: int = 0
    http_port: int = 0


def tokens_file(folder: Path, limits: str) -> Path:
    """A token `ours-ROLE` of each role for the one tenant, and `everybody's` for all."""
    entries = [f"{{token: ours-{role}, role: {role}, tenant: {OURS}}}" for role in ROLES]
    entries.append("{token: everybody's, role: admin, tenant: '*'}")
    path = folder / "tokens.yaml"
    path.touch(mode=0o600)
    path.write_text(f"tokens: [{', '.join(entries)}]\nlimits: {limits}")
    return path


def builders(server: ServerConfig) -> dict[str, Callable[[], Awaitable[App]]]:
    """How each service is made."""
    worker = WorkerSpec("w", model="m", tenant=OURS, block_size=16)
    picker = EndpointPickerConfig(port=0, plaintext=True)
    return {
        "indexer": lambda: build_indexer(IndexerConfig(server)),
        "scheduler": lambda: build_scheduler(SchedulerConfig(server)),
        "gateway": lambda: build_gateway(
            GatewayConfig(server, indexers=(), schedulers=(NOBODY,), http_port=0, endpoint_picker=picker)
        ),
        "bridge": lambda: build_bridge(BridgeConfig(server, NatsConfig((f"nats://{NOBODY}",)), worker)),
    }


@asynccontextmanager
async def guarded_services(transport: Transport, *names: str, limits: str = "[]") -> AsyncIterator[dict[str, Guarded]]:
    """The named services; nothing runs beside them.

    Args:
        transport: What carries their calls.
        names: Of the services.
        limits: Of tenants, as the tokens file has them.
    """
    server = ServerConfig(transport=transport)
    async with AsyncExitStack() as stack:
        stack.callback(choose, chosen())
        choose(transport)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = tokens_file(folder, limits)
        started = {}
        for name in names:
            app = await builders(server)[name]()
            if app.close is not None:
                stack.push_async_callback(app.close)
            tokens = TokenTable(limits=app.limits)
            tokens.follow(file)
            started[name] = await _start(server, app, tokens, stack)
        yield started


async def _start(server: ServerConfig, app: App, tokens: TokenTable, stack: AsyncExitStack) -> Guarded:
    start: Any = serving  # what `serve` starts a process with
    budget = app.budget or make_budget(server.request_memory_bytes)
    main = await start._start(server, app, None, Guard(tokens), budget)
    stack.push_async_callback(main.server.stop, 0)
    ports = {}
    for side in app.side_ports:
        listening = await start._start_side(server, side, None, Guard(tokens if side.needs_token else None), budget)
        stack.push_async_callback(listening.server.stop, 0)
        ports["picker_port"] = listening.port
    if app.http is not None:
        http = serve_http(app.http.make(tokens), app.http.limits)
        ports["http_port"] = await http.listen("127.0.0.1", 0)
        stack.push_async_callback(http.stop, 0.0)
    return Guarded(app, main.port, **ports)
