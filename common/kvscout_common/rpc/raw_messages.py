"""Messages of handlers that are registered for raw bytes: what the server does for all others."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from kvscout_common.identity.identity import current_identity, tenants_of
from kvscout_common.rpc.handlers import read_message

M = TypeVar("M", bound=Message)


def parse_message(kind: type[M], request: bytes) -> M:
    """Read a message and check that the caller may name its tenants.

    Raises:
        InvalidArgument: The bytes are no such message.
        PermissionDenied: The caller's token is for another tenant.
    """
    message = read_message(kind.FromString, request)
    for tenant in tenants_of(message):
        current_identity().require_tenant(tenant)
    return message
