"""A service says what carries its calls."""

import pytest
from support.process_metrics import scrape
from support.processes import running

from kvscout.v1 import indexer_pb2_grpc, types_pb2
from kvscout_common.enum_words import word_of
from kvscout_common.hashing import native_available
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.transport import Transport, default_transport

NATIVE = pytest.mark.skipif(not native_available(), reason="the extension is not built")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), default_transport()),
        (("--rpc-transport", "grpcio"), Transport.GRPCIO),
        pytest.param(("--rpc-transport", "native"), Transport.NATIVE, marks=NATIVE),
    ],
)
async def test_what_carries_calls_is_said_at_start_in_status_and_in_metrics(
    flags: tuple[str, ...], expected: Transport
) -> None:
    async with running("kvscout_indexer.main", *flags) as indexer, open_channel(indexer.address) as channel:
        assert indexer.ready["transport"] == expected
        stub: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(channel)
        status = await call(stub.GetStatus, types_pb2.GetStatusRequest(), timeout=30)
        assert word_of(types_pb2.RpcTransport, status.service.transport) == expected
        samples = await scrape(indexer)
        assert samples[f'kvscout_rpc_transport{{transport="{expected}"}}'] == 1
        if expected is Transport.NATIVE:
            assert samples["kvscout_rpc_connections"] == 1
            assert samples['kvscout_rpc_refused_total{what="call"}'] == 0
