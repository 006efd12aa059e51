"""All that finds the tokens of prompts, put together for one gateway."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvscout_gateway.tokens.engine_comparison import EngineComparison
from kvscout_gateway.tokens.engine_tokenize import EngineTokenize, Tokenizing
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.prompt_tokens import PromptTokenizer
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway


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
        tokenizers = {
            model: TextTokenizer.load(folder, self._threads, cache_bytes=cache_bytes, flag="tokenizer")
            for model, folder in config.tokenizers.items()
        }
        engine = EngineTokenize(
            gateway.engines.client,
            self._choose,
            timeout_seconds=config.tokenize_timeout_seconds,
            connect_seconds=config.patience.connect_seconds,
            cache_bytes=cache_bytes,
        )
        self.prompts = PromptTokenizer(tokenizers, engine if config.tokenize_timeout_seconds else None)
        self.parity = ParityCheck(metrics)
        self.comparison = EngineComparison(self.parity, engine, lambda: gateway.engine_key.headers)

    async def close(self) -> None:
        """Ends what runs beside requests."""
        await self.comparison.close()
        self._threads.close()

    def _choose(self, tenant: str, model: str) -> Tokenizing | None:
        view = self._gateway.catalog.tenant(tenant)
        serving = view.serving(view.resolve(model, "").model)
        workers = self._gateway.reachable(tenant, [w for w in serving.specs if w.worker_id not in serving.undriven])
        if not workers:
            return None
        return Tokenizing(random.choice(workers).http_endpoint, self._gateway.engine_key.headers)
