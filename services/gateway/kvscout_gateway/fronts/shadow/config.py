"""Configuration of shadow mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from kvscout_common.endpoints import url_problem
from kvscout_common.errors import ConfigError
from kvscout_common.settings.flags import BEHAVIOUR, flag

F = TypeVar("F", bound=Callable[..., Any])
SERVED_BY: Final = "x-served-by"


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """Load balancer whose decisions are shadowed."""

    balancer: str
    """http://host:port, or https."""
    served_by: str = SERVED_BY
    """The header of its answers, in lower case, in which it names the worker that served."""

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> ShadowConfig | None:
        """Take the values of `shadow_flags`; None = off.

        Raises:
            ConfigError: The URL is none of a balancer, or the header has no name.
        """
        url, header = values["shadow"].rstrip("/"), values["shadow_served_by"].lower()
        if not url:
            return None
        if problem := url_problem(url):
            raise ConfigError(problem, field="shadow")
        parts = urlsplit(url)
        if parts.path or parts.query or parts.fragment:
            raise ConfigError("must contain scheme, host and port only: clients set the path", field="shadow")
        if not header or not all(one.isalnum() or one in "-_" for one in header) or not header.isascii():
            raise ConfigError("must be the name of a header", field="shadow_served_by")
        return cls(url, header)


def shadow_flags() -> Callable[[F], F]:
    """Return the flags of shadow mode; `ShadowConfig.from_flags` reads them back."""

    def decorate(command: F) -> F:
        served_by = flag(
            "--shadow-served-by",
            default=SERVED_BY,
            section=BEHAVIOUR,
            help="Response header in which the load balancer names the worker: its id, or host:port.",
        )
        balancer = flag(
            "--shadow",
            default="",
            metavar="URL",
            section=BEHAVIOUR,
            help="Forward requests to this load balancer, which decides, and report what the policy would have done.",
        )
        return balancer(served_by(command))

    return decorate
