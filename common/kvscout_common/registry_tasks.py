"""What keeps a service's registry alive: lease expiry and the watched file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvscout_common.registry import Registry
from kvscout_common.workers_file import WorkersFile

EXPIRY_SECONDS = 0.5
"""How often leases are looked at: a fraction of the shortest lease, one second."""


async def expire_leases(registry: Registry) -> None:
    """Removes workers whose leases have ended, for ever."""
    while True:
        await asyncio.sleep(EXPIRY_SECONDS)
        registry.expire()


def registry_tasks(
    registry: Registry, workers_file: Path | None
) -> tuple[dict[str, Callable[[], Coroutine[Any, Any, None]]], Callable[[], list[str]]]:
    """Loads the workers file, if there is one, and names the tasks to run beside the server.

    Returns:
        The tasks, and what to warn an operator of: a file whose current content is not in effect.

    Raises:
        ConfigError: If the file is wrong.
    """
    tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {"registry-leases": lambda: expire_leases(registry)}
    if workers_file is None:
        return tasks, list
    file = WorkersFile(workers_file, registry)
    file.load()
    tasks["workers-file"] = file.watch
    return tasks, lambda: [f"workers file not in effect: {file.error}"] if file.error else []
