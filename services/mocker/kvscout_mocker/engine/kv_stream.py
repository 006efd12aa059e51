"""`SubscribeKvEvents` of an engine that is served over gRPC: what its ranks publish, as one stream.

::

    publishers of all ranks ──payloads──▶ Relay of each ──messages──▶ KvStreams ══▶ subscribers

It does what the Python servicers of smg-grpc-servicer 0.14 do with the sockets of vLLM and SGLang, and leaves out what
they do: there is no history; a stream begins with what comes next, and a position to begin at is refused; tokens of
EAGLE pairs, groups without full attention and blocks of others are not passed on; LoRA adapter and salt of a block are
also its children's. A subscriber that lags too far behind is ended with DATA_LOSS. It is kinder in one thing: batches
that faults keep from the PUB socket are not lost here, as if their replay never failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
import msgpack

from kvscout.smg import kv_events_pb2

METHODS: Final = frozenset(
    {
        "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
        "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
        "/trtllm.TrtllmService/SubscribeKvEvents",
    }
)
SERVER_OPTIONS: Final = (
    # Those of the servicers: clients that ping more often lose their connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
MAX_LAG: Final = 100_000
"""Messages that wait for one subscriber."""
_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")
_MAIN_KINDS: Final = ("full_attention", "mla_attention", "sink_full_attention")
_TIERS: Final = {
    "GPU": kv_events_pb2.KV_CACHE_TIER_DEVICE,
    "CPU": kv_events_pb2.KV_CACHE_TIER_HOST,
    "DISK": kv_events_pb2.KV_CACHE_TIER_DISK,
    "EXTERNAL": kv_events_pb2.KV_CACHE_TIER_EXTERNAL,
}


class Relay:
    """Turns one rank's payloads into messages.

    Args:
        dp_rank: Whose.
    """

    def __init__(self, dp_rank: int) -> None:
        self._dp_rank = dp_rank
        self._event_id = 0
        self._scopes: dict[int, tuple[str | None, str | None]] = {}
        """LoRA adapter and salt of each block that is held."""
        self._main: dict[int, bool] = {}
        """Whether a group is passed on."""

    def message(self, number: int, payload: bytes) -> kv_events_pb2.KvEventBatch:
        """Return a batch as a message."""
        timestamp, events = msgpack.unpackb(payload, strict_map_key=False)[:2]
        message = kv_events_pb2.KvEventBatch(sequence_number=number, timestamp=timestamp, dp_rank=self._dp_rank)
        for event in events:
            self._event_id += 1
            self._add(message, event)
        return message

    def _add(self, message: kv_events_pb2.KvEventBatch, event: Any) -> None:
        kind = event["type"] if isinstance(event, dict) else event[0]
        if kind == "AllBlocksCleared":
            self._scopes.clear()
            message.events.add(event_id=self._event_id).cleared.SetInParent()
            return
        names = _STORED if kind == "BlockStored" else _REMOVED
        fields = event if isinstance(event, dict) else dict(zip(names, event[1:], strict=False))
        if not self._is_main(fields) or fields.get("locality") not in (None, "LOCAL"):
            return
        if kind == "BlockRemoved":
            self._removed(message.events.add(event_id=self._event_id).removed, fields)
        elif kind == "BlockStored" and len(fields["token_ids"]) == len(fields["block_hashes"]) * fields["block_size"]:
            self._stored(message.events.add(event_id=self._event_id).stored, fields)

    def _is_main(self, fields: Mapping[str, Any]) -> bool:
        group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
        if group is None:
            return True
        if kind is not None:
            self._main[group] = kind in _MAIN_KINDS
        return self._main.get(group, True)

    def _stored(self, stored: kv_events_pb2.KvBlocksStored, fields: Mapping[str, Any]) -> None:
        size, tokens = fields["block_size"], fields["token_ids"]
        extra_keys = fields.get("extra_keys") or []
        parent = fields.get("parent_block_hash")
        lora_name = fields.get("lora_name")
        salt = fields.get("cache_salt") or _salt(extra_keys, lora_name)
        if parent is not None:
            stored.parent_block_hash = _signed(parent)
            inherited = self._scopes.get(_signed(parent), (None, None))
            lora_name, salt = lora_name or inherited[0], salt or inherited[1]
        _describe(stored, {**fields, "lora_name": lora_name, "cache_salt": salt})
        for place, name in enumerate(fields["block_hashes"]):
            self._scopes[_signed(name)] = (lora_name, salt)
            start = place * size
            block = stored.blocks.add(block_hash=_signed(name), block_size=size)
            block.token_ids.extend(token[0] if isinstance(token, list) else token for token in tokens[start:][:size])
            if fields.get("lora_id") is not None:
                block.lora_id = fields["lora_id"]
            for key in (extra_keys[place] if place < len(extra_keys) else None) or ():
                _add_key(block, key)

    def _removed(self, removed: kv_events_pb2.KvBlocksRemoved, fields: Mapping[str, Any]) -> None:
        removed.block_hashes.extend(map(_signed, fields["block_hashes"]))
        for name in removed.block_hashes:
            self._scopes.pop(name, None)
        _describe(removed, fields)


def _describe(event: kv_events_pb2.KvBlocksStored | kv_events_pb2.KvBlocksRemoved, fields: Mapping[str, Any]) -> None:
    """Set what an event says of all its blocks."""
    event.tier = _TIERS.get((fields.get("medium") or "GPU").upper(), kv_events_pb2.KV_CACHE_TIER_UNSPECIFIED)
    event.locality = kv_events_pb2.KV_CACHE_LOCALITY_LOCAL
    for name in event.DESCRIPTOR.fields_by_name:
        value = fields.get(name)
        if name not in ("blocks", "block_hashes", "parent_block_hash", "locality") and value is not None:
            setattr(event, name, value)


def _salt(extra_keys: Sequence[Any], lora_name: str | None) -> str | None:
    """Return the salt of a prompt: a text of its first block that is not the adapter's name."""
    texts = [key for key in (extra_keys[0] if extra_keys else None) or () if isinstance(key, str)]
    return next((text for text in texts if text != lora_name), None)


