"""A process that serves `SubscribeKvEvents` with the relay of `smg-grpc-servicer`, which must be on the path.

python -m support.smg_relay RANK_0_EVENTS,RANK_0_REPLAY …       (in tests/); prints its port
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvscout_mocker.engine.kv_stream import METHODS, SERVER_OPTIONS


class Servicer(grpc.GenericRpcHandler):
    """Passes each call on to the relay.

    Args:
        sources: Events and replay endpoint of each rank.
    """

    def __init__(self, sources: list[list[str]]) -> None:
        self._sources = sources

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the one rpc."""
        # Not on the path of whoever reads this file otherwise.
        from smg_grpc_proto.generated import common_pb2  # type: ignore[import-not-found]
        from smg_grpc_servicer.kv_relay import Engine, RankSource, relay  # type: ignore[import-not-found]

        if handler_call_details.method not in METHODS:
            return None
        sources = [RankSource(rank, *endpoints) for rank, endpoints in enumerate(self._sources)]

        async def subscribe(request: Any, context: Any) -> AsyncIterator[Any]:
            async for message in relay(sources, Engine.VLLM, request.start_sequence_number, context):
                yield message

        return grpc.unary_stream_rpc_method_handler(
            subscribe,
            request_deserializer=common_pb2.SubscribeKvEventsRequest.FromString,
            response_serializer=common_pb2.KvEventBatch.SerializeToString,
        )


async def main(sources: list[list[str]]) -> None:
    """Serve until it is killed."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Servicer(sources),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main([argument.split(",") for argument in sys.argv[1:]]))
