"""Every name that kvscout uses in NATS: subjects, streams, buckets and keys.

Models, workers and tenants may contain what NATS refuses in a name (dots, colons, spaces, wildcards), so each is
base32hex-encoded (RFC 4648, no padding). The namespace comes before everything else: two namespaces on one server share
nothing, and a new one is the safe way to a fresh start.

::

    kvscout.<ns>.core.<tenant>.<model>.<worker>.<rank>     events, NATS core
    kvscout.<ns>.stream.<tenant>.<model>.<worker>.<rank>   events, JetStream: stream KVSCOUT-<ns>-<tenant>-<model>
    kvscout.<ns>.recover.<tenant>.<worker>.<rank>          request → what a publisher still has
    kvscout.<ns>.scheduler.<...>                           replicas of the scheduler
    buckets kvscout-<ns>-workers, kvscout-<ns>-locks, kvscout-<ns>-bridges
    object store kvscout-<ns>-snapshots-<tenant>-<model>
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import WorkerRank

REGISTRY = "the registry in NATS"
"""Begins messages about problems with the bucket of workers."""
MAX_NAME_BYTES = 255
"""Longest name of a model, worker or tenant: encoded they must fit into subjects, and stream names into file names."""


def encode_name(name: str) -> str:
    """Return a name in the characters 0-9 and A-V; "" becomes "-", which no name encodes to.

    Raises:
        InvalidArgument: It is longer than `MAX_NAME_BYTES` in UTF-8.
    """
    raw = name.encode()
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidArgument(f"{len(raw)} bytes, at most {MAX_NAME_BYTES} can be a name in NATS", field="name")
    return base64.b32hexencode(raw).decode().rstrip("=") or "-"


def decode_name(encoded: str) -> str:
    """Return the name that `encode_name` encoded.

    Raises:
        InvalidArgument: It encoded none.
    """
    if encoded == "-":
        return ""
    try:
        return base64.b32hexdecode(encoded + "=" * (-len(encoded) % 8)).decode()
    except ValueError as error:
        raise InvalidArgument(f"{encoded!r} is not an encoded name", field="subject") from error


@dataclass(frozen=True, slots=True)
class NatsNames:
    """The names of one namespace."""

    namespace: str

    @property
    def _root(self) -> str:
        return f"kvscout.{encode_name(self.namespace)}"

    @property
    def _bucket_root(self) -> str:
        return f"kvscout-{encode_name(self.namespace)}"

    def core_events(self, tenant: str, model: str, worker: WorkerRank) -> str:
        """Subject of a rank's events on NATS core."""
        return f"{self._root}.core.{_source(tenant, model, worker)}"

    @property
    def all_core_events(self) -> str:
        """Subscription to every rank's events on NATS core."""
        return f"{self._root}.core.>"

    def stream_events(self, tenant: str, model: str, worker: WorkerRank) -> str:
        """Subject of a rank's events in its JetStream stream."""
        return f"{self._root}.stream.{_source(tenant, model, worker)}"

    def stream_subjects(self, tenant: str, model: str) -> str:
        """Return what the stream of a model captures."""
        return f"{self._root}.stream.{encode_name(tenant)}.{encode_name(model)}.>"

    def stream(self, tenant: str, model: str) -> str:
        """Name of the stream of a model."""
        return f"KVSCOUT-{encode_name(self.namespace)}-{encode_name(tenant)}-{encode_name(model)}"

    def parse_stream(self, stream: str) -> tuple[str, str] | None:
        """Tenant and model of a stream of events; None if it is none of this namespace."""
        encoded = stream.removeprefix(f"KVSCOUT-{encode_name(self.namespace)}-").split("-")
        if len(encoded) != 2 or encoded == stream.split("-"):
            return None
        try:
            tenant, model = map(decode_name, encoded)
        except InvalidArgument:
            return None
        return (tenant, model)

    def recover(self, tenant: str, worker: WorkerRank) -> str:
        """Subject on which a publisher answers requests for lost events of a rank."""
        return f"{self._root}.recover.{encode_name(tenant)}.{encode_name(worker.worker_id)}.{worker.dp_rank}"

    def scheduler(self, *parts: str) -> str:
        """Subject of the replicas of the scheduler; parts are names, or "*" and ">"."""
        return ".".join((self._root, "scheduler", *(p if p in ("*", ">") else encode_name(p) for p in parts)))

    @property
    def workers_bucket(self) -> str:
        """Key-value bucket of the registry."""
        return f"{self._bucket_root}-workers"

    def worker_key(self, tenant: str, worker_id: str) -> str:
        """Return the key of a registration in `workers_bucket`."""
        return f"{encode_name(tenant)}.{encode_name(worker_id)}"

    @staticmethod
    def parse_worker_key(key: str) -> tuple[str, str]:
        """Tenant and worker id of a key in `workers_bucket`.

        Raises:
            InvalidArgument: It is no such key.
        """
        parts = key.split(".")
        if len(parts) != 2:
            raise InvalidArgument(f"{key!r} is not a key of a worker", field="key")
        return decode_name(parts[0]), decode_name(parts[1])

    @property
    def locks_bucket(self) -> str:
        """Key-value bucket of locks."""
        return f"{self._bucket_root}-locks"

    @property
    def bridges_bucket(self) -> str:
        """Key-value bucket in which bridges keep where they were."""
        return f"{self._bucket_root}-bridges"

    def bridge_key(self, tenant: str, worker: WorkerRank) -> str:
        """Return the key of a rank in `bridges_bucket`."""
        return f"{self.worker_key(tenant, worker.worker_id)}.{worker.dp_rank}"

    def snapshots_bucket(self, tenant: str, model: str) -> str:
        """Object store of the snapshots of a model's indexes."""
        return f"{self._bucket_root}-snapshots-{encode_name(tenant)}-{encode_name(model)}"


def _source(tenant: str, model: str, worker: WorkerRank) -> str:
    return ".".join(map(encode_name, (tenant, model, worker.worker_id))) + f".{worker.dp_rank}"
