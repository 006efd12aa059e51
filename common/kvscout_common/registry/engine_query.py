"""Query of an engine over HTTP: where it publishes KV events, what it serves, how large its cache is.

vLLM lists its event sockets at `/kv_event_sources` (0.31 and later; one object a rank, or a list), SGLang at
`/server_info`; both their models at `/v1/models`; vLLM the shape of its cache in its metrics. What an engine does not
have stays unknown. Nothing in its answers is trusted to be of the right type or size: what cannot be registered is left
out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from kvscout_common.endpoints import WILDCARDS, bracketed, event_endpoint_problem
from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import parsed, read_json, read_page
from kvscout_common.http.http import HttpClient
from kvscout_common.observability.prometheus_text import read_samples
from kvscout_common.plain_text import name_problem, text_problem
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.worker import MAX_RANKS, EngineKind, EventEndpoint

TIMEOUT_SECONDS = 5.0
"""For each of an engine's pages."""
MAX_MODELS = 1024
ANY_HOSTS = (*WILDCARDS, "[::]", "")
NULL_BLOCKS = 1
"""vLLM counts a block that never holds tokens."""
_OWNERS = {"vllm": EngineKind.VLLM, "sglang": EngineKind.SGLANG, "kvscout-mocker": EngineKind.MOCK}
"""Owners of models, as engines name them."""
_CACHE_CONFIG = "vllm:cache_config_info"
_COUNT_DIGITS = 9


async def query_engine(http: HttpClient, url: str, engine: EngineKind | None) -> EngineFacts:
    """Query an engine for its facts.

    Args:
        http: To query with.
        url: Base URL of its HTTP API.
        engine: Which dialect it speaks; None = that of the owner that it names of its models, or else vLLM's.

    Raises:
        Unavailable: It cannot be reached, or does not serve its models yet.
    """
    json = partial(read_json, http, timeout_seconds=TIMEOUT_SECONDS)
    cards = _cards(await json(f"{url}/v1/models"))
    models = tuple(card["id"] for card in sorted(cards, key=lambda card: bool(card.get("parent"))))
    if not models:
        raise Unavailable(f"{url} serves no model yet")
    owner = _OWNERS.get(str(cards[0].get("owned_by")))
    engine = engine or owner
    host = urlsplit(url).hostname or ""
    if engine is EngineKind.SGLANG:
        info = await json(f"{url}/server_info")
        endpoints, block_size = _sglang_events(info, host)
        tokens = _number(info.get("max_total_num_tokens")) if isinstance(info, Mapping) else None
        return EngineFacts(url, endpoints, models, block_size, (tokens or 0) // block_size if block_size else 0, owner)
    endpoints = _vllm_events(await json(f"{url}/kv_event_sources"), host)
    metrics = await read_page(http, f"{url}/metrics", timeout_seconds=TIMEOUT_SECONDS)
    block_size, blocks = await parsed(metrics or b"", _vllm_cache)
    return EngineFacts(url, endpoints, models, block_size, blocks, owner)


def _cards(answer: Any) -> list[Mapping[str, Any]]:
    """Return the models of an engine whose names can be names."""
    cards = answer.get("data") if isinstance(answer, Mapping) else None
    return [
        card
        for card in (cards[:MAX_MODELS] if isinstance(cards, list) else ())
        if isinstance(card, Mapping) and isinstance(card.get("id"), str) and not name_problem(card["id"])
    ]


def _vllm_events(answer: Any, host: str) -> tuple[EventEndpoint, ...]:
    sources: Iterable[tuple[Any, Any]] = ()
    if isinstance(answer, Mapping):
        sources = islice(answer.items(), MAX_RANKS)
    elif isinstance(answer, list):
        sources = [
            (source.get("data_parallel_rank", 0), source)
            for source in answer[:MAX_RANKS]
            if isinstance(source, Mapping)
        ]
    found = {}
    for number, source in sources:
        rank = _number(number)
        if rank is None or rank >= MAX_RANKS or not isinstance(source, Mapping):
            continue
        endpoint = _reachable(source.get("endpoint"), host)
        if endpoint and source.get("publisher", "zmq") == "zmq":
            replay = _reachable(source.get("replay_endpoint"), host)
            found[rank] = EventEndpoint(rank, endpoint, replay, _topic(source.get("topic")))
    return tuple(found[rank] for rank in sorted(found))


def _sglang_events(answer: Any, host: str) -> tuple[tuple[EventEndpoint, ...], int]:
    """Endpoints and block size; rank r publishes on the base port + r."""
    events = answer.get("kv_events") if isinstance(answer, Mapping) else None
    if not isinstance(events, Mapping):
        return (), 0
    block_size = _number(events.get("block_size")) or 0
    port, replay_port = _number(events.get("endpoint_port_base")), _number(events.get("replay_endpoint_port_base"))
    if events.get("publisher") != "zmq" or not port:
        return (), block_size
    bound = events.get("endpoint_host")
    name = bracketed(bound if isinstance(bound, str) and bound not in ANY_HOSTS else host)
    found = []
    for rank in range(min(_number(events.get("dp_size")) or 1, MAX_RANKS)):
        endpoint = _connectable(f"tcp://{name}:{port + rank}")
        replay = _connectable(f"tcp://{name}:{replay_port + rank}") if replay_port else ""
        if endpoint:
            found.append(EventEndpoint(rank, endpoint, replay, _topic(events.get("topic"))))
    return tuple(found), block_size


def _vllm_cache(metrics: bytes) -> tuple[int, int]:
    """Block size and usable blocks of one rank; of several, the smallest cache. 0 = not reported, or not readable."""
    try:
        found = [sample.labels for sample in read_samples(metrics, [_CACHE_CONFIG])]
    except ValueError:
        return 0, 0
    sizes = {_number(labels.get("block_size")) or 0 for labels in found} - {0}
    blocks = {_number(labels.get("num_gpu_blocks")) or 0 for labels in found} - {0}
    return (sizes.pop() if len(sizes) == 1 else 0), max(0, min(blocks, default=0) - NULL_BLOCKS)


def _number(value: Any) -> int | None:
    """Return a number that was sent as one or as its digits; None = it is none, or has too many of them."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_COUNT_DIGITS:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _COUNT_DIGITS:
        return int(value)
    return None


def _topic(value: Any) -> str:
    return value if isinstance(value, str) and not text_problem(value) else ""


def _reachable(endpoint: Any, host: str) -> str:
    """Return a ZMQ address as a subscriber connects to it; "" = there is none."""
    if not isinstance(endpoint, str):
        return ""
    name, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("tcp://") and separator and name in ANY_HOSTS:
        endpoint = f"tcp://{bracketed(host)}:{port}"
    return _connectable(endpoint)


def _connectable(endpoint: str) -> str:
    return "" if event_endpoint_problem(endpoint) else endpoint
