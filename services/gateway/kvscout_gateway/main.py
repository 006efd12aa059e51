"""`kvscout-gateway`: flags and environment → one frozen config → serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvscout_common.errors import ConfigError
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.nats.config import NatsConfig, nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import (
    BEHAVIOUR,
    PERFORMANCE,
    SERVER,
    SectionedCommand,
    client_flags,
    flag,
    server_flags,
)
from kvscout_gateway.config import FIND_TOKENIZERS, GatewayConfig, addresses, indexer_shards, tokenizer_folders
from kvscout_gateway.engines.timeouts import EngineTimeouts
from kvscout_gateway.fronts.client_paths import ClientPaths
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig, endpoint_picker_flags
from kvscout_gateway.fronts.shadow.config import ShadowConfig, shadow_flags


@click.command(cls=SectionedCommand)
@flag(
    "--indexer",
    multiple=True,
    default=("127.0.0.1:7051",),
    help="Indexer host:port, or dns://name:port for all addresses of a name, such as a headless service; "
    "prefix I/N= for shard I of N; repeat in order of preference.",
)
@flag("--no-indexer", is_flag=True, help="Run without an indexer: route by load alone.")
@flag(
    "--scheduler",
    multiple=True,
    default=("127.0.0.1:7052",),
    help="Scheduler host:port, or dns://name:port for all addresses of a name; repeat in order of preference.",
)
@flag(
    "--migration-limit",
    default=1,
    type=click.IntRange(0, 10),
    help="Retries on other workers after one failed before its first token.",
)
@flag(
    "--conditional-disagg",
    is_flag=True,
    section=BEHAVIOUR,
    help="Let decode workers with can_fallback compute prompts that are mostly cached there.",
)
@flag(
    "--indexer-timeout-ms",
    default=20.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Timeout of calls to an indexer; a slower one is skipped.",
)
@flag(
    "--scheduler-timeout-ms",
    default=1000.0,
    type=click.FloatRange(min=1),
    section=PERFORMANCE,
    help="Timeout of calls to a scheduler; a slower one counts as down.",
)
@flag(
    "--queue-wait-seconds",
    default=60.0,
    type=click.FloatRange(min=1),
    section=BEHAVIOUR,
    help="Longest time for which a request waits in a scheduler's queue.",
)
@flag(
    "--engine-connect-seconds",
    default=2.0,
    type=click.FloatRange(min=0.01),
    section=PERFORMANCE,
    help="Timeout for connecting to an engine.",
)
@flag(
    "--engine-first-output-seconds",
    default=30.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Longest silence of an engine before the first token, in addition to the time for the prompt.",
)
@flag(
    "--engine-prefill-tokens-per-second",
    default=1000.0,
    type=click.FloatRange(min=1),
    section=PERFORMANCE,
    help="Prefill speed of the slowest engine, which extends the timeout for long prompts.",
)
@flag(
    "--engine-idle-seconds",
    default=30.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Longest silence of an engine between two tokens.",
)
@flag(
    "--engine-queue-seconds",
    default=300.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Longest silence for one request while its worker rank outputs tokens for others.",
)
@flag(
    "--engine-answer-seconds",
    default=1800.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Longest time for a non-streamed response, from an engine that passes its health checks.",
)
@flag(
    "--engine-health-seconds",
    default=10.0,
    type=click.FloatRange(min=0),
    section=PERFORMANCE,
    help="Interval of health checks of an engine without output; 0 = none.",
)
@flag(
    "--client-write-seconds",
    default=60.0,
    type=click.FloatRange(min=0.1),
    section=PERFORMANCE,
    help="Longest time for which a client may not read its output.",
)
@flag(
    "--max-in-flight",
    default=10_000,
    type=click.IntRange(min=1),
    section=PERFORMANCE,
    help="Concurrent requests; more are refused.",
)
@flag(
    "--max-prompt-tokens",
    default=1 << 20,
    type=click.IntRange(min=1),
    section=PERFORMANCE,
    help="Maximum prompt length; longer prompts, and those too large for the cache of every worker of the "
    "model, are refused.",
)
@flag(
    "--lease-seconds",
    default=30,
    type=click.IntRange(3, 3600),
    section=BEHAVIOUR,
    help="Lease of bookings made without a stream, renewed after a third of it; those of a killed gateway end with it.",
)
@endpoint_picker_flags()
@shadow_flags()
@flag(
    "--http-port",
    default=8000,
    type=click.IntRange(-1, 65535),
    section=SERVER,
    help="Port of the OpenAI API; 0 = any free one, -1 = none.",
)
@flag(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    section=SERVER,
    help="Origin whose pages may use the HTTP port from a browser, such as https://chat.example.com; * = "
    "any. Repeatable.",
)
@flag(
    "--client-path",
    multiple=True,
    metavar="PATH",
    section=SERVER,
    help="Additional engine path open to clients, such as /v1/videos/*; * = one path segment. Repeatable.",
)
@flag("--no-dashboard", is_flag=True, section=SERVER, help="Disable the dashboard at / of the HTTP port.")
@flag(
    "--tokenizer",
    multiple=True,
    help="[MODEL=]DIR with tokenizer.json and tokenizer_config.json, to tokenize text for routing; repeat "
    "for further models. auto = look for other models' tokenizers on this machine.",
)
@flag(
    "--tokenizer-cache-mib",
    default=64,
    type=click.IntRange(1, 65536),
    section=PERFORMANCE,
    help="Cache of tokenized text per tenant and model, so that a conversation is tokenized once.",
)
@flag(
    "--tokenize-timeout-ms",
    default=50.0,
    type=click.FloatRange(min=0),
    section=PERFORMANCE,
    help="Timeout of an engine's /tokenize, for models without --tokenizer; 0 = never query engines.",
)
@flag(
    "--session-affinity",
    default="",
    help="user or header:NAME: keep requests with the same value on one worker, as long as it is healthy.",
)
@flag(
    "--engine-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    section=SERVER,
    help="File with the API key sent to engines.",
)
@flag(
    "--engine-ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    section=SERVER,
    help="CA of engines that use https, PEM; by default the machine's trusted CAs.",
)
@client_flags()
@nats_flags()
@server_flags("gateway", port=7050, metrics_port=9093)
def main(**values: Any) -> None:
    """Route LLM requests to the workers that have their prompts cached, and run them."""
    try:
        config = GatewayConfig(
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
            client_write_seconds=values["client_write_seconds"],
            max_in_flight=values["max_in_flight"],
            lease_seconds=values["lease_seconds"],
            endpoint_picker=EndpointPickerConfig.from_flags(values),
            engine_key_file=values["engine_key_file"],
            engine_ca=values["engine_ca"],
            http_port=values["http_port"],
            dashboard=not values["no_dashboard"],
            cors_origins=values["cors_origin"],
            client_paths=ClientPaths(values["client_path"]),
            shadow=ShadowConfig.from_flags(values),
            tokenizers=tokenizer_folders("tokenizer", values["tokenizer"]),
            finds_tokenizers=FIND_TOKENIZERS in values["tokenizer"],
            tokenizer_cache_bytes=values["tokenizer_cache_mib"] << 20,
            tokenize_timeout_seconds=values["tokenize_timeout_ms"] / 1000,
            session_affinity=values["session_affinity"],
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run(config.server, lambda: build(config))


async def build(config: GatewayConfig) -> App:
    """The gateway as an app to serve."""
    from prometheus_client import CollectorRegistry

    from kvscout_gateway.fronts.grpc.servicer import SERVICE, GatewayServicer
    from kvscout_gateway.gateway import Gateway
    from kvscout_gateway.http.port import GatewayHttp

    metrics = CollectorRegistry()
    gateway = Gateway(config, metrics)
    side_ports = []
    if config.endpoint_picker is not None:
        from kvscout_gateway.fronts.endpoint_picker.front import endpoint_picker

        side_ports.append(endpoint_picker(config.endpoint_picker, gateway, metrics))
    http = GatewayHttp(gateway, metrics)
    return App(
        name="gateway",
        services=[(SERVICE, GatewayServicer(gateway).add_to)],
        tasks={**gateway.tasks(), **http.tasks()},
        warm=gateway.warm,
        leave=gateway.leave,
        drain=gateway.drain,
        close=gateway.close,
        metrics=metrics,
        limits=gateway.registry.limits,
        budget=gateway.budget,
        side_ports=side_ports,
        http=http.port() if config.http_port >= 0 else None,
    )


if __name__ == "__main__":
    main()
