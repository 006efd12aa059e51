"""The key-value bucket of registrations in NATS: one key a worker, the last writer wins.

A lease is the time to live of the key's value (NATS 2.11 and later; below, whoever follows the bucket deletes what has
ended). Every renewal writes the value again, as it is, on condition that nobody wrote it meanwhile: so a renewal never
undoes a change, and never brings back what was removed or has ended. What was removed leaves a marker for an hour, what
has ended leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamInfo
from nats.js.errors import APIError
from nats.js.kv import KeyValue

from kvscout.v1 import workers_pb2
from kvscout_common.errors import InvalidArgument, NotFound, Unavailable
from kvscout_common.nats.link import NatsLink
from kvscout_common.registry.registry import WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto, spec_to_proto
from kvscout_common.worker import WorkerSpec

VERSION = 1
CALL_SECONDS = 2.0
MARKER_SECONDS = 3600
"""Seconds for which a removal can be distinguished from a lease that ended: longer than any network split that heals by
itself."""
MAX_VALUE_BYTES = 512 * 1024
"""NATS refuses more than 1 MiB by default."""
ENDED = "Kvscout-Ended"
"""Header of a deletion that only says that a lease ended."""
ATTEMPTS = 8
"""Tries of a change that others overtake."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One value of the bucket."""

    spec: WorkerSpec
    lease_seconds: int
    revision: int = 0
    """0 = not written yet."""

    @property
    def name(self) -> WorkerName:
        """Return the name of the worker."""
        return WorkerName(self.spec.tenant, self.spec.worker_id)

    def encode(self) -> bytes:
        """Return the value as written to the bucket."""
        return workers_pb2.StoredWorker(
            version=VERSION, worker=spec_to_proto(self.spec), lease_seconds=self.lease_seconds
        ).SerializeToString()


class Gone(Enum):
    """Why a registration is not there."""

    LOST = auto()
    """Nobody removed it: its lease ended, or NATS lost it."""
    REMOVED = auto()
    """Somebody removed it."""


def decode(name: WorkerName, value: bytes, revision: int) -> Stored:
    """Read a value.

    Raises:
        InvalidArgument: It is no registration of this worker, or of a version that is not known.
    """
    message = workers_pb2.StoredWorker()
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise InvalidArgument("is not a StoredWorker", field="value") from error
    if message.version != VERSION:
        raise InvalidArgument(f"{message.version} is not {VERSION}", field="version")
    stored = Stored(spec_from_proto(message.worker), message.lease_seconds, revision)
    if stored.name != name:
        raise InvalidArgument(f"{stored.name} is registered under the key of {name}", field="worker_id")
    return stored


