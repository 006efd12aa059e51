"""Part of GetStatus that every service has."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvscout.v1 import types_pb2
from kvscout_common import __version__
from kvscout_common.enum_words import value_of
from kvscout_common.hashing import backend_name, native_available
from kvscout_common.identity.identity import current_identity
from kvscout_common.observability.warnings import TenantWarning, Warned, about, text_of
from kvscout_common.process.descriptors import descriptor_limit, open_descriptors
from kvscout_common.transport import chosen

__all__ = ["SLOW_BACKEND", "TenantWarning", "Warned", "about", "service_info", "shown", "text_of"]

SLOW_BACKEND = "the extension kvscout_native is not built: answers are the same, slower"


def shown(warnings: Iterable[Warned]) -> list[str]:
    """Return the texts of those that the caller of the running rpc may read."""
    seen = current_identity()
    return [text_of(warning) for warning in warnings if isinstance(warning, str) or seen.sees(warning.tenant)]


def service_info(
    started: float,
    *,
    draining: bool = False,
    warnings: Iterable[Warned] = (),
    nats: types_pb2.NatsStatus | None = None,
) -> types_pb2.ServiceInfo:
    """Return the common part of every status.

    Args:
        started: `time.monotonic()` at start.
        draining: Whether the process finishes what it has.
        warnings: What an operator should know, one sentence each; the caller is shown what it may read.
        nats: Its connection to NATS; None = it uses none.
    """
    return types_pb2.ServiceInfo(
        version=__version__,
        uptime_seconds=time.monotonic() - started,
        backend=value_of(types_pb2.Backend, backend_name()),
        transport=value_of(types_pb2.RpcTransport, chosen()),
        draining=draining,
        warnings=[*([] if native_available() else [SLOW_BACKEND]), *shown(warnings)],
        clock_unix_seconds=time.time(),
        max_descriptors=descriptor_limit(),
        open_descriptors=open_descriptors(),
        nats=nats,
    )
