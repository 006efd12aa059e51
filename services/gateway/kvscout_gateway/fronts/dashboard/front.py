"""The dashboard's two paths: the page, which is the same for everybody, and what it shows, which is not."""

from __future__ import annotations

from typing import Final

from kvscout_common.errors import PermissionDenied
from kvscout_common.http.http import HttpCall
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.fronts.access import Caller
from kvscout_gateway.fronts.dashboard.dashboard import Dashboard
from kvscout_gateway.fronts.dashboard.page import page
from kvscout_gateway.fronts.refusals import WrongMethod

PAGE: Final = "/"
EVENTS: Final = "/dashboard/events"
METHOD: Final = "WatchDashboard"
"""RPC name by which roles allow the dashboard."""


class DashboardFront:
    """Answers requests of browsers."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    async def show(self, call: HttpCall) -> None:
        """Answer with the page."""
        if call.method != "GET":
            raise WrongMethod(["GET"])
        await call.respond(200, *page())

    async def watch(self, call: HttpCall, caller: Caller) -> None:
        """Send the page what there is, until it is closed.

        Args:
            call: The page's.
            caller: Whose role allows `METHOD`.

        Raises:
            PermissionDenied: It may not see all tenants.
            ResourceExhausted: Too many watch.
        """
        if caller.identity.tenant != ALL_TENANTS:
            raise PermissionDenied("the dashboard shows all tenants, but this API key is for one tenant")
        await self._dashboard.viewers.serve(call)