class WorkerBucket:
    """The bucket, over a link. Each call opens it anew where it has to, so that a bucket may come and go.

    Args:
        link: The connection to NATS; all calls raise `Unavailable` while it is away.
    """

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._names = link.names
        self._stream = f"KV_{link.names.workers_bucket}"
        self.keeps_time: bool | None = None
        """True = the server ends leases; None = the bucket was not opened yet."""

    async def open(self) -> tuple[KeyValue, StreamInfo]:
        """Return the bucket, made if there is none, and its state."""

        js, name = await self._js(), self._names.workers_bucket
        try:
            try:
                bucket = await js.key_value(name)
            except nats.js.errors.BucketNotFoundError:
                config = KeyValueConfig(
                    bucket=name, description="workers of kvscout", replicas=self._link.config.replicas
                )
                bucket = await js.create_key_value(config)
            info = await js.stream_info(self._stream)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise _unavailable(error) from error
        self.keeps_time = bool(info.config.allow_msg_ttl)
        return bucket, info

    async def state(self, timeout_seconds: float) -> StreamInfo:
        """Return the state of the bucket's stream.

        Raises:
            NotFound: There is no bucket.
            Unavailable: NATS does not say within the time.
        """

        js = (await self._link.require()).jetstream(timeout=timeout_seconds)
        try:
            return await js.stream_info(self._stream)
        except nats.js.errors.NotFoundError as error:
            raise NotFound("the bucket of the registry in NATS is gone") from error
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise _unavailable(error) from error

    async def put(self, stored: Stored) -> int:
        """Write a registration, whatever is there; return its revision."""
        return await self._publish(stored.name, stored.encode(), {}, stored.lease_seconds)

    async def create(self, stored: Stored) -> int | None:
        """Write a registration where there never was one; return its revision, None = there is or was one."""
        return await self._write_after(stored, 0)

    async def get(self, name: WorkerName) -> Stored | Gone:
        """Return what is registered now, or why nothing is.

        Raises:
            InvalidArgument: What is there cannot be read.
        """

        key = self._names.worker_key(*name)
        try:
            message = await (await self._js()).get_last_msg(self._stream, f"$KV.{self._names.workers_bucket}.{key}")
        except nats.js.errors.NotFoundError:
            return Gone.LOST
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise _unavailable(error) from error
        headers = message.headers or {}
        if "KV-Operation" in headers and ENDED not in headers:
            return Gone.REMOVED  # by us, or by an operator's tools
        if not message.data:
            return Gone.LOST
        return decode(name, message.data, message.seq or 0)

    async def change(
        self, name: WorkerName, known: Stored | None, edit: Callable[[Stored], Stored] = lambda stored: stored
    ) -> Stored | Gone:
        """Write a registration again, on condition that it is there.

        Args:
            name: Which.
            known: What may be there; it is asked for where that turns out to be wrong.
            edit: Makes of what is there what shall be; itself = a renewal.

        Returns:
            What was written, or why there was nothing to change.
        """
        current: Stored | Gone | None = known if known is not None and known.revision else None
        for _ in range(ATTEMPTS):
            if current is None:
                current = await self.get(name)
            if isinstance(current, Gone):
                return current
            wanted = edit(current)
            revision = await self._write_after(wanted, current.revision)
            if revision is not None:
                return replace(wanted, revision=revision)
            current = None
        raise Unavailable(f"others keep changing worker {name.worker_id!r}", retry_after_seconds=1.0)

    async def remove(self, name: WorkerName) -> int:
        """Write the marker of a removal, whatever is there; return its revision."""
        return await self._publish(name, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, MARKER_SECONDS)

    async def end(self, stored: Stored) -> None:
        """Delete what has ended, unless it was written meanwhile; for servers that do not do it themselves."""
        headers = {"KV-Operation": "DEL", ENDED: "lease", "Nats-Expected-Last-Subject-Sequence": str(stored.revision)}
        await self._publish_if(stored.name, b"", headers, MARKER_SECONDS)

    async def _write_after(self, stored: Stored, revision: int) -> int | None:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        return await self._publish_if(stored.name, stored.encode(), headers, stored.lease_seconds)

    async def _publish_if(
        self, name: WorkerName, value: bytes, headers: dict[str, str], ttl_seconds: int
    ) -> int | None:

        try:
            return await self._publish(name, value, headers, ttl_seconds)
        except Unavailable as error:
            # 10071, 10164: the last sequence of the subject is another one.
            if isinstance(error.__cause__, APIError) and error.__cause__.err_code in (10071, 10164):
                return None
            raise

    async def _publish(self, name: WorkerName, value: bytes, headers: dict[str, str], ttl_seconds: int) -> int:

        if len(value) > MAX_VALUE_BYTES:
            raise InvalidArgument(f"{len(value)} bytes, at most {MAX_VALUE_BYTES} are kept in NATS", field="worker")
        if self.keeps_time is None:
            await self.open()
        if ttl_seconds and self.keeps_time:
            headers = {**headers, "Nats-TTL": str(ttl_seconds)}
        subject = f"$KV.{self._names.workers_bucket}.{self._names.worker_key(*name)}"
        try:
            try:
                ack = await (await self._js()).publish(subject, value, headers=headers)
            except nats.js.errors.NoStreamResponseError:
                await self.open()
                ack = await (await self._js()).publish(subject, value, headers=headers)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise _unavailable(error) from error
        return ack.seq

    async def _js(self) -> JetStreamContext:
        return (await self._link.require()).jetstream(timeout=CALL_SECONDS)


def _unavailable(error: BaseException) -> Unavailable:
    return Unavailable(f"the registry in NATS does not answer: {error!r}", retry_after_seconds=1.0)