def _add_key(block: kv_events_pb2.KvBlock, key: Any) -> None:
    if isinstance(key, str):
        block.extra_keys.add(text=key)
    elif isinstance(key, bytes):
        block.extra_keys.add(blob=key)
    elif isinstance(key, int):
        block.extra_keys.add(number=key)
    else:
        block.extra_keys.add().multimodal.MergeFrom(kv_events_pb2.KvMultimodalKey(identifier=key[0], offset=key[1]))


def _signed(name: int | bytes) -> int:
    """Return a block hash as the messages have it: 64 bits, signed."""
    bits = int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name % 2**64
    return bits - 2**64 if bits >= 2**63 else bits


class KvStreams(grpc.GenericRpcHandler):
    """The streams of all subscribers."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Queue[bytes]] = set()

    def relay(self, dp_rank: int) -> Callable[[int, bytes], None]:
        """Return what takes number and payload of each batch of a rank."""
        relay = Relay(dp_rank)

        def take(number: int, payload: bytes) -> None:
            message = relay.message(number, payload).SerializeToString()
            for queue in self._waiting:
                if not queue.full():
                    queue.put_nowait(message)

        return take

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the one rpc."""
        if handler_call_details.method not in METHODS:
            return None
        return grpc.unary_stream_rpc_method_handler(
            self._subscribe, request_deserializer=kv_events_pb2.SubscribeKvEventsRequest.FromString
        )

    async def _subscribe(
        self, request: kv_events_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        if request.start_sequence_number:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "there is no history; begin with 0")
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_LAG)
        self._waiting.add(queue)
        try:
            await context.send_initial_metadata(())
            while not queue.full():
                yield await queue.get()
        finally:
            self._waiting.discard(queue)
        await context.abort(grpc.StatusCode.DATA_LOSS, f"more than {MAX_LAG} messages wait")
