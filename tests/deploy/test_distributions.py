"""What is published: a source distribution that has all it takes, and wheels that are named after what is in them."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(what: str, source: Path, target: Path, path: str) -> Path:
    """Runs the build backend as pip does; returns the file."""
    target.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from setuptools import build_meta; build_meta.{what}(sys.argv[1])",
            target,
        ],
        cwd=source,
        env={"PATH": path},
        check=True,
        capture_output=True,
    )
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a copy of what git has."""
    directory = tmp_path_factory.mktemp("sdist")
    copy = directory / "copy"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, files):
        file = ROOT / name.decode()
        if file.exists():
            target = copy / name.decode()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    with tarfile.open(build("build_sdist", copy, directory / "dist", "/usr/bin:/bin")) as archive:
        archive.extractall(directory, filter="data")
    (found,) = directory.glob("kvscout-*")
    return found


def test_the_source_distribution_has_what_the_extension_is_built_of(unpacked: Path) -> None:
    for path in ("Cargo.toml", "Cargo.lock"):
        assert (unpacked / "native" / path).read_bytes() == (ROOT / "native" / path).read_bytes()
    sources = {path.relative_to(ROOT) for path in (ROOT / "native/src").rglob("*.rs")}
    assert len(sources) > 20
    assert {path.relative_to(unpacked) for path in (unpacked / "native/src").rglob("*.rs")} == sources


def test_a_wheel_without_the_extension_is_one_for_every_platform(unpacked: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "no-cargo"
    nowhere.mkdir()
    wheel = build("build_wheel", unpacked, tmp_path / "wheel", str(nowhere))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: true" in metadata
    assert "kvscout_native/__init__.py" in names
    assert not [name for name in names if ".data/" in name or name.endswith(".so")]


def test_the_extension_is_stripped_and_good_for_later_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert project["tool"]["distutils"]["bdist_wheel"]["py_limited_api"] == f"cp{oldest}"
    cargo = tomllib.loads((ROOT / "native/Cargo.toml").read_text())
    assert f"abi3-py{oldest}" in cargo["dependencies"]["pyo3"]["features"]
    (extension,) = project["tool"]["setuptools-rust"]["ext-modules"]
    assert extension["rustc-flags"] == ["-C", "strip=symbols"]
