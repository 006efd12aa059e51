"""Configuration of the endpoint picker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import click

from kvscout_common.settings.flags import BEHAVIOUR, PERFORMANCE, SERVER, ValueOf, flag, flag_group
from kvscout_gateway.fronts.endpoint_picker.stream import Follow

F = TypeVar("F", bound=Callable[..., Any])

PORT = 9002
"""By the protocol."""
HELD_BODIES = 16
"""Bodies of the longest kind that may wait for their picks at once."""


class ResponseWatch(StrEnum):
    """Handling of responses after the pick."""

    OBSERVE = "observe"
    """Followed as the proxy passes them on; where it passes no bodies on, it is asked to for a share of them."""
    SAMPLE = "sample"
    """A share of the requests is followed, all others are left."""
    LEAVE = "leave"
    """All are left: leases end their bookings."""


@dataclass(frozen=True, slots=True)
class EndpointPickerConfig:
    """Configuration of the endpoint picker."""

    port: int
    """0 = any free one."""
    plaintext: bool = False
    tenant: str = ""
    """Tenant of all requests, whose proxy then needs no token; "" = tenant of the proxy's token."""
    watch: ResponseWatch = ResponseWatch.OBSERVE
    sample_every: int = 32
    """0 = none is sampled."""
    pick_seconds: float = 2.0
    lease_seconds: float = 60.0
    """A booking whose end nobody reports lasts this long."""
    fallbacks: int = 2
    """Further endpoints, in case that the first cannot be reached."""
    body_bytes: int = 64 * 1024 * 1024
    conformance: bool = False
    """For test runs only: see `conformance`."""

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> EndpointPickerConfig | None:
        """Take the values of `endpoint_picker_flags`; None = it is off."""
        if values["endpoint_picker_port"] is None:
            return None
        return cls(
            port=values["endpoint_picker_port"],
            plaintext=values["endpoint_picker_plaintext"],
            tenant=values["endpoint_picker_tenant"],
            watch=ResponseWatch(values["endpoint_picker_watch"]),
            sample_every=values["endpoint_picker_sample_every"],
            pick_seconds=values["endpoint_picker_timeout_ms"] / 1000,
            lease_seconds=values["endpoint_picker_lease_seconds"],
            fallbacks=values["endpoint_picker_fallbacks"],
            conformance=values["endpoint_picker_conformance"],
        )

    def follow(self) -> Callable[[], Follow]:
        """Return a function that decides for one request after another how to follow it."""
        others = Follow.PROXY if self.watch is ResponseWatch.OBSERVE or self.conformance else Follow.LEAVE
        numbers = itertools.count()

        def next_one() -> Follow:
            sampled = (
                self.sample_every and self.watch is not ResponseWatch.LEAVE and next(numbers) % self.sample_every == 0
            )
            return Follow.MESSAGES if sampled else others

        return next_one


_DEFAULT = EndpointPickerConfig(PORT)


def endpoint_picker_flags() -> Callable[[F], F]:
    """Return the flags of the endpoint picker; `EndpointPickerConfig.from_flags` reads them back."""
    declared = [
        flag(
            "--endpoint-picker-port",
            type=click.IntRange(0, 65535),
            section=SERVER,
            help=f"Port for Envoy's external processing, by convention {PORT}; 0 = any free port, unset = off.",
        ),
        flag(
            "--endpoint-picker-plaintext",
            is_flag=True,
            section=SERVER,
            help="Disable TLS on that port; the default is --tls-cert, or a certificate generated at start.",
        ),
        flag(
            "--endpoint-picker-tenant",
            default=_DEFAULT.tenant,
            section=SERVER,
            help="Tenant of all requests on the endpoint picker's port; their proxy then needs no token.",
        ),
        flag(
            "--endpoint-picker-watch",
            default=_DEFAULT.watch.value,
            type=ValueOf(ResponseWatch),
            section=BEHAVIOUR,
            help="Responses to follow: observe = all that the proxy forwards; sample = one in "
            "--endpoint-picker-sample-every; leave = none, bookings end with their leases.",
        ),
        flag(
            "--endpoint-picker-sample-every",
            default=_DEFAULT.sample_every,
            type=click.IntRange(min=0),
            section=BEHAVIOUR,
            help="Interval, in requests, at which a response is followed up to its usage, to verify predictions; 0 "
            "= never.",
        ),
        flag(
            "--endpoint-picker-timeout-ms",
            default=_DEFAULT.pick_seconds * 1000,
            type=click.FloatRange(min=1),
            section=PERFORMANCE,
            help="Longest time for a pick. Then a worker is chosen round-robin; a queued request gets 429.",
        ),
        flag(
            "--endpoint-picker-lease-seconds",
            default=_DEFAULT.lease_seconds,
            type=click.FloatRange(min=1),
            section=BEHAVIOUR,
            help="Lease of bookings whose end the proxy does not report.",
        ),
        flag(
            "--endpoint-picker-fallbacks",
            default=_DEFAULT.fallbacks,
            type=click.IntRange(0, 16),
            section=BEHAVIOUR,
            help="Additional endpoints in a pick, for proxies that retry.",
        ),
        flag(
            "--endpoint-picker-conformance",
            is_flag=True,
            section=BEHAVIOUR,
            help="For conformance tests only: clients select the endpoint by a header.",
        ),
    ]
    return flag_group(*declared)
