"""Dynamo's side of `kvscout bench rpc`: its standalone indexer and its selection service, called over HTTP."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

from kvscout_bench.peer_dynamo import BLOCK_SIZE, MODEL, DynamoIndexer, DynamoSelector
from kvscout_bench.rpc_fixture import TOKENS, Publishers, prompt, require_all
from kvscout_bench.rpc_ours import CALL_SECONDS, Call
from kvscout_bench.service_process import MeasuredProcess
from kvscout_bench.strangers import DriverFailed
from kvscout_common.http.factory import connect
from kvscout_common.http.http import HttpClient, HttpRequest

_HEADERS = (("content-type", "application/json"),)


class DynamoSide:
    """Its services with a number of workers. Errors as of `DynamoService`.

    Args:
        workers: Number of workers.
        running: Ends them.
    """

    def __init__(self, workers: int, running: ExitStack) -> None:
        self._indexer = running.enter_context(DynamoIndexer())
        self._selector = running.enter_context(DynamoSelector())
        self.processes: Mapping[str, MeasuredProcess] = {"indexer": self._indexer, "selector": self._selector}
        self._ids = itertools.count()
        for service in (self._indexer, self._selector):
            with Publishers(workers) as publishers:
                for worker_id, endpoint in publishers.endpoints.items():
                    service.register(worker_id, endpoint)
                publishers.publish()
                service.until_quiet()
        self._selector.until_schedulable()
        for tokens in TOKENS:
            query = {"model_name": MODEL, "token_ids": prompt(tokens)}
            scores = self._indexer.request("POST", "/query", query)["scores"]
            found = [rank // BLOCK_SIZE for ranks in scores.values() for rank in ranks.values()]
            require_all(found, tokens, workers)

    async def call_of(self, kind: str, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the call of a kind.

        Raises:
            KeyError: It has no such kind.
        """
        make = {"find": self._find, "life": self._life}[kind]
        client = connect()
        stack.push_async_callback(client.close)
        return make(client, tokens)

    def _find(self, client: HttpClient, tokens: int) -> Call:
        body = json.dumps({"model_name": MODEL, "token_ids": prompt(tokens)}).encode()
        url = f"http://{self._indexer.address}/query"

        async def call(number: int) -> None:
            await _call(client, "POST", url, body)

        return call

    def _life(self, client: HttpClient, tokens: int) -> Call:
        """It finds where a prompt is cached as it selects: three calls."""
        rest = json.dumps({"model_name": MODEL, "token_ids": prompt(tokens)}).encode()[1:]
        service = f"http://{self._selector.address}"

        async def call(number: int) -> None:
            name = f"request-{next(self._ids)}"
            await _call(
                client, "POST", f"{service}/select_and_reserve", b'{"selection_id":"%s",' % name.encode() + rest
            )
            await _call(client, "POST", f"{service}/reservations/{name}/prefill_complete")
            await _call(client, "DELETE", f"{service}/reservations/{name}")

        return call


async def _call(client: HttpClient, method: str, url: str, body: bytes = b"") -> None:
    answer = await client.send(HttpRequest(url, method, _HEADERS, body), connect_seconds=CALL_SECONDS)
    text = b"".join([part async for part in answer.chunks()])
    if answer.status >= 300:
        raise DriverFailed(f"{url} answered {answer.status}: {text[:200]!r}")
