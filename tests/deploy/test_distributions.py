"""What is published: a source distribution that has all it takes, and wheels that are named after what is in them."""

import asyncio
import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest
from support.gateway_stack import MODEL, together
from support.mocker_process import running_mocker
from support.processes import eventually

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(*patterns: str) -> list[str]:
    """Files that git has and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


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
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    archive = build("build_sdist", copy, directory / "dist", "/usr/bin:/bin")
    # Not with tarfile: Python 3.11.2, which is Debian's, knows no filter yet, and later ones warn where none is given.
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", directory], check=True)
    (found,) = directory.glob("kvscout-*")
    return found


def test_the_source_distribution_has_what_the_extension_is_built_of(unpacked: Path) -> None:
    for path in ("Cargo.toml", "Cargo.lock"):
        assert (unpacked / "native" / path).read_bytes() == (ROOT / "native" / path).read_bytes()
    sources = {path.relative_to(ROOT) for path in (ROOT / "native/src").rglob("*.rs")}
    assert len(sources) > 20
    assert {path.relative_to(unpacked) for path in (unpacked / "native/src").rglob("*.rs")} == sources


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built where there is no Rust toolchain."""
    directory = tmp_path_factory.mktemp("wheel")
    nowhere = directory / "no-cargo"
    nowhere.mkdir()
    return build("build_wheel", unpacked, directory / "wheel", str(nowhere))


def test_a_wheel_without_the_extension_is_one_for_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: true" in metadata
    assert not [name for name in names if ".data/" in name or name.endswith(".so")]
    expected = {
        str(file.relative_to(folder))
        for folder in map(ROOT.joinpath, PROJECT["tool"]["setuptools"]["packages"]["find"]["where"])
        for file in map(ROOT.joinpath, tracked(f"{folder}/kvscout*"))
        if file.suffix != ".md"
    }
    assert len(expected) > 400
    assert not expected - set(names)
    assert not [name for name in names if name.startswith("kvscout_bench")]


async def test_from_the_wheel_alone_one_process_routes_to_two_engines(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    # Without site nothing of the environment leads to the sources: of kvscout there is what the wheel has.
    environment = {"PYTHONPATH": f"{installed}:{sysconfig.get_path('purelib')}"}
    flags = ("--port", "0", "--http-port", "0", "--metrics-port", "0", "--workers-file", "workers.yaml")
    async with together(running_mocker(), running_mocker()) as mockers:
        workers = [
            {
                "worker_id": f"w{number}",
                "model": MODEL,
                "block_size": 16,
                "http_endpoint": mocker.url,
                "event_endpoints": [{"endpoint": mocker.ranks[0]["events"]}],
            }
            for number, mocker in enumerate(mockers)
        ]
        (tmp_path / "workers.yaml").write_text(json.dumps({"workers": workers}))
        served = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", "from kvscout_cli.main import main; main()", "serve", *flags),
            cwd=tmp_path,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert served.stdout is not None
            ready = json.loads(await served.stdout.readline())
            url = f"http://127.0.0.1:{ready['http_port']}/v1/completions"

            async def cached() -> bool:
                body = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 1}
                async with mockers[0].http.post(url, json=body) as response:
                    answer = await response.json()
                return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48)

            await eventually(cached, what="a prompt that is found where it is cached")
            assert psutil.Process(served.pid).children() == []
        finally:
            served.terminate()
            code = await served.wait()
        assert code == 0


BUILD_EXTENSION = (sys.executable, "setup.py", "--quiet", "build_rust")


def test_where_there_is_no_rust_toolchain_the_build_says_so_or_fails_where_the_extension_is_required() -> None:
    environment = {"PATH": "/nowhere"}
    built = subprocess.run(BUILD_EXTENSION, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    assert "kvscout is built without its native extension" in built.stderr
    required = environment | {"KVSCOUT_REQUIRE_NATIVE": "1"}
    refused = subprocess.run(BUILD_EXTENSION, cwd=ROOT, env=required, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "KVSCOUT_REQUIRE_NATIVE=1, and there is no Rust toolchain" in refused.stderr


def test_a_rust_toolchain_that_cannot_build_the_extension_ends_the_build_unless_it_is_not_wanted(
    tmp_path: Path,
) -> None:
    for name in ("cargo", "rustc"):
        (tmp_path / name).write_text("#!/bin/sh\necho this toolchain is broken >&2\nexit 101\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    failed = subprocess.run(BUILD_EXTENSION, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "KVSCOUT_NATIVE=0 builds kvscout without it" in failed.stderr
    unwanted = environment | {"KVSCOUT_NATIVE": "0"}
    subprocess.run(BUILD_EXTENSION, cwd=ROOT, env=unwanted, check=True, capture_output=True)


def test_the_extension_is_stripped_and_good_for_later_pythons() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert PROJECT["tool"]["distutils"]["bdist_wheel"]["py_limited_api"] == f"cp{oldest}"
    cargo = tomllib.loads((ROOT / "native/Cargo.toml").read_text())
    assert f"abi3-py{oldest}" in cargo["dependencies"]["pyo3"]["features"]
    (extension,) = PROJECT["tool"]["setuptools-rust"]["ext-modules"]
    assert not extension.get("optional")
    assert extension["rustc-flags"] == ["-C", "strip=symbols"]
