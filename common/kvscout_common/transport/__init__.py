"""Transport of calls: one interface, that of `grpc.aio` as far as kvscout uses it, with two backends.

::

    servicers, stubs, interceptors ──▶ server and channel ──┬─▶ grpc.aio        everywhere
                                                            └─▶ native_*.py     where the extension is built

Nothing above knows which one serves it; `serving` and `channel` choose, by `--rpc-transport`. The native one leaves
HTTP/2 to the extension (`native/src/rpc`), which the service's own event loop drives: no thread, few syscalls a call.
"""

from __future__ import annotations

from enum import StrEnum

from kvscout_common.errors import ConfigError
from kvscout_common.hashing import native_available


class Transport(StrEnum):
    """Transport of the calls of this process."""

    NATIVE = "native"
    GRPCIO = "grpcio"


_chosen = Transport.GRPCIO


def default_transport() -> Transport:
    """Return the default transport of a server: native where the extension is built."""
    return Transport.NATIVE if native_available() else Transport.GRPCIO


def choose(transport: Transport) -> None:
    """Set what servers and channels that this process makes from here on are made of; a client needs no choice.

    Raises:
        ConfigError: The extension is not there.
    """
    global _chosen  # noqa: PLW0603 - like the backend, one for a process
    if transport is Transport.NATIVE and not native_available():
        raise ConfigError("the extension kvscout_native is not built", field="rpc_transport")
    _chosen = transport


def chosen() -> Transport:
    """Return what was chosen; grpcio unless something was."""
    return _chosen
