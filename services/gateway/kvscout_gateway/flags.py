"""Flags of the gateway, besides those of every server; `GatewayConfig.from_flags` reads them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvscout_common.settings.flags import BEHAVIOUR, PERFORMANCE, SERVER, flag, flag_group
from kvscout_gateway.fronts.endpoint_picker.config import endpoint_picker_flags
from kvscout_gateway.fronts.sessions import SOURCE_NAMES
from kvscout_gateway.fronts.shadow.config import shadow_flags

F = TypeVar("F", bound=Callable[..., Any])

lease_flag = flag(
    "--lease-seconds",
    default=30,
    type=click.IntRange(3, 3600),
    section=BEHAVIOUR,
    help="Lease of bookings made without a stream, renewed after a third of it; those of a killed gateway end with it.",
)


def address_flags() -> Callable[[F], F]:
    """Return the flags of the addresses of indexers and schedulers."""
    return flag_group(
        flag(
            "--indexer",
            multiple=True,
            default=("127.0.0.1:7051",),
            help="Indexer host:port, or dns://name:port for all addresses of a name, such as a headless service; "
            "prefix I/N= for shard I of N; repeat in order of preference.",
        ),
        flag("--no-indexer", is_flag=True, help="Run without an indexer: route by load alone."),
        flag(
            "--scheduler",
            multiple=True,
            default=("127.0.0.1:7052",),
            help="Scheduler host:port, or dns://name:port for all addresses of a name; repeat in order of preference.",
        ),
    )


def gateway_flags() -> Callable[[F], F]:
    """Return the flags."""
    return flag_group(
        flag(
            "--migration-limit",
            default=1,
            type=click.IntRange(0, 10),
            help="Retries on other workers after one failed before its first token; "
            "workers without a connection do not count.",
        ),
        flag(
            "--conditional-disagg",
            is_flag=True,
            section=BEHAVIOUR,
            help="Let decode workers with can_fallback compute prompts that are mostly cached there.",
        ),
        flag(
            "--indexer-timeout-ms",
            default=20.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Timeout of calls to an indexer; a slower one is skipped.",
        ),
        flag(
            "--scheduler-timeout-ms",
            default=1000.0,
            type=click.FloatRange(min=1),
            section=PERFORMANCE,
            help="Timeout of calls to a scheduler; a slower one counts as down.",
        ),
        flag(
            "--queue-wait-seconds",
            default=60.0,
            type=click.FloatRange(min=1),
            section=BEHAVIOUR,
            help="Longest time for which a request waits in a scheduler's queue.",
        ),
        flag(
            "--engine-connect-seconds",
            default=2.0,
            type=click.FloatRange(min=0.01),
            section=PERFORMANCE,
            help="Timeout for connecting to an engine.",
        ),
        flag(
            "--engine-first-output-seconds",
            default=30.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Longest silence of an engine before the first token, in addition to the time for the prompt.",
        ),
        flag(
            "--engine-prefill-tokens-per-second",
            default=1000.0,
            type=click.FloatRange(min=1),
            section=PERFORMANCE,
            help="Prefill speed of the slowest engine, which extends the timeout for long prompts.",
        ),
        flag(
            "--engine-idle-seconds",
            default=30.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Longest silence of an engine between two tokens.",
        ),
        flag(
            "--engine-queue-seconds",
            default=300.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Longest silence for one request while its worker rank outputs tokens for others.",
        ),
        flag(
            "--engine-answer-seconds",
            default=1800.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Longest time for a non-streamed response, from an engine that passes its health checks.",
        ),
        flag(
            "--engine-health-seconds",
            default=5.0,
            type=click.FloatRange(min=0),
            section=PERFORMANCE,
            help="Interval of health checks of an engine without output; 0 = no checks, not even of suspected engines.",
        ),
        flag(
            "--client-write-seconds",
            default=60.0,
            type=click.FloatRange(min=0.1),
            section=PERFORMANCE,
            help="Longest time for which a client may not read its output.",
        ),
        flag(
            "--max-in-flight",
            default=10_000,
            type=click.IntRange(min=1),
            section=PERFORMANCE,
            help="Concurrent requests; more are refused.",
        ),
        flag(
            "--max-prompt-tokens",
            default=1 << 20,
            type=click.IntRange(min=1),
            section=PERFORMANCE,
            help="Maximum prompt length; longer prompts, and those too large for the cache of every worker of the "
            "model, are refused.",
        ),
        flag(
            "--response-headers",
            default="admins",
            type=click.Choice(("all", "admins", "none")),
            section=BEHAVIOUR,
            help="Callers to whom x-kvscout-worker, -cached-tokens and -decision-ms in answers over HTTP say where "
            "their request went; without tokens every caller is an admin. all = also through a proxy's endpoint "
            "picker.",
        ),
        endpoint_picker_flags(),
        shadow_flags(),
        flag(
            "--http-port",
            default=8000,
            type=click.IntRange(-1, 65535),
            section=SERVER,
            help="Port of the OpenAI API; 0 = any free one, -1 = none.",
        ),
        flag(
            "--cors-origin",
            multiple=True,
            metavar="ORIGIN",
            section=SERVER,
            help="Origin whose pages may use the HTTP port from a browser, such as https://chat.example.com; * = "
            "any. Repeatable.",
        ),
        flag(
            "--client-path",
            multiple=True,
            metavar="PATH",
            section=SERVER,
            help="Additional engine path open to clients, such as /v1/videos/*; * = one path segment. Repeatable.",
        ),
        flag("--no-dashboard", is_flag=True, section=SERVER, help="Disable the dashboard at / of the HTTP port."),
        flag("--no-ladder", is_flag=True, section=PERFORMANCE, help="Do not explain the hit rate (kvscout why)."),
        flag(
            "--tokenizer",
            multiple=True,
            help="[MODEL=]DIR with tokenizer.json and tokenizer_config.json, to tokenize text for routing; repeat "
            "for further models. auto = look for other models' tokenizers on this machine.",
        ),
        flag(
            "--renderer",
            multiple=True,
            help="[MODEL=]URL of `vllm launch render`, for prompts that no --tokenizer can tokenize, such as those "
            "with images; repeat for further models.",
        ),
        flag(
            "--tokenizer-cache-mib",
            default=64,
            type=click.IntRange(1, 65536),
            section=PERFORMANCE,
            help="Cache of tokenized text per tenant and model, so that a conversation is tokenized once.",
        ),
        flag(
            "--tokenize-timeout-ms",
            default=50.0,
            type=click.FloatRange(min=0),
            section=PERFORMANCE,
            help="Total time that a request waits for a renderer and for engines that tokenize; 0 = none is queried.",
        ),
        flag(
            "--inference-objective",
            aliases=("--endpoint-picker-objective",),
            multiple=True,
            metavar="NAME=PRIORITY[,ttft=MS][,itl=MS]",
            section=BEHAVIOUR,
            help="NAME=PRIORITY[,ttft=MS][,itl=MS]: queue priority, higher first, and targets of requests with this "
            "x-llm-d-inference-objective or x-gateway-inference-objective; others have priority 0. Repeatable.",
        ),
        flag(
            "--session-affinity",
            default="",
            help="Keep requests with the same value on one worker, as long as it is healthy: header:NAME, or a session "
            "source such as user.",
        ),
        flag(
            "--no-session-source",
            multiple=True,
            metavar="NAME",
            help=f"Do not read a request's session from this source: {', '.join(SOURCE_NAMES)}. Repeatable.",
        ),
        flag(
            "--engine-key-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            section=SERVER,
            help="File with the API key sent to engines.",
        ),
        flag(
            "--engine-ca",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            section=SERVER,
            help="CA of engines that use https, PEM; by default the machine's trusted CAs.",
        ),
    )
