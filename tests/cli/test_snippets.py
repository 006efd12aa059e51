"""Snippets of README and quick start do what they say: each is run, or read by what would take it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from cli.test_up import kvscout, output
from support.free_ports import free_ports
from support.mocker_process import running_mocker
from support.processes import DEADLINE_SECONDS

from kvscout_common.registry.workers_file import load_workers

ROOT = Path(__file__).parents[2]
README, QUICK_START = ROOT / "README.md", ROOT / "docs" / "quick-start.md"
FENCE = re.compile(r"^((?:> )? *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NEEDS_MORE = ("make demo", "make setup", "vllm serve")
"""What a snippet begins with that other tests run (`test_demo`, `check-fresh-clone`), or that needs a GPU."""


class Snippet(NamedTuple):
    language: str
    text: str


def snippets(page: Path) -> list[Snippet]:
    """Those that are to be run or read: diagrams have no language."""
    found = []
    for indent, language, text in FENCE.findall(page.read_text()):
        if language:
            lines = (line.removeprefix(indent) for line in text.splitlines())
            found.append(Snippet(language, "\n".join(lines) + "\n"))
    return found


def only(page: Path, language: str, begin: str = "") -> str:
    (found,) = (one.text for one in snippets(page) if one.language == language and begin in one.text)
    return found


async def shell(script: str, directory: Path, **environment: str) -> tuple[int | None, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOUT_")}
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", script),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**clean, "PATH": path, **environment},
    )
    try:
        text = await output(process)
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await process.wait(), text
    finally:
        if process.returncode is None:
            process.kill()


async def test_the_readme_serves_an_engine_and_its_commands_and_python_run_as_they_are(tmp_path: Path) -> None:
    grpc_port, http_port = free_ports(2)

    def here(text: str) -> str:
        return text.replace("localhost:7050", f"localhost:{grpc_port}").replace(
            "localhost:8000", f"localhost:{http_port}"
        )

    workers = only(README, "yaml")
    (engine_url,) = re.findall(r'http_endpoint: "(.*?)"', workers)
    async with running_mocker("--model", "llama-3-8b") as mocker:
        (tmp_path / "workers.yaml").write_text(workers.replace(engine_url, mocker.url))
        (tmp_path / "program.py").write_text(here(only(README, "python")))
        commands = here(only(README, "sh", "kvscout serve"))
        commands = commands.replace(". .venv/bin/activate\n", "trap 'kill $!; wait' EXIT\n").replace(
            " &  ", " 2>serve.log &  "
        )
        if shutil.which("grpcurl") is None:
            commands = re.sub(r"^grpcurl .*$", "", commands, flags=re.MULTILINE)
        code, text = await shell(
            f"set -e\n{commands}\n{shlex.quote(sys.executable)} program.py",
            tmp_path,
            KVSCOUT_SERVE_PORT=str(grpc_port),
            KVSCOUT_HTTP_PORT=str(http_port),
            KVSCOUT_METRICS_PORT="-1",
            KVSCOUT_GATEWAY=f"localhost:{grpc_port}",
        )
        assert code == 0, text + (tmp_path / "serve.log").read_text()
        assert '"chat.completion"' in text
        assert text.rstrip().endswith(mocker.url)


async def test_the_quick_starts_engines_are_a_workers_file(tmp_path: Path) -> None:
    (tmp_path / "workers.yaml").write_text(only(QUICK_START, "yaml"))
    assert [spec.worker_id for spec in load_workers(tmp_path / "workers.yaml")] == ["vllm-0", "vllm-1"]


@pytest.mark.parametrize("page", [README, QUICK_START], ids=lambda page: page.name)
def test_each_command_line_of_a_page_is_taken_by_its_program(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workers.yaml").write_text(only(QUICK_START, "yaml"))
    lines = [line for one in snippets(page) if one.language == "sh" for line in one.text.splitlines()]
    commands = [shlex.split(line.rstrip("& "), comments=True) for line in lines if line.startswith("kvscout")]
    assert commands
    for program, *words in commands:
        words = [word for word in words if word != "&"]
        module = "kvscout_cli" if program == "kvscout" else program.replace("-", "_")
        command: click.Command = import_module(f"{module}.main").main
        while isinstance(command, click.Group):
            inner = command.get_command(click.Context(command), words.pop(0))
            assert inner is not None, program
            command = inner
        command.make_context(program, words)


def test_no_snippet_is_left_to_chance() -> None:
    known = {"sh", "console", "yaml", "python"}
    assert {one.language for page in (README, QUICK_START) for one in snippets(page)} == known
    for page in (README, QUICK_START):
        for one in snippets(page):
            if one.language == "sh" and "kvscout" not in one.text.replace("kvscout_", ""):
                assert any(begin in one.text for begin in NEEDS_MORE), one.text


async def test_up_detached_as_the_quick_start_has_it(tmp_path: Path) -> None:
    (line,) = re.findall(r"^(kvscout up --detach) ", only(QUICK_START, "sh", "make setup"), re.MULTILINE)
    code, text = await shell(f"{line} --free-ports", tmp_path)
    assert code == 0, text
    done = await kvscout("down", "--state-dir", str(tmp_path / ".kvscout"))
    assert await output(done) == "kvscout is down\n"
