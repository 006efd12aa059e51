"""What the start of a service or command costs: libraries that it does not use are not loaded."""

import subprocess
import sys

import pytest

from kvscout_common.hashing import native_available

BUILD = """
import sys
import asyncio
import kvscout_cli.main, kvscout_cli.commands.serve
from kvscout_common.transport import Transport, choose, default_transport
from kvscout_serve.config import ServeConfig
from kvscout_serve.main import build, main
choose(Transport(default_transport()))
with main.make_context("serve", []) as context:
    asyncio.run(build(ServeConfig.from_flags(context.params)))
heavy = {"aiohttp", "nats", "tokenizers", "opentelemetry", "jinja2", "numpy", "rich"}
print(*sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""

COMMANDS = """
import sys
import kvscout_client
import kvscout_cli.main, kvscout_cli.commands.status, kvscout_cli.commands.route, kvscout_cli.commands.workers
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"aiohttp", "nats", "tokenizers", "opentelemetry"}))
"""

STATUS = """
import sys
from kvscout_cli.main import main
try:
    main(["status", "--gateway", "127.0.0.1:1"])
except SystemExit as ended:
    assert ended.code == 1
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"aiohttp", "nats"}), file=sys.stderr)
"""

REFERENCES = """
import sys
import kvscout_gateway.gateway, kvscout_gateway.main
import kvscout_indexer.indexer, kvscout_indexer.main
import kvscout_scheduler.service, kvscout_serve.process
import kvscout_bridge.bridge, kvscout_bridge.main
import kvscout_client, kvscout_client.kv_publisher
reference = {"kvscout_blocks.bytes.codec", "kvscout_blocks.bytes.wire"}
print(*(name for name in sys.modules if name in reference or "reference" in name))
"""

DECIDES = """
import sys
import kvscout_scheduler.scheduler
import kvscout_scheduler.policies.selection, kvscout_scheduler.load.active_load, kvscout_scheduler.queue.admission
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"grpc", "google", "kvscout", "kvscout_native"}))
"""


def test_what_decides_loads_neither_grpc_nor_messages_nor_the_extension() -> None:
    done = subprocess.run([sys.executable, "-c", DECIDES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not native_available(), reason="without the extension the reference backend is used")
def test_services_and_the_client_load_nothing_of_the_reference_backend_beside_the_extension() -> None:
    done = subprocess.run([sys.executable, "-c", REFERENCES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not native_available(), reason="without the extension aiohttp carries HTTP")
def test_services_without_nats_load_neither_its_client_nor_a_second_http() -> None:
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not native_available(), reason="without the extension aiohttp carries HTTP")
def test_commands_and_the_client_load_neither_the_client_of_nats_nor_a_second_http() -> None:
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not native_available(), reason="without the extension aiohttp carries HTTP")
def test_status_which_asks_no_engine_loads_no_client_of_http() -> None:
    done = subprocess.run([sys.executable, "-c", STATUS], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
