"""Identity of a caller: bearer token → role and tenant, and what a role may call.

A tokens file is YAML::

    tokens:
      - {token: "…", role: admin, tenant: "*", name: alice}
      - {sha256: "<hex digest of the token>", role: client, tenant: team-a}

Roles, each including what the ones before it may do only where the table below says so:

* `viewer`: status, lists, loads, watches, dumps; the dashboard, which is no program's.
* `worker`: registers and keeps workers, publishes events and metrics, reads what viewers read.
* `client`: routes and generates, tracks its requests, reads what viewers read.
* `admin`: everything; also what kvscout services present to one another.

`name` is what the audit log calls its bearer, `priority` the highest that its requests may have (left out: any for an
admin, 0 for others). A second list, `limits`, says how much each tenant may have at a time (`tenant_limits`).

Every tenant named anywhere in a request must be the token's own ("*" = all). In `ListWorkers` and `GetStatus` every
caller may ask for "*" and gets what it may see. `grpc.health.v1` needs no token, so
that probes work; reflection needs any valid one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvscout_common.errors import ConfigError, PermissionDenied, Unauthenticated
from kvscout_common.identity.tenant_limits import Limit, TenantLimits, TenantTable, read_limits
from kvscout_common.process.followed_file import FollowedFile, located, read_yaml
from kvscout_common.process.running_calls import ENDLESS
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT

MAX_BYTES = 1024 * 1024
"""Largest size of a tokens file."""
MAX_PRIORITY = (1 << 31) - 1
_KEYS = frozenset({"token", "sha256", "role", "tenant", "name", "priority"})
"""Keys of an entry in it."""


class AccessRole(StrEnum):
    """Rights of a caller."""

    VIEWER = "viewer"
    WORKER = "worker"
    CLIENT = "client"
    ADMIN = "admin"


_VIEW = frozenset(
    {
        "ListWorkers",
        "ListActiveRequests",
        "ListFailures",
        "GetLadder",
        "ListBusyThresholds",
        "GetStatus",
        "GetPotentialLoads",
        "GetBusyThresholds",
        "GetReplicas",
        "WatchLoads",
        "WatchDecisions",
        "Dump",
        "DumpEvents",
    }
)
_WORK = frozenset(
    {
        "RegisterWorker",
        "UpdateWorker",
        "DrainWorker",
        "KeepAlive",
        "RemoveWorker",
        "PublishEvents",
        "ReportWorkerMetrics",
        "Recover",
    }
)
_REQUEST = frozenset(
    {
        "FindMatches",
        "StreamFindMatches",
        "RecordRouting",
        "Select",
        "SelectAndReserve",
        "Reserve",
        "MarkPrefillComplete",
        "AddOutput",
        "Free",
        "Renew",
        "Lifecycle",
        "ReportFailure",
        "Route",
        "Generate",
    }
)
AUDITED = frozenset(
    {
        "ClearCooldowns",
        "DrainWorker",
        "RegisterWorker",
        "RemoveWorker",
        "ResetWorker",
        "SetBusyThresholds",
        "UpdateWorker",
    }
)
"""Calls that change what others get."""
_NARROWED = frozenset({"ListWorkers", "ListFailures", "GetLadder", "GetStatus"})
"""Calls that read tenant "*" as all that the caller may see."""
ALLOWED: Mapping[AccessRole, frozenset[str]] = {
    AccessRole.VIEWER: _VIEW | {"WatchDashboard"},
    AccessRole.WORKER: _VIEW | _WORK,
    AccessRole.CLIENT: _VIEW | _REQUEST,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller: its role and the tenant it is bound to ("*" = all)."""

    role: AccessRole
    tenant: str
    name: str = ""
    """Name of the token's bearer; "" = the tokens file does not say."""
    max_priority: int | None = None
    """The highest priority that its requests may have; None = any."""

    def may_call(self, method: str) -> bool:
        """Return whether the role allows a method, given by its short name."""
        return self.role is AccessRole.ADMIN or method in ALLOWED[self.role]

    def sees(self, tenant: str) -> bool:
        """Return whether what belongs to a tenant ("*" = to all of them together) is this caller's to read."""
        return self.tenant in (ALL_TENANTS, tenant)

    def require_tenant(self, tenant: str) -> None:
        """Refuse a tenant that is not this caller's.

        Raises:
            PermissionDenied: If the caller is bound to another tenant.
        """
        if self.tenant not in (ALL_TENANTS, tenant or DEFAULT_TENANT):
            raise PermissionDenied(f"this token is not for tenant {tenant or DEFAULT_TENANT!r}")


