"""The examples in Go and TypeScript: generated from the protos as they are, and run against a gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fake_gateway import FakeGateway, fake_gateway

from kvscout.v1 import gateway_pb2, types_pb2
from kvscout_common.errors import InvalidArgument, ResourceExhausted

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
GO, TYPESCRIPT = CLIENTS / "go", CLIENTS / "typescript"
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join((os.environ.get("PATH", ""), str(Path.home() / "go" / "bin"))),
    "GOPROXY": "off",
    "GOFLAGS": "-mod=readonly",
}
OUTPUT = ["w0 rank 1 has 3 of 4 blocks", "5", "6"]


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as gateway:
        route = gateway_pb2.RouteResponse(worker=types_pb2.WorkerRank(worker_id="w0"))
        gateway.chunks = [gateway_pb2.GenerateResponse(token_ids=[token], route=route) for token in (5, 6)]
        gateway.chunks.append(gateway_pb2.GenerateResponse(usage=gateway_pb2.Usage(prompt_tokens=64)))
        yield gateway


def needs(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


async def run(folder: Path, *command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=ENVIRONMENT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def built(folder: Path, *command: str) -> None:
    code, out, err = await run(folder, *command)
    assert code == 0, f"{command}: {out}{err}"


async def test_the_example_in_go_routes_generates_and_reads_errors(gateway: FakeGateway, tmp_path: Path) -> None:
    needs("go", "buf")
    if (await run(GO, "go", "tool", "-n", "protoc-gen-go"))[0]:
        pytest.skip("its modules are not downloaded: make clients")
    await built(GO, "buf", "generate")
    example = str(tmp_path / "example")
    await built(GO, "go", "build", "-o", example, "./example")
    code, out, err = await run(GO, example, gateway.address, "m")
    assert (code, [line.strip("[]") for line in out.splitlines()], err) == (0, OUTPUT, "")
    gateway.errors["Route"] = InvalidArgument("is wrong", field="model")
    code, _, err = await run(GO, example, gateway.address, "m")
    assert (code, err.splitlines()[1:]) == (1, ["field model: is wrong"])
    gateway.errors["Route"] = ResourceExhausted("all busy", retry_after_seconds=1.5)
    assert "try again after 1.5s" in (await run(GO, example, gateway.address, "m"))[2]


async def test_the_example_in_typescript_routes_generates_and_reads_errors(gateway: FakeGateway) -> None:
    needs("node", "buf")
    if not (TYPESCRIPT / "node_modules" / ".bin" / "tsc").exists():
        pytest.skip("its packages are not installed: make clients")
    await built(TYPESCRIPT, "buf", "generate")
    await built(TYPESCRIPT, "node_modules/.bin/tsc")
    code, out, err = await run(TYPESCRIPT, "node", "dist/example.js", gateway.address, "m")
    assert (code, [line.strip("[ ]") for line in out.splitlines()], err) == (0, OUTPUT, "")
    gateway.errors["Route"] = ResourceExhausted("all busy", retry_after_seconds=1.5)
    code, _, err = await run(TYPESCRIPT, "node", "dist/example.js", gateway.address, "m")
    assert (code, err) == (1, "ResourceExhausted: all busy, try again after 1.5 s\n")
