"""Store of the incarnations that publishers saw of their engines: a key a rank in a NATS bucket.

It works beside NATS core as well as JetStream, as long as the server has JetStream. Where it has not, nothing is kept,
and every start of a publisher begins a new epoch: that is right, and costs each reader one recovery.
"""

from __future__ import annotations

import logging

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from kvscout_blocks.publish.incarnation import Record
from kvscout_common.nats.link import NatsLink
from kvscout_common.worker import WorkerRank

log = logging.getLogger("kvscout.nats")


class IncarnationStore:
    """The bucket, over a link.

    Args:
        link: The connection.
        required: A NATS without JetStream is waited for, as one that has not got it yet.
    """

    def __init__(self, link: NatsLink, *, required: bool) -> None:
        self.kept: bool | None = None
        """True if records are kept; None = not known yet."""
        self._link = link
        self._required = required
        self._bucket: KeyValue | None = None
        link.on_connected(self._open)

    async def _open(self) -> None:
        js = self._link.client.jetstream(timeout=2)
        name = self._link.names.bridges_bucket
        try:
            try:
                self._bucket = await js.key_value(name)
            except nats.js.errors.BucketNotFoundError:
                config = KeyValueConfig(
                    bucket=name, description="publishers of KV events", replicas=self._link.config.replicas
                )
                self._bucket = await js.create_key_value(config)
        except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError):
            if self._required:
                raise
            if self.kept is None:
                log.warning("NATS has no JetStream: each start of this process begins a new epoch for its engines")
            self._bucket, self.kept = None, False
        else:
            self.kept = True

    async def load(self, tenant: str, rank: WorkerRank) -> Record | None:
        """Return the record of a rank; None: there is none, or it cannot be read.

        Raises:
            nats.errors.Error, TimeoutError: NATS does not say.
        """
        if self._bucket is None:
            return None
        try:
            entry = await self._bucket.get(self._link.names.bridge_key(tenant, rank))
        except nats.js.errors.KeyNotFoundError:
            return None
        return Record.decode(entry.value or b"")

    async def save(self, tenant: str, rank: WorkerRank, record: Record) -> None:
        """Replace the record of a rank.

        Raises:
            nats.errors.Error, TimeoutError: It may not be kept.
        """
        if self._bucket is None:
            return
        key = self._link.names.bridge_key(tenant, rank)
        try:
            await self._bucket.put(key, record.encode())
        except nats.js.errors.NoStreamResponseError:
            # Somebody deleted the bucket.
            await self._open()
            if self._bucket is not None:
                await self._bucket.put(key, record.encode())
