"""What the start of a service costs: libraries that it does not use are not loaded."""

import subprocess
import sys

import pytest

from kvscout_common.hashing import native_available

BUILD = """
import sys
import kvscout_gateway.gateway, kvscout_gateway.main
import kvscout_indexer.indexer, kvscout_indexer.main
import kvscout_scheduler.main
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"aiohttp", "nats", "tokenizers", "opentelemetry"}))
"""

DECIDES = """
import sys
import kvscout_scheduler.scheduler
import kvscout_scheduler.policies, kvscout_scheduler.selection, kvscout_scheduler.active_load, kvscout_scheduler.turns
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"grpc", "google", "kvscout", "kvscout_native"}))
"""


def test_what_decides_loads_neither_grpc_nor_messages_nor_the_extension() -> None:
    done = subprocess.run([sys.executable, "-c", DECIDES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.skipif(not native_available(), reason="without the extension aiohttp carries HTTP")
def test_services_without_nats_load_neither_its_client_nor_a_second_http() -> None:
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
