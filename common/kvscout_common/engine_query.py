"""Asking an engine over HTTP what it is: where it publishes KV events, what it serves, how large its cache is.

vLLM tells its event sockets at `/kv_event_sources` (0.31 and later; one object a rank, or a list), SGLang at
`/server_info`; both their models at `/v1/models`; vLLM the shape of its cache in its metrics. What an engine does not
have stays unknown. Answers are read up to a bound, and nothing in them is trusted to be of the right type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvscout_common.engine_facts import EngineFacts
from kvscout_common.errors import Unavailable
from kvscout_common.worker import EngineKind, EventEndpoint

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_RANKS = 1024
ANY_HOSTS = ("*", "0.0.0.0", "::", "[::]", "")
"""What an engine binds where every address of its machine is meant."""
NULL_BLOCKS = 1
"""vLLM counts a block that never holds tokens."""
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def ask_engine(http: aiohttp.ClientSession, url: str, engine: EngineKind) -> EngineFacts:
    """What an engine tells of itself.

    Args:
        http: To ask with.
        url: Base URL of its HTTP API.
        engine: Which dialect it speaks.

    Raises:
        Unavailable: It cannot be reached, or does not serve its models yet.
    """
    models = _models(await _json(http, f"{url}/v1/models"))
    if not models:
        raise Unavailable(f"{url} serves no model yet")
    host = urlsplit(url).hostname or ""
    if engine is EngineKind.SGLANG:
        info = await _json(http, f"{url}/server_info")
        endpoints, block_size = _sglang_events(info, host)
        return EngineFacts(url, endpoints, models, block_size, 0)
    endpoints = _vllm_events(await _json(http, f"{url}/kv_event_sources"), host)
    block_size, blocks = _vllm_cache(await _text(http, f"{url}/metrics") or "")
    return EngineFacts(url, endpoints, models, block_size, blocks)


async def _text(http: aiohttp.ClientSession, url: str) -> str | None:
    """An answer; None = the engine has no such page."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(TIMEOUT_SECONDS)) as response:
            if response.status in (404, 405, 501):
                return None
            if response.status != 200:
                raise Unavailable(f"{url} answers {response.status}")
            body = bytearray()
            async for piece in response.content.iter_chunked(65_536):
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise Unavailable(f"{url} answers more than {MAX_ANSWER_BYTES} bytes")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    return body.decode(errors="replace")


async def _json(http: aiohttp.ClientSession, url: str) -> Any:
    text = await _text(http, url)
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{url} answers no JSON") from error


def _models(answer: Any) -> tuple[str, ...]:
    """Names that an engine serves under, base models first."""
    cards = answer.get("data") if isinstance(answer, Mapping) else None
    named = [card for card in cards or () if isinstance(card, Mapping) and isinstance(card.get("id"), str)]
    return tuple(card["id"] for card in sorted(named, key=lambda card: bool(card.get("parent"))))


def _vllm_events(answer: Any, host: str) -> tuple[EventEndpoint, ...]:
    if isinstance(answer, Mapping):
        sources = [(rank, source) for rank, source in answer.items() if isinstance(source, Mapping)]
    elif isinstance(answer, list):
        sources = [(source.get("data_parallel_rank", 0), source) for source in answer if isinstance(source, Mapping)]
    else:
        return ()
    found = {}
    for rank, source in sources[:MAX_RANKS]:
        endpoint = _reachable(source.get("endpoint"), host)
        if not str(rank).isdecimal() or not endpoint or source.get("publisher", "zmq") != "zmq":
            continue
        replay, topic = _reachable(source.get("replay_endpoint"), host), source.get("topic")
        found[int(rank)] = EventEndpoint(int(rank), endpoint, replay, topic if isinstance(topic, str) else "")
    return tuple(found[rank] for rank in sorted(found))


def _sglang_events(answer: Any, host: str) -> tuple[tuple[EventEndpoint, ...], int]:
    """Endpoints and block size; rank r publishes on the base port + r."""
    events = answer.get("kv_events") if isinstance(answer, Mapping) else None
    if not isinstance(events, Mapping):
        return (), 0
    block_size = _count(events.get("block_size"))
    port, replay_port = _count(events.get("endpoint_port_base")), _count(events.get("replay_port_base"))
    if events.get("publisher") != "zmq" or not port:
        return (), block_size
    bound = events.get("endpoint_host")
    name = bound if isinstance(bound, str) and bound not in ANY_HOSTS else host
    topic = events.get("topic")
    return tuple(
        EventEndpoint(
            rank,
            f"tcp://{_bracketed(name)}:{port + rank}",
            f"tcp://{_bracketed(name)}:{replay_port + rank}" if replay_port else "",
            topic if isinstance(topic, str) else "",
        )
        for rank in range(min(_count(events.get("dp_size")) or 1, MAX_RANKS))
    ), block_size


def _vllm_cache(metrics: str) -> tuple[int, int]:
    """Block size and usable blocks of one rank; of several, the smallest cache."""
    found = [dict(_LABEL.findall(labels)) for labels in _CACHE_CONFIG.findall(metrics)]
    sizes = {_count(labels.get("block_size")) for labels in found} - {0}
    blocks = {_count(labels.get("num_gpu_blocks")) for labels in found} - {0}
    return (sizes.pop() if len(sizes) == 1 else 0), max(0, min(blocks, default=0) - NULL_BLOCKS)


def _count(value: Any) -> int:
    """A number above 0 that was told as one or as its digits; anything else is 0."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _reachable(endpoint: Any, host: str) -> str:
    """A ZMQ address as a subscriber connects to it; "" = there is none."""
    if not isinstance(endpoint, str) or not endpoint.startswith(("tcp://", "ipc://")):
        return ""
    if endpoint.startswith("ipc://"):
        return endpoint
    name, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not separator or not port.isdecimal():
        return ""
    return f"tcp://{_bracketed(host) if name in ANY_HOSTS else name}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
