"""Workers by the address that proxies know them by: ip:port of their HTTP endpoint."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from kvscout_common.endpoints import bracketed
from kvscout_common.worker import WorkerSpec

PORTS = {"http": 80, "https": 443}


@lru_cache(maxsize=4096)
def address_of(http_endpoint: str) -> str:
    """Return the ip:port of a base URL; "" where it has a name, no address, which no proxy would find among its
    hosts."""
    try:
        url = urlsplit(http_endpoint)
        host = ipaddress.ip_address(url.hostname or "")
        port = url.port or PORTS[url.scheme]
    except (ValueError, KeyError):
        return ""
    return f"{bracketed(str(host))}:{port}"


def reachable(specs: Iterable[WorkerSpec], subset: Collection[str] | None) -> list[WorkerSpec]:
    """Return the workers that have an address.

    Args:
        specs: Workers.
        subset: What the proxy allows: ip:port, or an IP address for all of its ports; None = all.
    """
    if subset is None:
        return [spec for spec in specs if address_of(spec.http_endpoint)]
    allowed = {_host_of(entry) or entry for entry in subset}
    return [
        spec
        for spec in specs
        if (address := address_of(spec.http_endpoint)) and (address in allowed or address.rpartition(":")[0] in allowed)
    ]


def _host_of(entry: str) -> str:
    """Return an IP address as it stands in `address_of`; "" if it is something else."""
    try:
        return bracketed(str(ipaddress.ip_address(entry.strip("[]"))))
    except ValueError:
        return ""
