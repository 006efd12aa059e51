"""`kvscout.v1.KvEventBatch`: the one form in which index state and events leave a process.

`events.proto` says what each field means.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import DEFAULT_TENANT, PoolKey, WorkerRank

VERSION = 1
"""Version of the message; readers take this one and the one before."""
MAX_CHUNK_BYTES = 512 * 1024
"""NATS refuses messages of over 1 MiB by default; half of that leaves room for what a proxy adds."""


def check_version(batch: events_pb2.KvEventBatch) -> None:
    """Refuse a message that this release cannot read.

    Raises:
        FailedPrecondition: If its version is neither ours nor the one before.
    """
    if not max(1, VERSION - 1) <= batch.version <= VERSION:
        raise FailedPrecondition(f"version {batch.version} of KvEventBatch, this release reads {VERSION}")


class Published(NamedTuple):
    """Events of one source, as its publisher sent them."""

    worker: WorkerRank
    pool: PoolKey
    epoch: int
    event_id: int | None
    reset: bool
    """The source starts anew: what was known of it goes first."""
    batch: DecodedBatch


def parse_batch(message: bytes) -> events_pb2.KvEventBatch:
    """Parse a serialised message.

    Raises:
        InvalidArgument: The bytes are none.
    """
    try:
        return events_pb2.KvEventBatch.FromString(message)
    except DecodeError as error:
        raise InvalidArgument("is not a message", field="batch") from error


def source_of(message: events_pb2.KvEventBatch) -> tuple[WorkerRank, PoolKey]:
    """Return the source of a message's events or state, and the key of its index."""
    return (
        WorkerRank(message.worker_id, message.dp_rank),
        PoolKey(message.model, message.tenant or DEFAULT_TENANT, message.block_size, message.eagle),
    )
