"""The endpoint picker, put together: its port, its rpc, and who picks."""

from __future__ import annotations

import datetime
import logging
import random
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from kvscout_common.rpc.serving import SidePort
from kvscout_common.settings.flags import SHUTDOWN_DELAY_SECONDS
from kvscout_common.transport import Transport, chosen
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.access_log import SERVICE, AccessLog
from kvscout_gateway.fronts.endpoint_picker.certificate import self_signed
from kvscout_gateway.fronts.endpoint_picker.config import HELD_BODIES, EndpointPickerConfig
from kvscout_gateway.fronts.endpoint_picker.conformance import SELECTION
from kvscout_gateway.fronts.endpoint_picker.exchange_picker import ExchangePicker, PickerMetrics
from kvscout_gateway.fronts.endpoint_picker.process import ExternalProcessor, Limits

log = logging.getLogger("kvscout.gateway")

LIVENESS, READINESS = "liveness", "readiness"
"""Names of health checks in the protocol, beside the service's name."""


def endpoint_picker(
    config: EndpointPickerConfig,
    context: FrontContext,
    metrics: CollectorRegistry,
    on_drain: list[Callable[[], object]],
) -> SidePort:
    """Return the port that proxies call.

    Args:
        config: The front's flags.
        context: Collaborators of the fronts.
        metrics: Registry of its metrics.
        on_drain: Called when the gateway drains.
    """
    if config.conformance:
        log.warning(
            "--endpoint-picker-conformance: any client can choose its endpoint (%s); for test runs only",
            SELECTION,
        )
    counts = PickerMetrics(metrics)
    picker = ExchangePicker(context, config, counts, draw=random.Random())
    on_drain.append(picker.forget)
    processor = ExternalProcessor(
        picker,
        config.follow(),
        Limits(
            config.pick_seconds,
            config.body_bytes,
            HELD_BODIES * config.body_bytes,
            context.client_paths,
            ends_with_answers=chosen() is Transport.NATIVE,
            conformance=config.conformance,
        ),
        lambda outcome: counts.picks.labels(outcome).inc(),
    )
    return SidePort(
        name="endpoint_picker",
        port=config.port,
        services=[(wire.SERVICE, processor.add_to), (SERVICE, AccessLog(picker).add_to)],
        make_pem=None if config.plaintext else lambda: self_signed(datetime.datetime.now(datetime.UTC)),
        needs_token=not config.tenant,
        alive_names=(LIVENESS,),
        ready_names=(READINESS,),
        shutdown_delay_seconds=SHUTDOWN_DELAY_SECONDS,
    )
