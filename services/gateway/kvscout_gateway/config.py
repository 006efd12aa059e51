"""Configuration of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvscout_common.errors import ConfigError
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_common.shards import Shard
from kvscout_gateway.engines.timeouts import EngineTimeouts
from kvscout_gateway.fronts.client_paths import ClientPaths
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.fronts.objectives import FLAG as OBJECTIVES_FLAG
from kvscout_gateway.fronts.objectives import Objective, objectives_of
from kvscout_gateway.fronts.shadow.config import ShadowConfig
from kvscout_gateway.upstreams.failover import DNS


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of one gateway process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    nats: NatsConfig | None = None
    """None = runs without NATS."""
    security: ClientSecurity = PLAINTEXT
    """Transport security of calls to indexers and schedulers."""
    indexers: tuple[tuple[str, ...], ...] = (("127.0.0.1:7051",),)
    """Addresses of each shard's replicas in order of preference, mostly one shard; empty = routing on load alone.
    `dns://name:port` = whatever addresses the name has."""
    schedulers: tuple[str, ...] = ("127.0.0.1:7052",)
    """Addresses in order of preference; the first healthy one decides."""
    indexer_timeout_seconds: float = 0.02
    """An indexer slower than this is not waited for: the request is routed on load alone."""
    scheduler_timeout_seconds: float = 1.0
    queue_wait_seconds: float = 60.0
    """Longest wait in line at a scheduler, for a worker that has room."""
    conditional_disagg: bool = False
    """Prompts that a decode worker has nearly all of, and short ones, are computed there."""
    migration_limit: int = 1
    """Tries on another worker after one failed before its first token."""
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)
    """With engines that are silent."""
    health_check_seconds: float = 5.0
    """Between two health checks of an engine that puts out nothing; 0 = there are none."""
    max_prompt_tokens: int = 1 << 20
    response_headers: str = "admins"
    """Longer prompts are refused."""
    client_write_seconds: float = 60.0
    """Longest wait for a client of Generate that does not read what was generated."""
    max_in_flight: int = 10_000
    """Requests that Generate runs at once; more are refused."""
    engine_key_file: Path | None = None
    """The key that engines want to see."""
    engine_ca: Path | None = None
    """Whom to trust where engines speak https; None = whom this machine trusts."""
    http_port: int = -1
    """Port of the OpenAI front; 0 = any free one, -1 = none."""
    dashboard: bool = True
    """At / of that port."""
    ladder: bool = True
    """Explain the hit rate."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages of the web that may ask the OpenAI front; "*" = any."""
    client_paths: ClientPaths = field(default_factory=ClientPaths)
    """Paths of engines that clients may call."""
    shadow: ShadowConfig | None = None
    """The user's own balancer decides; None = this gateway does."""
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    """Folder of each model's tokenizer; "" = of all models that have none of their own."""
    finds_tokenizers: bool = False
    """Look for tokenizers of other models on this machine."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Base URL of each model's renderer; "" = of all models that have none of their own."""
    tokenizer_cache_bytes: int = 64 * 1024 * 1024
    """Bytes of the cache of texts and their tokens, for each tenant and model."""
    tokenize_timeout_seconds: float = 0.05
    """Longest wait for renderers and engines that tokenize a prompt, in all; 0 = none is used."""
    session_affinity: str = ""
    """Value that keeps requests on one worker: the name of a session's source, or "header:NAME"; "" = none."""
    no_session_sources: tuple[str, ...] = ()
    """Sources of sessions that are switched off."""
    lease_seconds: int = 30
    """Lease of the gateway's own bookings at replicas of a scheduler that is gone."""
    endpoint_picker: EndpointPickerConfig | None = None
    """None = off."""
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    """By the name by which requests refer to one."""

    def __post_init__(self) -> None:
        """Raises ConfigError where one thing excludes another, or an origin is none."""
        WebOrigins(guarded=True, host="", allowed=self.cors_origins)
        if self.shadow is None:
            return
        if self.endpoint_picker is not None:
            raise ConfigError("the user's own balancer decides, or the endpoint picker does", field="shadow")
        if self.http_port < 0:
            raise ConfigError("needs --http-port", field="shadow")

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> GatewayConfig:
        """Take the values of `flags.gateway_flags` and of those that servers share.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        return cls(
            server=ServerConfig.from_flags(values),
            nats=NatsConfig.from_flags(values),
            security=ClientSecurity.from_flags(
                values["tls_ca"], values["tls_client_cert"], values["tls_client_key"], values["token_file"]
            ),
            indexers=() if values["no_indexer"] else indexer_shards("indexer", values["indexer"]),
            schedulers=addresses("scheduler", values["scheduler"]),
            indexer_timeout_seconds=values["indexer_timeout_ms"] / 1000,
            scheduler_timeout_seconds=values["scheduler_timeout_ms"] / 1000,
            queue_wait_seconds=values["queue_wait_seconds"],
            conditional_disagg=values["conditional_disagg"],
            migration_limit=values["migration_limit"],
            timeouts=EngineTimeouts(
                connect_seconds=values["engine_connect_seconds"],
                first_output_seconds=values["engine_first_output_seconds"],
                prefill_tokens_per_second=values["engine_prefill_tokens_per_second"],
                idle_seconds=values["engine_idle_seconds"],
                queue_seconds=values["engine_queue_seconds"],
                answer_seconds=values["engine_answer_seconds"],
            ),
            health_check_seconds=values["engine_health_seconds"],
            max_prompt_tokens=values["max_prompt_tokens"],
            response_headers=values["response_headers"],
            client_write_seconds=values["client_write_seconds"],
            max_in_flight=values["max_in_flight"],
            lease_seconds=values["lease_seconds"],
            endpoint_picker=EndpointPickerConfig.from_flags(values),
            objectives=objectives_of(values[OBJECTIVES_FLAG]),
            engine_key_file=values["engine_key_file"],
            engine_ca=values["engine_ca"],
            http_port=values["http_port"],
            dashboard=not values["no_dashboard"],
            ladder=not values["no_ladder"],
            cors_origins=values["cors_origin"],
            client_paths=ClientPaths(values["client_path"]),
            shadow=ShadowConfig.from_flags(values),
            tokenizers=tokenizer_folders("tokenizer", values["tokenizer"]),
            finds_tokenizers=FIND_TOKENIZERS in values["tokenizer"],
            renderers=renderer_urls("renderer", values["renderer"]),
            tokenizer_cache_bytes=values["tokenizer_cache_mib"] << 20,
            tokenize_timeout_seconds=values["tokenize_timeout_ms"] / 1000,
            session_affinity=values["session_affinity"],
            no_session_sources=values["no_session_source"],
        )


def addresses(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """Checked addresses, host:port or dns://name:port, in order.

    Raises:
        ConfigError: If one is no address, or given twice; names the flag.
    """
    for address in given:
        host, _, port = address.removeprefix(DNS).rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{address!r} is neither host:port nor dns://name:port", field=flag)
    if len(set(given)) < len(given):
        raise ConfigError("names an address twice", field=flag)
    return tuple(given)


def indexer_shards(flag: str, given: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the addresses of each shard's replicas, in order, from `host:port` or `I/N=host:port` each.

    Raises:
        ConfigError: If one is neither, the numbers of shards differ, or a shard has no address; names the flag.
    """
    pairs = [one.rpartition("=") for one in given]
    checked = addresses(flag, [address for _, _, address in pairs])
    if not any(prefix or equals for prefix, equals, _ in pairs):
        return (checked,) if checked else ()
    shards = [Shard.parse(prefix, flag=flag) for prefix, _, _ in pairs]
    counts = {shard.count for shard in shards}
    if len(counts) > 1:
        raise ConfigError(f"names shards of {' and of '.join(map(str, sorted(counts)))}", field=flag)
    replicas: list[tuple[str, ...]] = [() for _ in range(counts.pop())]
    for shard, address in zip(shards, checked, strict=True):
        replicas[shard.index] += (address,)
    missing = ", ".join(f"{index}/{len(replicas)}" for index, of in enumerate(replicas) if not of)
    if missing:
        raise ConfigError(f"names no address of shard {missing}", field=flag)
    return tuple(replicas)