ANONYMOUS = Identity(AccessRole.ADMIN, ALL_TENANTS, "anonymous")
"""The caller where tokens are not required."""

_current: ContextVar[Identity] = ContextVar("kvscout_identity", default=ANONYMOUS)


def current_identity() -> Identity:
    """Return the caller of the running rpc."""
    return _current.get()


def tenant_to_show(named: str) -> str:
    """Return the tenant whose data a running rpc shows: the one it names, the default one, or for "*" its caller's."""
    return current_identity().tenant if named == ALL_TENANTS else named or DEFAULT_TENANT


def enter(identity: Identity) -> Token[Identity]:
    """Begin an rpc of this caller; it ends when `leave` gets the value that this returns."""
    return _current.set(identity)


def leave(entered: Token[Identity]) -> None:
    """End the rpc; its task may run another one next."""
    _current.reset(entered)


class TokensFile(NamedTuple):
    """Content of a tokens file."""

    by_digest: Mapping[str, Identity]
    limits: TenantTable


class TokenTable:
    """Tokens by digest: who finds out by timing how far a digest was right has still no token that has it.

    Args:
        by_digest: None = none yet.
        limits: Receives what tenants may have.
    """

    def __init__(self, by_digest: Mapping[str, Identity] | None = None, *, limits: TenantLimits | None = None) -> None:
        self.limits = limits if limits is not None else TenantLimits()
        self._by_digest = by_digest or {}

    @classmethod
    def load(cls, path: Path) -> TokenTable:
        """Read a tokens file.

        Raises:
            ConfigError: As `follow`.
        """
        table = cls()
        table.follow(path)
        return table

    def follow(self, path: Path) -> FollowedFile[TokensFile]:
        """Read a tokens file now, and whenever it changes while the returned one is watched.

        Calls that were admitted stay so.

        Raises:
            ConfigError: If the file cannot be read or an entry is wrong; names the entry, never the token.
        """
        file = FollowedFile("tokens file", (path,), lambda: _read_tokens(path), self._take)
        file.load()
        return file

    def _take(self, file: TokensFile) -> None:
        self._by_digest = file.by_digest
        self.limits.set(file.limits)

    def identify(self, token: str) -> Identity:
        """Return the identity of a token.

        Raises:
            Unauthenticated: If the token is unknown.
        """
        found = self._by_digest.get(_digest(token))
        if found is None:
            raise Unauthenticated("unknown token")
        return found

    def identify_header(self, authorization: str) -> Identity:
        """Return the identity of the bearer token in the value of an Authorization header.

        Raises:
            Unauthenticated: There is none, or it is unknown.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("no bearer token")
        return self.identify(token.strip())


def _read_tokens(path: Path) -> TokensFile:
    document = read_yaml(path, flag="auth_tokens", max_bytes=MAX_BYTES, secret=True)
    if not isinstance(document, dict) or not {"tokens"} <= set(document) <= {"tokens", "limits"}:
        problem = f"{path} must have the list 'tokens', beside it 'limits', and nothing else"
        raise ConfigError(problem, field="auth_tokens")
    entries = document["tokens"]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} has no list 'tokens'", field="auth_tokens")
    try:
        return TokensFile(_read_entries(entries), read_limits(document.get("limits", [])))
    except ConfigError as error:
        raise located(error, path, max_bytes=MAX_BYTES) from error.__cause__


def _read_entries(entries: list[Any]) -> dict[str, Identity]:
    table: dict[str, Identity] = {}
    for number, entry in enumerate(entries):
        where = f"tokens.{number}"
        digest, identity = _read_entry(entry, where)
        if digest in table:
            raise ConfigError("the same token twice", field=where)
        table[digest] = identity
    return table


def _read_entry(entry: Any, where: str) -> tuple[str, Identity]:
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        # The key that is wrong may be the token itself.
        raise ConfigError(f"has a key other than {', '.join(sorted(_KEYS))}", field=where)
    if ("token" in entry) == ("sha256" in entry):
        raise ConfigError("needs exactly one of token, sha256", field=where)
    for key in _KEYS & entry.keys() - {"priority"}:
        if not isinstance(entry[key], str) or not entry[key]:
            raise ConfigError("must be text: put it in quotes", field=f"{where}.{key}")
    if entry.get("role") not in list(AccessRole):
        raise ConfigError(f"must be one of {', '.join(AccessRole)}", field=f"{where}.role")
    digest = str(entry.get("sha256") or _digest(entry["token"])).lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError("must be 64 hexadecimal digits", field=f"{where}.sha256")
    role, tenant = AccessRole(entry["role"]), str(entry.get("tenant", DEFAULT_TENANT))
    priority = entry.get("priority", None if role is AccessRole.ADMIN else 0)
    if priority is not None and (type(priority) is not int or not 0 <= priority <= MAX_PRIORITY):
        raise ConfigError(f"must be a whole number from 0 to {MAX_PRIORITY}", field=f"{where}.priority")
    return digest, Identity(role, tenant, entry.get("name", ""), priority)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class MethodAccess:
    """Roles that may call one method, and the tenants they may name; without tokens, everybody all.

    Args:
        method: Its full name.
        tokens: None = they are not required.
    """

    def __init__(self, method: str, tokens: TokenTable | None) -> None:
        service, _, self._method = method.strip("/").rpartition("/")
        self._tokens = None if service == "grpc.health.v1.Health" else tokens
        self._by_role = service.startswith("kvscout.")
        self._streams = tokens.limits if tokens is not None and self._by_role and method in ENDLESS else None
        self._narrows = self._method in _NARROWED

    @property
    def admits_everybody(self) -> bool:
        """Return whether it makes no difference who calls."""
        return self._tokens is None

    def admit(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """Return who calls.

        Args:
            metadata: Of the call.

        Raises:
            Unauthenticated: There is no token, or it is unknown.
            PermissionDenied: Its role does not allow the call.
        """
        if self._tokens is None:
            return ANONYMOUS
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                identity = self._tokens.identify_header(value)
                break
        else:
            raise Unauthenticated("no bearer token")
        if self._by_role and not identity.may_call(self._method):
            raise PermissionDenied(f"role {identity.role} may not call {self._method}")
        return identity

    def opened(self, identity: Identity) -> None:
        """A call of an admitted caller is open from here on; one without an end of its own counts, until `closed`.

        Raises:
            ResourceExhausted: Its tenant has as many as it may have.
        """
        if self._streams is not None and identity.tenant != ALL_TENANTS:
            self._streams.take(Limit.STREAMS, identity.tenant)

    def closed(self, identity: Identity) -> None:
        """Record the end of a call."""
        if self._streams is not None and identity.tenant != ALL_TENANTS:
            self._streams.give_back(Limit.STREAMS, identity.tenant)

    def check(self, message: Any, identity: Identity) -> None:
        """Refuse a message that names a tenant which is not the caller's.

        Raises:
            PermissionDenied: It does.
        """
        if self._tokens is not None and isinstance(message, Message):
            for tenant in tenants_of(message):
                if not (self._narrows and tenant == ALL_TENANTS):
                    identity.require_tenant(tenant)


def tenants_of(message: Message) -> Iterator[str]:
    """Yield the tenant of a message ("" = unset) and every other one that nested messages name.

    Nested messages that leave theirs unset inherit the outer one, and yield nothing.
    """
    if "tenant" in message.DESCRIPTOR.fields_by_name:
        yield getattr(message, "tenant")  # noqa: B009 - the field is not part of Message's type
    for name, repeated in _nested_with_tenant(message.DESCRIPTOR):
        if repeated:
            inner = iter(getattr(message, name))
        else:
            inner = iter((getattr(message, name),) if message.HasField(name) else ())
        for item in inner:
            yield from filter(None, tenants_of(item))


@cache
def _nested_with_tenant(descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """(field, repeated) of the message fields that name a tenant somewhere inside."""
    return tuple(
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None
        and not field.message_type.GetOptions().map_entry
        and ("tenant" in field.message_type.fields_by_name or _nested_with_tenant(field.message_type))
    )
