"""The connection to NATS: made in the background, made again for ever, and never waited for at start.

A service that uses NATS starts without it and says so (`problem`), so that a restart of NATS and of a service may
come in any order. What must be set up on the server (subscriptions are restored by the client, consumers and buckets
are not) is done in a hook that runs after each connection, the first one included.

`NatsConfig.link` makes one, and is the only one to import this where NATS is not used for certain.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import nats.aio.client
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvscout.v1 import types_pb2
from kvscout_common.errors import Unavailable
from kvscout_common.nats.config import NatsConfig
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import INTENDED

log = logging.getLogger("kvscout.nats")

Hook = Callable[[], Awaitable[None]]
Callback = Callable[[Msg], Awaitable[None]]

CONNECT_SECONDS = 2
FIRST_SECONDS = 5.0
"""Longest wait of calls for the first connection after the start: a service answers before it has one."""
RECONNECT_SECONDS = 0.5
PING_SECONDS = 3
"""A server that does not answer two pings in a row counts as gone: sooner than those who receive nothing from us
end what we have booked."""
PENDING_BYTES = 8 * 1024 * 1024
"""Outbound bytes that the client holds, while it reconnects too; more are refused with `OutboundBufferLimitError`."""
HOOK_RETRY_SECONDS = 1.0
OLDEST_SERVER = (2, 10)
"""Version of the oldest server that has what is used of consumers and key-value buckets."""
_TROUBLE = (nats.errors.Error, TimeoutError, OSError)
"""Errors of a connection."""


def end_if_cancelled() -> None:
    """Raise if this task was cancelled; for every loop that calls nats-py.

    It waits with `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that comes together with the result:
    a loop would go on, and the process that waits for it never end.

    Raises:
        asyncio.CancelledError: It was.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class _Client(nats.aio.client.Client):
    """A client that reports exceptions of callbacks that take its messages; nats-py itself takes that for trouble of
    the connection, and a subscription whose callback ended otherwise is silent from then on.

    Args:
        on_defect: Called with what a callback raised that is no failure of the connection.
    """

    def __init__(self, on_defect: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_defect = on_defect

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callback | None = None, *args: Any, **options: Any
    ) -> Subscription:
        """Subscribe, as in nats-py."""
        return await super().subscribe(subject, queue, cb and self._guarded(cb), *args, **options)

    def _guarded(self, callback: Callback) -> Callback:
        async def guarded(message: Msg) -> None:
            try:
                await callback(message)
            except (*_TROUBLE, *INTENDED):
                raise
            except BaseException as error:
                self._on_defect(error)

        return guarded


def is_too_old(version: str) -> bool:
    """Return whether a server of this version lacks what is used; one that cannot be read does not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST_SERVER


class NatsLink:
    """One connection to NATS for a whole process.

    Args:
        config: Where to.
        name: Shown in NATS' own monitoring.
    """

    def __init__(self, config: NatsConfig, name: str) -> None:

        self.config = config
        self.names = config.names
        self.client: nats.aio.client.Client = _Client(self._on_defect)
        self.problem = "not connected to NATS yet"
        """Why it is not usable now; "" = it is."""
        self._name = name
        self._hooks: list[Hook] = []
        self._slow_hooks: list[Callable[[str], None]] = []
        self._connections = asyncio.Event()
        self._first = asyncio.Event()
        """There was a connection."""
        self._started_at: float | None = None
        self._warnings = RateLimitedLog(log)
        self._defect: BaseException | None = None
        """Unexpected exception of a callback."""
        self._closed = False
        self._connecting = False
        """The client has begun to connect; it cannot be closed before."""

    @property
    def connected(self) -> bool:
        """Return whether the server is there now."""
        return self.client.is_connected

    def status(self) -> types_pb2.NatsStatus:
        """Return the status of the connection for GetStatus."""
        # What the server said of itself when it was connected to; nats-py has no other way to find out.
        server: Mapping[str, Any] = self.client._server_info
        return types_pb2.NatsStatus(
            servers=[_without_user(url) for url in self.config.servers],
            namespace=self.config.namespace,
            connected=self.connected,
            problem=self.problem,
            jetstream=server.get("jetstream") is True,
            cluster=str(server.get("cluster") or server.get("server_id") or ""),
        )

    async def require(self) -> nats.aio.client.Client:
        """Return the client, connected. Waits while the first connection is being made, in the first seconds of a
        process.

        Raises:
            Unavailable: It is not.
        """
        if not self._first.is_set():
            try:
                async with asyncio.timeout_at(self._first_until()):
                    await self._first.wait()
            except TimeoutError:
                pass
        if not self.client.is_connected:
            raise Unavailable(self.problem or "not connected to NATS")
        return self.client

    def on_connected(self, hook: Hook) -> None:
        """Run a hook after each connection, in the order in which hooks were added.

        A hook that fails is logged and run again after a second, and those after it wait: hooks must be repeatable.
        """
        self._hooks.append(hook)

    def on_slow(self, hook: Callable[[str], None]) -> None:
        """Call a hook with the subject of each message that the client dropped: a subscription's limit was reached."""
        self._slow_hooks.append(hook)

    async def run(self) -> None:
        """Connect, and stay connected until cancelled; a task of the process.

        Raises:
            Unavailable: The client gave the connection up, as it does where the server refuses what it sent; what was
                subscribed to is lost with it.
            Exception: A callback that takes messages failed otherwise than with the connection: it has a defect.
        """
        tls = ssl.create_default_context(cafile=str(self.config.ca)) if self.config.ca else None
        self._connecting = True
        self._first_until()
        await self.client.connect(
            servers=list(self.config.servers),
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            connect_timeout=CONNECT_SECONDS,
            reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # documented in seconds, used in sleep()
            max_reconnect_attempts=-1,
            ping_interval=PING_SECONDS,
            pending_size=PENDING_BYTES,
            user_credentials=str(self.config.credentials) if self.config.credentials else None,
            tls=tls,
        )
        await self._on_connected()
        while True:
            await self._connections.wait()
            self._connections.clear()
            if self._defect is not None:
                raise self._defect
            if self.client.is_closed:
                raise Unavailable(f"NATS closed the connection permanently: {self.client.last_error!r}")
            await self._run_hooks()
            end_if_cancelled()

    async def close(self) -> None:
        """Send what is waiting and close the connection."""
        self._closed = True
        if self.client.is_connected:
            try:
                await self.client.flush(timeout=1)
            except (nats.errors.Error, OSError) as error:
                log.warning("messages waiting for NATS are lost: %r", error)
        if self._connecting:
            try:
                await self.client.close()
            except (OSError, RuntimeError) as error:
                # The client meets a connection that broke a moment ago, of which asyncio raises the one and uvloop the
                # other; it is closed all the same.
                log.info("the connection to NATS failed while it was being closed: %r", error)

    def _first_until(self) -> float:
        if self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        return self._started_at + FIRST_SECONDS

    async def _run_hooks(self) -> None:
        version = str(self.client._server_info.get("version", ""))
        if is_too_old(version):
            self.problem = f"NATS server {version} is too old: {'.'.join(map(str, OLDEST_SERVER))} or later is needed"
            log.error("%s", self.problem)
            return
        for hook in self._hooks:
            while not self._connections.is_set():
                try:
                    await hook()
                    break
                except _TROUBLE as error:
                    self.problem = f"setting up NATS failed: {error!r}"
                    self._warnings.warning(hook, "%s; trying again", self.problem)
                    end_if_cancelled()
                    await asyncio.sleep(HOOK_RETRY_SECONDS)
            else:
                return
        if self.client.is_connected:
            self.problem = ""

    async def _on_connected(self) -> None:
        url = self.client.connected_url
        log.info("connected to NATS at %s", url and url.netloc.rpartition("@")[2])
        self._first.set()
        self._connections.set()

    def _on_defect(self, error: BaseException) -> None:
        self._defect = error
        self._connections.set()

    async def _on_disconnected(self) -> None:
        if not self._closed:
            self.problem = "connection to NATS lost"
            log.warning("connection to NATS lost")

    async def _on_closed(self) -> None:
        self._connections.set()

    async def _on_error(self, error: Exception) -> None:

        if isinstance(error, nats.errors.SlowConsumerError):
            for hook in self._slow_hooks:
                hook(error.subject)
            return
        if not self.client.is_connected:
            self.problem = f"not connected to NATS: {error}"
        self._warnings.warning(type(error).__name__, "NATS: %r", error)
