"""Real agents against a gateway and simulated engines: Claude Code, Codex and OpenCode, in conversations of some turns.

    PYTHONPATH=tests python tests/agent_programs.py [FOLDER]

They are installed by npm into a temporary folder, unless FOLDER has them from before. Each speaks another API. Half of
the answers call one of the agent's tools, which it may refuse. What is checked: every turn is answered, a later turn
finds the one before it cached, as the agent itself reports, the gateway's predictions came true, and nothing stays
booked.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from support.gateway_stack import (
    CALL_SECONDS,
    MODEL,
    GatewayClient,
    connected,
    mocker_worker,
    running_services,
    together,
)
from support.mocker_process import running_mocker

from kvscout.v1 import gateway_pb2
from kvscout_common.rpc.channel import call

PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "@anthropic-ai/claude-code": ("2.1.197", "install.cjs"),
    "@openai/codex": ("0.169.0", ""),
    "opencode-ai": ("1.18.33", "postinstall.mjs"),
}
"""Version by package, and the script that fetches its program after it was installed."""
SESSIONS, TURNS = 3, 3
LIMIT_SECONDS: Final = 300


class Turn(NamedTuple):
    """What an agent says of one turn, its calls of tools included."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Agent:
    """How a program is run, without a terminal."""

    api: str
    program: str
    first: Sequence[str]
    """Arguments of the first turn; the prompt follows."""
    later: Sequence[str]
    read: Callable[[list[dict[str, Any]]], Turn]
    """Reads the lines of its output."""
    sums_turns: bool = False
    """What it reports of a turn includes the turns before it."""


def _claude(lines: list[dict[str, Any]]) -> Turn:
    result = lines[-1]
    if result["is_error"]:
        raise ValueError(result["result"])
    usage = result["usage"]
    rest, cached = usage["input_tokens"], usage["cache_read_input_tokens"]
    complete = cached + usage["cache_creation_input_tokens"]
    # Where a stream ends with a rest of 0 tokens, it reports those of the beginning, which are the whole prompt.
    return Turn(rest if rest >= complete else complete + rest, cached)


def _codex(lines: list[dict[str, Any]]) -> Turn:
    usage = lines[-1]["usage"]
    return Turn(usage["input_tokens"], usage["cached_input_tokens"])


def _opencode(lines: list[dict[str, Any]]) -> Turn:
    tokens = lines[-1]["part"]["tokens"]
    cached = tokens["cache"]["read"]
    return Turn(tokens["input"] + cached, cached)


CODEX: Final = ("exec", "--skip-git-repo-check", "--json")
OPENCODE: Final = ("run", "--format", "json", "--model", f"kvscout/{MODEL}")
AGENTS: Final[Mapping[str, Agent]] = {
    "Claude Code": Agent(
        "/v1/messages",
        "claude",
        ("--output-format", "json", "-p"),
        ("--output-format", "json", "--continue", "-p"),
        _claude,
    ),
    "Codex": Agent("/v1/responses", "codex", CODEX, (*CODEX, "resume", "--last"), _codex, sums_turns=True),
    "OpenCode": Agent("/v1/chat/completions", "opencode", OPENCODE, (*OPENCODE, "--continue"), _opencode),
}


def install(folder: Path) -> None:
    """Install the programs; npm runs no scripts unasked, so that theirs are run here.

    Raises:
        CalledProcessError: npm or a script failed.
    """
    names = [f"{name}@{version}" for name, (version, _) in PACKAGES.items()]
    npm = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(folder), *names]
    subprocess.run(npm, check=True, timeout=LIMIT_SECONDS)
    for name, (_, script) in PACKAGES.items():
        if script:
            package = folder / "node_modules" / name
            subprocess.run(["node", script], cwd=package, check=True, timeout=LIMIT_SECONDS, stdout=subprocess.DEVNULL)