FIND_TOKENIZERS: Final = "auto"
"""In place of a folder: they are looked for."""


def tokenizer_folders(flag: str, given: Sequence[str]) -> dict[str, Path]:
    """Return tokenizer folders by model, from `DIR` or `MODEL=DIR` each; "" = of all other models. `auto` names none.

    Raises:
        ConfigError: If one is no folder, or a model is given twice; names the flag.
    """
    folders: dict[str, Path] = {}
    for one in given:
        if one == FIND_TOKENIZERS:
            continue
        # A folder may have the sign in its name, a model that is named has none.
        model, path = ("", Path(one)) if Path(one).is_dir() else (one.partition("=")[0], Path(one.partition("=")[2]))
        if not path.is_dir() or path == Path():
            raise ConfigError(f"{one!r} is neither DIR nor MODEL=DIR", field=flag)
        if model in folders:
            raise ConfigError(f"names {f'the model {model!r}' if model else 'no model'} twice", field=flag)
        folders[model] = path
    return folders


def renderer_urls(flag: str, given: Sequence[str]) -> dict[str, str]:
    """Base URLs of renderers by model, from `URL` or `MODEL=URL` each; "" = of all other models.

    Raises:
        ConfigError: If one is no URL, or a model is given twice; names the flag.
    """
    urls: dict[str, str] = {}
    for one in given:
        at = one.rfind("=", 0, max(0, one.find("://")))
        model, url = ("", one) if at < 0 else (one[:at], one[at + 1 :])
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"{one!r} is neither URL nor MODEL=URL", field=flag)
        if model in urls:
            raise ConfigError(f"names {f'the model {model!r}' if model else 'no model'} twice", field=flag)
        urls[model] = url.rstrip("/")
    return urls
