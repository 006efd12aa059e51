"""Indexers of a chaos run, and what they say that engines hold."""

from __future__ import annotations

from collections import Counter, defaultdict

import grpc
from support.free_ports import free_ports

from chaos.members import Member
from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_blocks.bytes.codec import DumpReader
from kvscout_common.rpc.channel import open_channel


class Indexer:
    """One indexer process.

    Args:
        number: Which one.
        flags: Besides its ports.
        port: Its port; 0 = any free one.
    """

    def __init__(self, number: int, *flags: str, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]
        self.member = Member(
            f"indexer-{number}", "kvscout_indexer.main", "--port", str(self.port), "--metrics-port", "-1", *flags
        )
        self._channel = open_channel(f"127.0.0.1:{self.port}")
        self.stub = indexer_pb2_grpc.IndexerStub(self._channel)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def copies(self, worker_id: str) -> dict[int, int] | None:
        """Copies of each block by the engine's hash, orphans included; None = it cannot be asked now."""
        # One a rank.
        readers, found = defaultdict[int, DumpReader](DumpReader), Counter[int]()
        try:
            async for message in self.stub.Dump(indexer_pb2.DumpRequest(worker_id=worker_id), timeout=10):
                if (dumped := readers[message.dp_rank].feed(message)) is None:
                    continue
                for block in dumped.dump.blocks:
                    if block.engine_hash is not None:
                        found[block.engine_hash] += sum(copies.number for copies in block.copies)
                for orphan in dumped.dump.orphans:
                    found[orphan.engine_hash] += sum(copies.number for copies in orphan.copies)
        except grpc.aio.AioRpcError:
            return None
        return dict(found)

    async def status(self) -> str:
        """The state of its sources, for people."""
        try:
            status = await self.stub.GetStatus(types_pb2.GetStatusRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return f"no answer: {error.code()}"
        return "\n".join(
            f"  {s.worker.worker_id}: {indexer_pb2.SourceState.Name(s.state)} epoch {s.epoch} last {s.last_event_id} "
            f"blocks {s.blocks} orphans {s.orphans} gaps {s.gaps} replays {s.replays} resets {s.resets} "
            f"demotions {s.demotions} dropped {s.dropped} malformed {s.malformed} lag {s.lag_batches} {s.reason}"
            for s in status.sources
        )

    async def overlap(self, worker_id: str, prompt: list[int], model: str) -> int:
        """Device overlap of one worker, in blocks."""
        request = indexer_pb2.FindMatchesRequest(model=model, token_ids=prompt)
        found = (await self.stub.FindMatches(request, timeout=10)).overlaps
        return dict(zip(found.worker_ids, found.device_blocks, strict=True)).get(worker_id, 0)
