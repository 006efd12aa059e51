"""Tokenizers of models that nobody named a folder for, found where engines on this machine have them.

::

    model ──▶ its name, where that is a folder
              the Hugging Face cache of this machine
              the folder that its engine says it serves (`root` of vLLM's /v1/models, `model_path` of SGLang)

What is found is a guess until engines have counted as many tokens; one that keeps counting others is given up. No
request waits for a search.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kvscout_common.errors import ConfigError, KvscoutError
from kvscout_common.http.engine_http import MAX_PAGE_VALUES
from kvscout_common.http.json_scan import load_json
from kvscout_common.plain_text import printable
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer

log = logging.getLogger("kvscout.gateway")

MAX_MODELS: Final = 64
"""Searched for; further ones are tokenized by their engines."""
AGAIN_SECONDS: Final = 300.0
"""After which a model that was not found is searched for again."""
MAX_MISMATCHES: Final = 4
"""In a row, after which what was found is not this model's. SGLang's releases are three, and are tried in turn."""
FILE: Final = "tokenizer.json"
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")

AskFolder = Callable[[str, str], Awaitable[str]]
"""Asks an engine of a tenant's model for the folder that it serves; "" = it names none."""


class FoundTokenizers:
    """By model; empty at first."""

    def __init__(self, load: Callable[[Path], TextTokenizer], ask_folder: AskFolder) -> None:
        """Make an empty table.

        Args:
            load: Reads a model's folder, in a thread; raises ConfigError.
            ask_folder: Asks an engine.
        """
        self._load = load
        self._ask_folder = ask_folder
        self._found: dict[str, TextTokenizer] = {}
        self._mismatches: dict[str, int] = {}
        self._searched: dict[str, float] = {}
        """When each model was last searched for, on the monotonic clock; infinity = it is not again."""
        self._searches: dict[str, asyncio.Task[None]] = {}

    def get(self, tenant: str, model: str) -> TextTokenizer | None:
        """Return the tokenizer of a model; None = none is known, and a search has begun if it is time for one."""
        found = self._found.get(model)
        if found is None and model not in self._searches and self._is_due(model):
            self._searched[model] = time.monotonic()
            self._searches[model] = task = asyncio.create_task(self._search(tenant, model))
            task.add_done_callback(lambda _: self._searches.pop(model, None))
        return found

    def judge(self, model: str, matched: bool) -> None:
        """Note whether an engine has counted as many tokens as there were by what was found."""
        if model not in self._found:
            return
        self._mismatches[model] = 0 if matched else self._mismatches.get(model, 0) + 1
        if self._mismatches[model] >= MAX_MISMATCHES:
            del self._found[model], self._mismatches[model]
            self._searched[model] = float("inf")
            log.warning("the tokenizer found for model %s differs from its engine's and is not used", printable(model))

    async def close(self) -> None:
        """End the searches."""
        searches = list(self._searches.values())
        for task in searches:
            task.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    def _is_due(self, model: str) -> bool:
        last = self._searched.get(model)
        if last is None:
            return len(self._searched) < MAX_MODELS
        return time.monotonic() - last >= AGAIN_SECONDS

    async def _search(self, tenant: str, model: str) -> None:
        try:
            folder = await asyncio.to_thread(first_folder, model)
            if folder is None:
                named = await self._ask_folder(tenant, model)
                folder = await asyncio.to_thread(first_folder, named) if named else None
            if folder is None:
                log.info("no tokenizer for model %s on this machine: using the engines' /tokenize", printable(model))
                return
            self._found[model] = await asyncio.to_thread(self._load, folder)
            log.info("tokenizer of model %s: %s", printable(model), folder)
        except KvscoutError as error:
            log.warning("no tokenizer of model %s: %s", printable(model), error)


def first_folder(name: str) -> Path | None:
    """Return the folder on this machine with the tokenizer of a model; None = there is none. Reads directories.

    Args:
        name: A model's name, or an absolute path.
    """
    try:
        return next((folder for folder in _folders(name) if (folder / FILE).is_file()), None)
    except (OSError, ValueError):
        return None


def _folders(name: str) -> Iterator[Path]:
    if os.path.isabs(name):
        yield Path(name)
    elif _REPOSITORY.fullmatch(name):
        cached = _cache() / f"models--{name.replace('/', '--')}"
        main = cached / "refs" / "main"
        if main.is_file():
            yield cached / "snapshots" / main.read_text().strip()[:64]
        yield from sorted((cached / "snapshots").glob("*"))


def _cache() -> Path:
    """Return the cache of Hugging Face's libraries, by their own variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface" / "hub"


def model_folder(page: bytes, model: str) -> str:
    """Return the folder that an engine's page names for a model; "" = it names none.

    Args:
        page: Of vLLM's `/v1/models` or SGLang's `/get_model_info`.
        model: As the engine serves it.
    """
    try:
        document: Any = load_json(page, max_values=MAX_PAGE_VALUES)
        cards = document.get("data")
        named = document.get("tokenizer_path") or document.get("model_path")
        if isinstance(cards, list):
            named = next(card.get("root") for card in cards if card.get("id") == model)
    except (ValueError, AttributeError, StopIteration):
        return ""
    return named if isinstance(named, str) else ""


def require_libraries(flag: str) -> None:
    """Raise ConfigError naming the flag where the libraries for tokenizers are not installed."""
    try:
        import jinja2  # noqa: F401 - whether it is there
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError("needs the extra 'text': pip install 'kvscout[text]'", field=flag) from error
