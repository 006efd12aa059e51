"""All that finds the tokens of prompts, put together for one gateway."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import parsed, read_page
from kvscout_gateway.tokens.engine_comparison import EngineComparison
from kvscout_gateway.tokens.engine_tokenize import EngineTokenize, Tokenizing
from kvscout_gateway.tokens.found_tokenizers import FoundTokenizers, folder_told, require_libraries
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.prompt_tokens import PromptTokenizer
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

log = logging.getLogger("kvscout.gateway")

_MODEL_PAGES: Final = ("/v1/models", "/get_model_info")
"""Where vLLM and SGLang tell which folder they serve."""
ASK_SECONDS: Final = 2.0


class Tokens:
    """The tokens of prompts, and whether they are the engines'."""

    def __init__(self, gateway: Gateway, metrics: CollectorRegistry) -> None:
        """Reads the tokenizers that the gateway's configuration names.

        Raises:
            ConfigError: One cannot be read, or the libraries for it are not installed.
        """
        self._gateway = gateway
        config, self._threads = gateway.config, Threads()
        cache_bytes = config.tokenizer_cache_bytes

        def load(folder: Path) -> TextTokenizer:
            return TextTokenizer.load(folder, self._threads, cache_bytes=cache_bytes, flag="tokenizer")

        tokenizers = {model: load(folder) for model, folder in config.tokenizers.items()}
        self._found = None
        if config.finds_tokenizers:
            require_libraries("tokenizer")
            self._found = FoundTokenizers(load, self._folder_of)
        engine = EngineTokenize(
            gateway.engines.client,
            self._choose,
            timeout_seconds=config.tokenize_timeout_seconds,
            connect_seconds=config.timeouts.connect_seconds,
            cache_bytes=cache_bytes,
        )
        self.prompts = PromptTokenizer(
            tokenizers, engine if config.tokenize_timeout_seconds else None, found=self._found
        )
        self.parity = ParityCheck(metrics)
        self.comparison = EngineComparison(self.parity, engine, lambda: gateway.engine_key.headers)

    async def close(self) -> None:
        """Ends what runs beside requests."""
        await self.comparison.close()
        if self._found is not None:
            await self._found.close()
        self._threads.close()

    async def _folder_of(self, tenant: str, model: str) -> str:
        """Ask an engine which folder it serves; "" = it tells none."""
        engine = self._choose(tenant, model)
        if engine is None:
            return ""
        http = self._gateway.engines.client
        for path in _MODEL_PAGES:
            url = f"{engine.endpoint}{path}"
            try:
                page = await read_page(http, url, timeout_seconds=ASK_SECONDS, headers=engine.headers)
            except Unavailable as error:
                log.debug("no folder of model %s: %s", model, error)
                continue
            if page is not None and (told := await parsed(page, partial(folder_told, model=model))):
                return told
        return ""

    def _choose(self, tenant: str, model: str) -> Tokenizing | None:
        view = self._gateway.catalog.tenant(tenant)
        serving = view.serving(view.resolve(model, "").model)
        workers = self._gateway.reachable(tenant, [w for w in serving.specs if w.worker_id not in serving.unroutable])
        if not workers:
            return None
        return Tokenizing(random.choice(workers).http_endpoint, self._gateway.engine_key.headers)
