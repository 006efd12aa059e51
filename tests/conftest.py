"""The transport of the tests' own calls, the order of the tests, a marker on those that start processes, and a look at
what each event loop leaves open."""

import asyncio
import os
import re
import signal
import sys
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import seeds
from support.tcp_server import stop_accepting

from kvscout_common.transport import Transport, choose, default_transport
from kvscout_common.variables import PREFIX

choose(Transport(os.environ.get(f"{PREFIX}RPC_TRANSPORT", default_transport())))

# Both measure by the wall clock, also while the machine has stopped the process. With a given seed the examples are
# the same in each run, and none is remembered from one run for another.
settings.register_profile(
    "kvscout", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=seeds.GIVEN
)
settings.load_profile("kvscout")

TESTS = Path(__file__).parent
# Where bytecode is not written, each of a thousand processes would compile every module for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(TESTS.parent / "build" / "bytecode"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: the processes that tests start would ignore their Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
_close_loop = BaseSelectorEventLoop.close


def _close_loop_and_its_connections(loop: BaseSelectorEventLoop) -> None:
    """Close an event loop with what its servers accepted in its last turns, and warn of what else is open.

    Both would otherwise be found by a garbage collection in some later test, and fail that one.
    """
    left: list[str] = []
    if not loop.is_closed() and (loop._transports or _listening(loop)):  # type: ignore[attr-defined]  # no public list of them
        loop.run_until_complete(_end_connections(loop, left))
    _close_loop(loop)
    if left:
        warnings.warn(f"left open when its event loop was closed: {', '.join(left)}", ResourceWarning, stacklevel=2)


def _listening(loop: Any) -> list[Any]:
    """Return the sockets on which connections are accepted."""
    readers = [key.data[0] for key in loop._selector.get_map().values() if key.data[0] is not None]
    return [reader._args[1] for reader in readers if reader._callback == loop._accept_connection]


async def _end_connections(loop: Any, left: list[str]) -> None:
    for listening in _listening(loop):
        left.append(f"a server at {listening}")
        await stop_accepting(listening)
    for transport in list(loop._transports.values()):
        if transport._server is None and not transport.is_closing():
            left.append(repr(transport))
        else:
            # Also where it is closing: what was written and nobody reads keeps it open.
            transport.abort()
    await asyncio.sleep(0)


BaseSelectorEventLoop.close = _close_loop_and_its_connections  # type: ignore[method-assign, assignment]

STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|create_subprocess_\w+|os\.fork|kvscout_bench|playwright)\b"
)
"""Words of a module that starts processes."""
PROCESS_MODULES = ("kvscout_cli.process", "kvscout_cli.stack", "kvscout_cli.commands.up", "kvscout_cli.commands.demo")
"""Modules of the product that do."""
IMPORTS = re.compile(r"^[ \t]*(?:from[ ]([\w.]+)[ ])?import[ ](\([^)]*\)|.*)", re.MULTILINE)
"""Where each name is imported from, if from anywhere, and the names."""


@cache
def starts_processes(path: Path) -> bool:
    """Return whether a file of the tests starts processes, or imports one of them that does."""
    text = path.read_text()
    if STARTS_PROCESSES.search(text):
        return True
    for source, names in IMPORTS.findall(text):
        words = re.findall(r"[\w.]+", names)
        for name in (source, *(f"{source}.{word}" for word in words)) if source else words:
            imported = TESTS / f"{name.replace('.', '/')}.py"
            if name in PROCESS_MODULES or (imported != path and imported.exists() and starts_processes(imported)):
                return True
    return False


@cache
def needs_processes(path: Path) -> bool:
    """Return whether a file of tests, or a conftest.py of its folders, starts processes."""
    shared = (folder / "conftest.py" for folder in path.parents if TESTS in folder.parents)
    return any(map(starts_processes, (path, *filter(Path.exists, shared))))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "process: set on tests of files that start processes, or import one that does")
    config.addinivalue_line("markers", "services_only: slow, or of what one process does not have; see each_mode")
    config.addinivalue_line("markers", "slow: takes seconds without starting a process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say in the report of a test that fails how it is run again with the same random numbers."""
    report = yield
    if report.failed:
        report.sections.append(("Seed of random tests", f"{seeds.VARIABLE}={seeds.test_seed()}"))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and put those that may take minutes first: or all others would be through when
    the last of them begins."""
    # Services warn of variables that they do not know.
    os.environ.pop(seeds.VARIABLE, None)
    for item in items:
        if needs_processes(item.path):
            item.add_marker("process")

    def longest(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark is not None else 0.0

    items.sort(key=longest, reverse=True)
