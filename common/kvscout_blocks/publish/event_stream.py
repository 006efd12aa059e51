"""The JetStream stream of a model's events: made by whoever comes first, publisher or reader.

::

    stream KVSCOUT-<ns>-<tenant>-<model>, subjects kvscout.<ns>.stream.<tenant>.<model>.>
    limits: messages older than --stream-max-age go; what every reader has in a snapshot is purged earlier

Every message carries `Nats-Msg-Id`, so that one sent again because its acknowledgement was lost is stored once.
"""

from __future__ import annotations

import logging
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from kvscout_common.nats.names import NatsNames, encode_name
from kvscout_common.worker import WorkerRank

log = logging.getLogger("kvscout.nats")

STREAM_MAX_AGE_SECONDS: Final = 3600.0
"""Default of --stream-max-age."""
DUPLICATE_WINDOW_SECONDS: Final = 120.0
"""Time for which the server remembers message ids; readers drop later duplicates by (epoch, event id)."""
MSG_ID: Final = "Nats-Msg-Id"

_NAME_IN_USE: Final = 10058
"""The stream is there with other settings."""


async def ensure_stream(
    js: JetStreamContext,
    names: NatsNames,
    tenant: str,
    model: str,
    *,
    max_age_seconds: float = STREAM_MAX_AGE_SECONDS,
    replicas: int = 1,
) -> str:
    """Make the stream of a model's events unless it is there; a stream that is there keeps its settings.

    Args:
        js: JetStream.
        names: Names of the namespace.
        tenant: Tenant.
        model: Model.
        max_age_seconds: Retention.
        replicas: Servers that keep a copy.

    Returns:
        Its name.

    Raises:
        nats.errors.Error: JetStream is not there, or cannot make it.
    """
    name = names.stream(tenant, model)
    config = StreamConfig(
        name=name,
        description=f"KV events of model {model!r}, tenant {tenant!r}",
        subjects=[names.stream_subjects(tenant, model)],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=max_age_seconds,
        duplicate_window=min(DUPLICATE_WINDOW_SECONDS, max_age_seconds),
        num_replicas=replicas,
        allow_direct=True,
    )
    try:
        await js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        there = (await js.stream_info(name)).config
        if (there.max_age, there.num_replicas) != (max_age_seconds, replicas):
            log.warning(
                "stream of model %r keeps events for %g s on %s servers, as set by its creator; not %g s on %d",
                model,
                there.max_age,
                there.num_replicas,
                max_age_seconds,
                replicas,
            )
    return name


def message_id(worker: WorkerRank, *parts: object) -> str:
    """Return the `Nats-Msg-Id` of a message, unique in the stream.

    Args:
        worker: The source.
        parts: What no other message of the source has: a batch's epoch and event id, or "state", the name of a cut and
            the number of its chunk.
    """
    return ".".join(map(str, (encode_name(worker.worker_id), worker.dp_rank, *parts)))
