"""The transport of the tests' own calls, the order of the tests, and a marker on those that start processes."""

import ast
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from kvscout_common.transport import Transport, choose, default_transport
from kvscout_common.variables import PREFIX

choose(Transport(os.environ.get(f"{PREFIX}RPC_TRANSPORT", default_transport())))

TESTS = Path(__file__).parent
# Where bytecode is not written, each of a thousand processes would compile every module for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(TESTS.parent / "build" / "bytecode"))
STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|create_subprocess_\w+|os\.fork|kvscout_bench|playwright)\b"
)
"""Words of a module that starts processes."""
PROCESS_MODULES = ("kvscout_cli.process", "kvscout_cli.stack", "kvscout_cli.commands.up", "kvscout_cli.commands.demo")
"""Modules of the product that do."""


@cache
def starts_processes(path: Path) -> bool:
    """Return whether a file of the tests starts processes, or imports one of them that does."""
    text = path.read_text()
    if STARTS_PROCESSES.search(text):
        return True
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and put those that may take minutes first: or all others would be through when
    the last of them begins."""
    for item in items:
        if needs_processes(item.path):
            item.add_marker("process")

    def longest(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark is not None else 0.0

    items.sort(key=longest, reverse=True)
