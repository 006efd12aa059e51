"""Imports of each package: folders have an order, files form no circles, and chains of imports stay short.

A file imports from its own folder and from lower ones. Its floor is the length of the longest chain of imports that
begins there. Imports under `if TYPE_CHECKING` count for neither: they do not exist at run time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


MAX_CIRCLE = 2
"""Files that may import one another in a circle."""


class House(NamedTuple):
    """Limits of one package."""

    folders: tuple[str, ...] = ("",)
    """Folders, lowest first; "" = the files at the top of the package, but for those that have a place of their own."""
    floors: int = 10
    """Longest chain of imports, in files."""


HOUSES = {
    "common/kvscout_common": House(
        folders=(
            "",
            "process",
            "observability",
            "transport",
            "settings",
            "identity",
            "http",
            "rpc",
            "nats",
            "kubernetes",
            "registry",
            "doctor",
        )
    ),
    "common/kvscout_blocks": House(folders=("", "bytes", "index", "source", "publish")),
    "services/indexer/kvscout_indexer": House(folders=("index", "feeds", "streams", "", "rpc", "main.py")),
    "services/scheduler/kvscout_scheduler": House(
        folders=(
            "values",
            "costs",
            "estimates",
            "load",
            "policies",
            "queue",
            "bookings",
            "messages",
            "config.py",
            "flags.py",
            "scheduler.py",
            "scraper.py",
            "replicas",
            "rpc",
            "service.py",
            "main.py",
            "",
        ),
    ),
    "services/gateway/kvscout_gateway": House(
        folders=(
            "values",
            "",
            "upstreams",
            "upstreams/indexer",
            "upstreams/scheduler",
            "engines",
            "members",
            "tokens",
            "ladder",
            "request",
            "fronts",
            "fronts/openai",
            "fronts/shadow",
            "fronts/endpoint_picker",
            "config.py",
            "flags.py",
            "fronts/grpc",
            "fronts/dashboard/page",
            "fronts/dashboard",
            "gateway.py",
            "http",
            "main.py",
        )
    ),
    "services/bridge/kvscout_bridge": House(),
    "services/serve/kvscout_serve": House(),
    "services/mocker/kvscout_mocker": House(
        folders=("", "tokens", "config.py", "engine", "requests", "answers", "transfer", "routes", "main.py"), floors=8
    ),
    "clients/kvscout_client": House(),
    "clients/kvscout_cli": House(folders=("", "commands")),
    "lab/kvscout_lab": House(floors=8, folders=("", "workloads", "simulation", "cells", "real_time", "matrix")),
    "bench/kvscout_bench": House(),
}


def test_every_package_has_its_limits() -> None:
    packages = {
        str(path.parent.relative_to(ROOT))
        for folder in ("common", "services", "clients", "lab", "bench")
        for path in (ROOT / folder).glob("**/kvscout_*/__init__.py")
    }
    assert packages == HOUSES.keys()


@pytest.mark.parametrize("package", HOUSES)
def test_chains_of_imports_are_short(package: str) -> None:
    chain = _longest_chain(_imports(ROOT / package))
    assert len(chain) <= HOUSES[package].floors, " > ".join(chain)


@pytest.mark.parametrize("package", HOUSES)
def test_imports_form_no_circle(package: str) -> None:
    assert not [circle for circle in _circles(_imports(ROOT / package)) if len(circle) > MAX_CIRCLE]


@pytest.mark.parametrize("package", HOUSES)
def test_a_folder_imports_only_lower_ones(package: str) -> None:
    folders = HOUSES[package].folders
    graph = _imports(ROOT / package)
    order = {folder: position for position, folder in enumerate(folders)}
    place_of = {file: file if file in order else file.rpartition("/")[0] for file in graph}
    assert set(place_of.values()) == order.keys(), "folders of the package and of the table"
    upward = [
        f"{file} imports {imported}"
        for file, imports in graph.items()
        for imported in imports
        if order[place_of[imported]] > order[place_of[file]]
    ]
    assert not upward


def test_a_circle_and_an_import_that_is_only_for_types_are_told_apart(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "upper").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from house import two\n")
    (package / "two.py").write_text("def later():\n    from house.upper.three import name\n")
    (package / "upper/three.py").write_text(
        "from typing import TYPE_CHECKING\nimport house.one\nif TYPE_CHECKING:\n    from house import four\n"
    )
    (package / "four.py").write_text("from house.upper.three import name\n")
    graph = _imports(package)
    assert graph["upper/three.py"] == {"one.py"}
    assert _circles(graph) == [{"one.py", "two.py", "upper/three.py"}]
    assert _longest_chain(graph)[0] == "four.py"
    assert len(_longest_chain(graph)) == 2, "a circle counts as one floor"


def _imports(package: Path) -> dict[str, set[str]]:
    """Files of a package, each with those of the same package that it imports at run time, anywhere in it."""
    files = {_module_of(path, package): str(path.relative_to(package)) for path in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names = _imported_names(ast.parse((package / file).read_text()))
        graph[file] = {files[name] for name in names if name in files and name != module}
    return {file: imports - {"__init__.py"} for file, imports in graph.items()}


def _module_of(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _imported_names(node: ast.AST) -> Iterator[str]:
    """Full names of modules, and of what is imported from them, which may be modules."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in children:
        yield from _imported_names(child)


def _reachable(graph: dict[str, set[str]], file: str) -> set[str]:
    found: set[str] = set()
    open_files = list(graph[file])
    while open_files:
        one = open_files.pop()
        if one not in found:
            found.add(one)
            open_files.extend(graph[one])
    return found


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of files of which each imports every other, directly or not."""
    reachable = {file: _reachable(graph, file) for file in graph}
    circles: list[set[str]] = []
    for file in graph:
        circle = {other for other in reachable[file] if file in reachable[other]}
        if len(circle) > 1 and circle not in circles:
            circles.append(circle)
    return circles


def _longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports, topmost file first; a circle counts as one file."""
    circle_of = {file: frozenset(circle) for circle in _circles(graph) for file in circle}
    group_of = {file: circle_of.get(file, frozenset({file})) for file in graph}
    chains: dict[frozenset[str], list[str]] = {}

    def chain_of(group: frozenset[str]) -> list[str]:
        if group not in chains:
            below = {group_of[imported] for file in group for imported in graph[file]} - {group}
            longest = max((chain_of(one) for one in sorted(below, key=min)), key=len, default=[])
            chains[group] = [min(group), *longest]
        return chains[group]

    return max((chain_of(group_of[file]) for file in sorted(graph)), key=len)
