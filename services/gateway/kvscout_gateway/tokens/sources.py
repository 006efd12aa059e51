"""All that finds the tokens of prompts, put together for one gateway: the sources of `source.py`, in their order."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import parsed, read_page
from kvscout_common.rpc.service_info import Warned
from kvscout_common.worker import EngineKind, WorkerSpec
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.engines.engine_key import EngineKey
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.tokens.engine_comparison import EngineComparison
from kvscout_gateway.tokens.found_tokenizers import FoundTokenizers, model_folder, require_libraries
from kvscout_gateway.tokens.local_source import LocalSource
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.tokens.prompt_tokens import PromptTokenizer
from kvscout_gateway.tokens.remote_source import RemoteSource, render_call, tokenize_call
from kvscout_gateway.tokens.remote_tokens import RemoteTokens, Server
from kvscout_gateway.tokens.source import SourceName, TokenRequest, TokenSource
from kvscout_gateway.tokens.text_tokenizer import TextTokenizer
from kvscout_gateway.tokens.threads import Threads

log = logging.getLogger("kvscout.gateway")

_MODEL_PAGES: Final = ("/v1/models", "/get_model_info")
"""Pages of vLLM and SGLang that name the folder they serve."""
ASK_SECONDS: Final = 2.0
RENDERING: Final = frozenset((EngineKind.VLLM, EngineKind.MOCK))
"""Kinds of engines that have render endpoints, in some of their releases."""
ANY: Final = ""
"""Key of what is for models that have none of their own."""


class Tokens:
    """The tokens of prompts, and whether they are the engines'."""

    def __init__(
        self,
        catalog: Catalog,
        engines: Engines,
        engine_key: EngineKey,
        metrics: CollectorRegistry,
        *,
        reachable: Callable[[str, Sequence[WorkerSpec]], Sequence[WorkerSpec]],
        tokenizers: Mapping[str, Path],
        finds_tokenizers: bool,
        renderers: Mapping[str, str],
        cache_bytes: int,
        timeout_seconds: float,
        connect_seconds: float,
    ) -> None:
        """Read the tokenizers.

        Args:
            catalog: The registered workers.
            engines: How they are called.
            engine_key: The key that they want to see.
            metrics: Shows what is counted.
            reachable: Keeps those of a tenant's workers that can be called over HTTP.
            tokenizers: Folder of each model's tokenizer; "" = of all models that have none of their own.
            finds_tokenizers: Look for those of other models on this machine.
            renderers: Base URL of each model's renderer; "" = of all models that have none of their own.
            cache_bytes: Size of the cache of texts and their tokens, for each tenant and model.
            timeout_seconds: Longest wait for renderers and engines that tokenize a prompt; 0 = none is used.
            connect_seconds: Longest wait for a connection to it.

        Raises:
            ConfigError: One cannot be read, or the libraries for it are not installed.
        """
        self._catalog = catalog
        self._http = engines.client
        self._engine_key = engine_key
        self._reachable = reachable
        self._threads = Threads()

        def load(folder: Path) -> TextTokenizer:
            return TextTokenizer.load(folder, self._threads, cache_bytes=cache_bytes, flag="tokenizer")

        own = {model: load(folder) for model, folder in tokenizers.items()}
        self._renderers = {model: Server(url) for model, url in renderers.items()}
        self._found = None
        if finds_tokenizers:
            require_libraries("tokenizer")
            self._found = FoundTokenizers(load, self._folder_of)
        self.remote = RemoteTokens(self._http, connect_seconds=connect_seconds, cache_bytes=cache_bytes)
        self.parity = ParityCheck(metrics)
        self.comparison = EngineComparison(self.parity, self.remote, lambda: engine_key.headers)
        by_name: dict[SourceName, TokenSource] = {
            SourceName.TOKENIZER: LocalSource(SourceName.TOKENIZER, lambda _, model: own.get(model) or own.get(ANY))
        }
        if self._found is not None:
            by_name[SourceName.FOUND] = LocalSource(SourceName.FOUND, self._found.get, self._found.judge)
        if timeout_seconds:
            by_name |= {
                name: RemoteSource(name, self.remote, choose, call_of)
                for name, choose, call_of in (
                    (SourceName.RENDERER, self._renderer, render_call),
                    (SourceName.ENGINE_TOKENIZE, self._engine, tokenize_call),
                    (SourceName.ENGINE_RENDER, self._engine_that_renders, render_call),
                )
            }
        in_order = [by_name[name] for name in SourceName if name in by_name]
        self.prompts = PromptTokenizer(in_order, self.parity, remote_seconds=timeout_seconds)
        metrics.register(self.prompts)

    async def close(self) -> None:
        """End the tasks that run beside requests."""
        await self.comparison.close()
        if self._found is not None:
            await self._found.close()
        self._threads.close()

    async def _folder_of(self, tenant: str, model: str) -> str:
        """Ask an engine which folder it serves; "" = it names none."""
        engine = next(self._engines_of(tenant, model), None)
        if engine is None:
            return ""
        for path in _MODEL_PAGES:
            url = f"{engine.endpoint}{path}"
            try:
                page = await read_page(self._http, url, timeout_seconds=ASK_SECONDS, headers=engine.headers)
            except Unavailable as error:
                log.debug("no folder of model %s: %s", model, error)
                continue
            if page is not None and (folder := await parsed(page, partial(model_folder, model=model))):
                return folder
        return ""

    def warnings(self) -> list[Warned]:
        """Return what an operator should know: classes whose tokens differ, renderers that do not answer."""
        renderers = {server.endpoint for server in self._renderers.values()}
        troubles = {why for endpoint in sorted(renderers) for why in self.remote.troubles(endpoint)}
        return [*self.parity.warnings(), *(f"renderer: {why}: see --renderer" for why in sorted(troubles))]

    def _renderer(self, wanted: TokenRequest) -> Iterable[Server]:
        server = self._renderers.get(wanted.model) or self._renderers.get(ANY)
        return () if server is None else (server,)

    def _engine(self, wanted: TokenRequest) -> Iterable[Server]:
        return self._engines_of(wanted.tenant, wanted.model)

    def _engine_that_renders(self, wanted: TokenRequest) -> Iterable[Server]:
        return self._engines_of(wanted.tenant, wanted.model, RENDERING)

    def _engines_of(
        self, tenant: str, model: str, kinds: frozenset[EngineKind] = frozenset(EngineKind)
    ) -> Iterator[Server]:
        """Yield the engines of these kinds that can be reached, from a random one on."""
        serving = self._catalog.tenant(tenant).serving(model)
        fitting = [w for w in serving.specs if w.worker_id not in serving.unroutable and w.engine in kinds]
        workers = self._reachable(tenant, fitting)
        start = random.randrange(len(workers)) if workers else 0
        for place in range(len(workers)):
            worker = workers[(start + place) % len(workers)]
            yield Server(worker.http_endpoint, self._engine_key.headers)
