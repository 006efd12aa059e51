"""Access control over HTTP: a client's API key → its tenant and role, by the same tokens file as gRPC."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscout_common.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvscout_common.http.http import Headers
from kvscout_common.identity.identity import ANONYMOUS, AccessRole, Identity, TokenTable
from kvscout_common.plain_text import name_problem
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT

TENANT_HEADER: Final = "x-kvscout-tenant"
"""Names the tenant where the key is for all of them."""


class Caller(NamedTuple):
    """Identity of a caller, and the tenant of its request."""

    identity: Identity
    tenant: str

    def require(self, method: str) -> None:
        """Refuse who may not call the gRPC method that does the same.

        Raises:
            PermissionDenied: The key's role does not allow it.
        """
        if not self.identity.may_call(method):
            raise PermissionDenied(f"the role {self.identity.role} of this API key does not allow this")

    @property
    def is_admin(self) -> bool:
        """Return whether it has shown a key with which it may do anything: where none is needed, nobody has."""
        return self.identity is not ANONYMOUS and self.identity.role is AccessRole.ADMIN


def caller_of(headers: Headers, tokens: TokenTable | None) -> Caller:
    """Return the caller of a request.

    Args:
        headers: Of the request; the key is `Authorization: Bearer …`, or `x-api-key`.
        tokens: None = everybody may do everything.

    Raises:
        Unauthenticated: There is no key, or it is unknown.
        PermissionDenied: The tenant that is named is another one's.
    """
    identity = ANONYMOUS if tokens is None else _identify(headers, tokens)
    named = header(headers, TENANT_HEADER)
    if named and (problem := name_problem(named)):
        raise InvalidArgument(problem, field=TENANT_HEADER)
    if named == ALL_TENANTS:
        raise InvalidArgument("a request is one tenant's", field=TENANT_HEADER)
    tenant = named or (DEFAULT_TENANT if identity.tenant == ALL_TENANTS else identity.tenant)
    identity.require_tenant(tenant)
    return Caller(identity, tenant)


def header(headers: Headers, name: str) -> str:
    """Return the first value of a header, by its name in lower case; "" = there is none."""
    for one, value in headers:
        if one.lower() == name:
            return value
    return ""


def _identify(headers: Headers, tokens: TokenTable) -> Identity:
    key = header(headers, "x-api-key")
    if key:
        return tokens.identify(key)
    authorization = header(headers, "authorization")
    if not authorization:
        raise Unauthenticated("no API key: send Authorization: Bearer KEY")
    return tokens.identify_header(authorization)
