"""Long bodies are read in threads: few at once, since each takes a multiple of its length while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from kvscout_common.http.http import Charge

T = TypeVar("T")

_threads: Final = ThreadPoolExecutor(2, thread_name_prefix="read-body")


async def read_in_thread(charge: Charge | None, read: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread; further ones wait.

    Args:
        charge: What is charged for what is read. It is kept until the function returns, whether somebody still waits
            for that or not.
        read: The function.
        arguments: Its arguments.
    """

    def run(_: Charge | None) -> T:
        return read(*arguments)

    return await asyncio.get_running_loop().run_in_executor(_threads, run, charge)