def configured(home: Path, work: Path, url: str) -> dict[str, str]:
    """Write the configurations into a home and a folder of work; return the environment."""
    provider = f'name = "kvscout"\nbase_url = "{url}/v1"\nenv_key = "KVSCOUT_API_KEY"\nwire_api = "responses"\n'
    codex = f'model = "{MODEL}"\nmodel_provider = "kvscout"\n[model_providers.kvscout]\n{provider}'
    options = {"baseURL": f"{url}/v1", "apiKey": "any"}
    opencode = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(codex)
    work.mkdir()
    (work / "opencode.json").write_text(json.dumps({"provider": {"kvscout": opencode}}))
    models = dict.fromkeys(("OPUS", "SONNET", "HAIKU"), MODEL)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "KVSCOUT_API_KEY": "any",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name, model in models.items()},
    }


async def conversation(agent: Agent, number: int, bin_folder: Path, scratch: Path, url: str) -> list[Turn]:
    """Have an agent converse, and return what it says of each turn.

    Raises:
        ValueError: A turn failed, with all that the agent printed.
    """
    turns = []
    work = scratch / "work"
    environment = configured(scratch / "home", work, url)
    for turn in range(TURNS):
        process = await asyncio.create_subprocess_exec(
            bin_folder / agent.program,
            *(agent.later if turn else agent.first),
            f"Turn {turn} of conversation {number}: go on.",
            cwd=work,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            turns.append(agent.read([json.loads(line) for line in out.splitlines()]))
        except (ValueError, KeyError, IndexError) as error:
            printed = (out + errors).decode(errors="replace")
            raise ValueError(f"turn {turn} ({process.returncode}): {error!r}\n{printed}") from error
    if agent.sums_turns:
        pairs = pairwise([Turn(0, 0), *turns])
        return [
            Turn(now.prompt_tokens - was.prompt_tokens, now.cached_tokens - was.cached_tokens) for was, now in pairs
        ]
    return turns


async def run(programs: Path) -> int:
    """Run the agents one after the other, each in some conversations, and print what they say."""
    wrong = []
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = await stack.enter_async_context(running_services("--tokenize-timeout-ms", "5000"))
        client = await stack.enter_async_context(connected(served.gateway, served.scheduler, served.indexer))
        mockers = await stack.enter_async_context(
            together(*(running_mocker("--speedup", "20", "--tool-call-share", "0.5") for _ in range(3)))
        )
        for index, mocker in enumerate(mockers):
            await client.register(mocker_worker(f"w{index}", mocker))
        url = f"http://127.0.0.1:{served.gateway.ready['http_port']}"
        for name, agent in AGENTS.items():
            for number in range(SESSIONS):
                place = scratch / f"{agent.program}-{number}"
                try:
                    turns = await conversation(agent, number, programs / "node_modules" / ".bin", place, url)
                except (ValueError, TimeoutError) as error:
                    wrong.append(f"{name}, conversation {number}: {error!r}")
                    continue
                said = ", ".join(f"{turn.cached_tokens:,} of {turn.prompt_tokens:,}" for turn in turns)
                print(f"{name} ({agent.api}), conversation {number}: cached {said}")
                if turns[-1].cached_tokens < 0.9 * turns[-1].prompt_tokens:
                    wrong.append(f"{name}, conversation {number}: the last turn did not find the one before it")
        await client.until_idle()
        wrong += await _judged(client)
    print(*wrong, sep="\n")
    return bool(wrong)


async def _judged(client: GatewayClient) -> list[str]:
    answer = await call(client.stub.GetLadder, gateway_pb2.GetLadderRequest(), timeout=CALL_SECONDS)
    (ladder,) = (one for one in answer.ladders if not one.session_class)
    predicted, cached = ladder.predicted_tokens, ladder.actual_tokens
    print(f"{ladder.requests} requests, {ladder.prompt_tokens:,} tokens: {predicted:,} predicted, {cached:,} cached")
    came_true = ladder.requests and predicted == cached
    return [] if came_true else ["predictions did not come true"]


def main() -> None:
    """Install the agents unless a folder has them, and run."""
    if len(sys.argv) > 1:
        sys.exit(asyncio.run(run(Path(sys.argv[1]))))
    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory))
        sys.exit(asyncio.run(run(Path(directory))))


if __name__ == "__main__":
    main()
