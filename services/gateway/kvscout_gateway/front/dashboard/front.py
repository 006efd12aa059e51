"""The dashboard's two paths: the page, which is the same for everybody, and what it shows, which is not."""

from __future__ import annotations

import ipaddress
from typing import Final

from kvscout_common.endpoints import is_loopback
from kvscout_common.errors import PermissionDenied
from kvscout_common.identity import TokenTable
from kvscout_common.transport.http import HttpCall
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.front.dashboard.dashboard import Dashboard
from kvscout_gateway.front.dashboard.page import page
from kvscout_gateway.front.openai.access import Caller, header
from kvscout_gateway.front.openai.refusals import WrongMethod

PAGE: Final = "/"
EVENTS: Final = "/dashboard/events"
METHOD: Final = "WatchDashboard"
"""What roles are asked for."""


class DashboardFront:
    """Answers requests of browsers."""

    def __init__(self, dashboard: Dashboard, tokens: TokenTable | None, *, host: str) -> None:
        """Answers requests.

        Args:
            dashboard: What it shows.
            tokens: Of whoever may watch; None = everybody may.
            host: The address that is served.
        """
        self._dashboard = dashboard
        self._names_hosts = tokens is not None or not is_loopback(host)

    async def show(self, call: HttpCall) -> None:
        """Answers with the page."""
        if call.method != "GET":
            raise WrongMethod(["GET"])
        await call.respond(200, *page())

    async def watch(self, call: HttpCall, caller: Caller) -> None:
        """Tells the page what there is, until it is closed.

        Args:
            call: The page's.
            caller: Whose role allows `METHOD`.

        Raises:
            PermissionDenied: It may not see all tenants.
            ResourceExhausted: Too many watch.
        """
        if caller.identity.tenant != ALL_TENANTS:
            raise PermissionDenied("the dashboard shows all tenants, this API key is for one")
        if not self._names_hosts and not _is_this_machine(header(call.headers, "host")):
            # Any page of the web can give its own name the address 127.0.0.1, and be read by its visitors' browsers.
            raise PermissionDenied(
                "without --auth-tokens the dashboard is for this machine alone: open it as http://localhost, or give"
                " tokens"
            )
        await self._dashboard.viewers.serve(call)


def _is_this_machine(host: str) -> bool:
    """Whether a Host header names an address, or the name that every machine has for itself."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
