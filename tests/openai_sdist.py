"""Runs the tests that OpenAI ships with its Python client against a gateway and simulated engines.

    PYTHONPATH=tests python tests/openai_sdist.py [DIRECTORY]

They come from the source distribution of the installed `openai`, which is downloaded, unless DIRECTORY has it unpacked.
What is left out is in `LEFT_OUT`, with its reason; a test that is left out and passes is a failure, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import aiohttp
from support.gateway_stack import connected, mocker_worker, running_services, together
from support.mocker_process import running_mocker

FILES: Final = (
    "chat/test_completions.py",
    "chat/completions/test_messages.py",
    "test_completions.py",
    "test_embeddings.py",
    "test_models.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)
"""Below `tests/api_resources`."""
MODELS: Final = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small")
"""That the tests ask for, an engine each."""
STORED: Final = "resp_677efb5139a88190b512bc3fef8e535d"
"""A response that the tests ask for."""
_NO_STORED_CHATS = "engines store no chat completions"
_NO_SUCH_PATH = "engines have no such path"
LEFT_OUT: Final[Mapping[str, str]] = {
    r"chat\.test_completions.*(method|response)_(retrieve|update|list|list_with_all_params|delete)\b": _NO_STORED_CHATS,
    r"chat\.completions\.test_messages.*(method|response)_(list|list_with_all_params)\b": _NO_STORED_CHATS,
    r"chat\.test_completions.*_create_with_all_params_": "0 is no limit of tokens: max_completion_tokens",
    r"api_resources\.test_completions.*_create_with_all_params_overload_1\b": "stream_options without a stream",
    r"test_embeddings.*_create\[(strict|aiohttp)\]": "strict, the client refuses the base64 that it asks for by itself",
    r"test_models.*(method|response)_delete\b": "no client deletes an engine's model",
    r"test_responses.*_create_overload_": "neither model nor input is in the request",
    r"test_responses.*_create_with_all_params_": "engines take no prompt templates",
    r"test_responses.*(method|response)_(delete|compact|compact_with_all_params)\b": _NO_SUCH_PATH,
    r"test_responses.*(method|response)_cancel\b": "a response that is complete cannot be cancelled",
    r"test_input_(items|tokens)\..*(method|response)_": _NO_SUCH_PATH,
}
"""Reason by a pattern of the test's name."""
LIMIT_SECONDS: Final = 900


def unpacked(into: Path) -> Path:
    """Download the source distribution of the installed client, and return its folder."""
    release = f"openai=={version('openai')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", release]
    subprocess.run([*pip, "--dest", str(into)], check=True, timeout=LIMIT_SECONDS)
    (archive,) = into.glob("openai-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    (folder,) = (path for path in into.iterdir() if path.is_dir())
    return folder


async def run(folder: Path) -> int:
    """Run the tests of a folder, and print what became of them."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(running_services("--tokenize-timeout-ms", "5000"))
        client = await stack.enter_async_context(connected(served.gateway, served.scheduler, served.indexer))
        engines = [running_mocker("--model", model, "--store-responses") for model in MODELS]
        mockers = await stack.enter_async_context(together(*engines))
        for index, (model, mocker) in enumerate(zip(MODELS, mockers, strict=True)):
            await client.register(mocker_worker(f"w{index}", mocker, model=model))
        url = f"http://127.0.0.1:{served.gateway.ready['http_port']}/v1"
        await store_response(mockers[0].url)
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(f"tests/api_resources/{name}" for name in FILES),
            cwd=folder,
            env={**os.environ, "TEST_API_BASE_URL": url, "PYTHONPATH": str(folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            out, _ = await process.communicate()
    return judged(report, out.decode())


async def store_response(url: str) -> None:
    """Have an engine store the response that the tests retrieve, with its events: clients of gateways choose no ids."""
    body = {"model": MODELS[0], "input": "hello", "request_id": STORED, "background": True, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/responses", json=body) as response:
        text = await response.text()
        if "response.completed" not in text:
            raise SystemExit(f"no response was stored: {response.status} {text}")


def judged(report: Path, output: str) -> int:
    """Print the results; 0 if every test passed or is left out for a reason that still holds."""
    reasons, wrong = Counter[str](), []
    cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        failed = case.find("failure") is not None or case.find("error") is not None
        reason = next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, name)), None)
        if failed and reason is not None:
            reasons[reason] += 1
        elif failed or (reason is not None and case.find("skipped") is None):
            wrong.append(f"{name}: {'failed' if failed else 'passes, though it is left out: ' + str(reason)}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - reasons.total() - sum(line.endswith("failed") for line in wrong)
    print(f"openai {version('openai')}: {passed} passed, {skipped} skipped by themselves, {reasons.total()} left out:")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    if wrong:
        print(output, *wrong, sep="\n")
    return bool(wrong) or not cases


def main() -> None:
    """Download unless a folder is named, and run."""
    if len(sys.argv) > 1:
        sys.exit(asyncio.run(run(Path(sys.argv[1]))))
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(asyncio.run(run(unpacked(Path(directory)))))


if __name__ == "__main__":
    main()
