"""Collaborators of the fronts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvscout_common.identity.identity import AccessRole

if TYPE_CHECKING:
    from kvscout_common.http.http import Charge
    from kvscout_common.identity.identity import Identity
    from kvscout_gateway.fronts.client_paths import ClientPaths
    from kvscout_gateway.fronts.sessions import Sessions
    from kvscout_gateway.fronts.stored_responses import StoredResponses
    from kvscout_gateway.fronts.terms import Terms
    from kvscout_gateway.members.catalog import Catalog
    from kvscout_gateway.request.exchange import Exchanges
    from kvscout_gateway.tokens.sources import Tokens


@dataclass(frozen=True, slots=True)
class FrontContext:
    """Collaborators that read requests and run them: one for a gateway."""

    catalog: Catalog
    tokens: Tokens
    exchanges: Exchanges
    max_prompt_tokens: int
    client_paths: ClientPaths
    sessions: Sessions
    stored: StoredResponses
    terms: Terms
    """Terms of requests: priority, fairness id, deadline, targets."""
    response_headers: str
    """Callers to whom answers say where their request went: "all", "admins" or "none"."""
    charge: Callable[[str], Charge]
    """Begins to charge a tenant for the memory of a request."""

    def shows_decision(self, identity: Identity) -> bool:
        """Return whether answers say to a caller where its request went."""
        of_admin = self.response_headers == "admins" and identity.role is AccessRole.ADMIN
        return of_admin or self.response_headers == "all"
