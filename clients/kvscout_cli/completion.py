"""What shells complete besides commands and flags: policies that are installed, workers and models of the gateway.

Completion prints nothing but candidates: where no gateway answers there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import click

from kvscout_client import ClientSecurity, Router, WorkerRecord
from kvscout_common.errors import KvscoutError
from kvscout_common.variables import value_of
from kvscout_common.worker import ALL_TENANTS

TIMEOUT_SECONDS: Final = 2.0
"""Longest wait for the gateway: somebody has pressed Tab."""
MAX_CANDIDATES: Final = 200

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def policies(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the policies installed here."""
    from kvscout_scheduler.policies import installed_policies

    return _beginning(installed_policies().names, incomplete)


def workers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of the gateway's workers."""
    return _beginning({record.spec.worker_id for record in _records(context)}, incomplete)


def models(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the models of the gateway's workers."""
    return _beginning({record.spec.model for record in _records(context)}, incomplete)


def _beginning(names: Any, incomplete: str) -> list[str]:
    return [name for name in sorted(names) if name.startswith(incomplete)][:MAX_CANDIDATES]


def _records(context: click.Context) -> list[WorkerRecord]:
    given = context.params
    security = (given.get(name) for name in ("tls_ca", "tls_client_cert", "tls_client_key", "token_file"))

    async def fetch() -> list[WorkerRecord]:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async with Router(
                given.get("gateway") or value_of("KVSCOUT_GATEWAY") or "localhost:7050",
                tenant=given.get("tenant") or ALL_TENANTS,
                security=ClientSecurity.from_flags(*security),
                timeout_seconds=TIMEOUT_SECONDS,
            ) as router:
                return await router.list_workers()

    try:
        return asyncio.run(fetch())
    except (KvscoutError, TimeoutError):
        return []
