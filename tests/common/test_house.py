"""The rules of the house that a machine can check: imports, and protos as the API reference."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos/kvscout/v1").glob("*.proto"))
SERVICES = sorted(path.name for path in (ROOT / "services").glob("*/kvscout_*") if (path / "__init__.py").exists())
COMPOSITION = "kvscout_serve"
"""Puts services together in one process."""
LIBRARIES = ("kvscout_common", "kvscout_blocks")
SOURCES = sorted(
    path
    for folder in ("common", "services", "clients", "lab", "bench")
    for path in (ROOT / folder).rglob("*.py")
    if "target" not in path.parts and path.parent != ROOT / folder
)


def imports_of(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def package_of(path: Path) -> str:
    return next(part for part in path.parts if part.startswith("kvscout_"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_services_import_no_other_service_and_common_imports_none(path: Path) -> None:
    package = package_of(path)
    forbidden = set(SERVICES) - {package}
    if package == COMPOSITION:
        forbidden -= {"kvscout_gateway", "kvscout_indexer", "kvscout_scheduler"}
    if package in LIBRARIES:
        forbidden |= {"kvscout_client", "kvscout_cli", "kvscout_lab", "kvscout_bench"}
    if package == "kvscout_common":
        forbidden.add("kvscout_blocks")
    if package not in (*SERVICES, *LIBRARIES):
        forbidden = set()
    if package != "kvscout_bench":
        # It is not part of the package.
        forbidden.add("kvscout_bench")
    assert not imports_of(path) & forbidden


def test_one_file_a_package_imports_the_extension() -> None:
    importing: dict[str, list[str]] = {}
    for path in SOURCES:
        if "kvscout_native" in imports_of(path):
            importing.setdefault(path.parent.name, []).append(path.name)
    assert importing["kvscout_common"] == ["hashing.py"]
    assert importing["transport"] == ["native_core.py"]
    assert all(len(files) == 1 for files in importing.values()), importing


def test_no_module_is_called_after_nothing_in_particular() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "manager", "common"}
    assert not [path for path in SOURCES if path.stem in vague]


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_field_rpc_message_and_value_of_the_api_is_documented(path: Path) -> None:
    undocumented = []
    previous = ""
    for line in path.read_text().splitlines():
        stripped = line.strip()
        declares = re.match(
            r"(rpc|message|enum|service|oneof)\b|.*[\w.>]+ \w+ = \d+( \[.*\])?;|[A-Z_0-9]+ = \d+;", stripped
        )
        if declares and not stripped.startswith("//") and not previous.startswith("//"):
            undocumented.append(stripped)
        if stripped:
            previous = stripped
    assert not undocumented


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_request_names_the_tenant(path: Path) -> None:
    everything = "\n".join(p.read_text() for p in PROTOS)
    bodies = dict(re.findall(r"^message (\w+) \{\n(.*?)^\}", everything, re.DOTALL | re.MULTILINE))
    requests = set(re.findall(r"rpc \w+\((?:stream )?(\w+)\)", path.read_text()))
    assert not [name for name in requests if "  string tenant = " not in bodies[name]]


def test_tokens_and_hashes_travel_as_fixed_width_integers() -> None:
    for path in PROTOS:
        for kind, name in re.findall(r"repeated (\w+) (\w*(?:token_ids|hashes)\w*) =", path.read_text()):
            assert kind == ("fixed32" if "token_ids" in name else "fixed64"), (path.name, name)
