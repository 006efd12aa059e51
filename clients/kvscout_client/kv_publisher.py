"""KV events of an engine of one's own, sent to kvscout: blocks stored in its cache, and blocks removed.

::

    async with KvEventPublisher(worker_id="w", model="m", block_size=16, indexers=["localhost:7051"],
                                transport="grpc") as events:
        events.publish_stored(token_ids, [16, 16], block_hashes, parent_hash=None)
        events.publish_removed(block_hashes[1:])

    with KvEventPublisher(...).in_thread() as events:      # for engines without an event loop
        events.publish_stored(...)

Publishing waits for nothing: events are numbered, applied to an index of our own, and sent in the background. Token ids
are hashed here and never leave the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvscout_blocks.bytes.events import Cleared, Event
from kvscout_blocks.publish.history import RING_BATCHES, RING_BYTES
from kvscout_blocks.publish.publication import MAX_BUFFERED_BYTES, MESSAGE_OVERHEAD_BYTES
from kvscout_client.kv_publisher_push import PushOutlet
from kvscout_client.kv_publisher_rank import Outlet, PublishedRank, removed_events, stored_events
from kvscout_common.errors import Cancelled, KvscoutError
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.nats.config import DEFAULT_NAMESPACE, DEFAULT_SERVER, NatsConfig
from kvscout_common.registry.leases import DEFAULT_LEASE_SECONDS
from kvscout_common.worker import DEFAULT_TENANT, CopyMode, EngineKind, Transport, WorkerRank, WorkerSpec

if TYPE_CHECKING:
    from kvscout_client.kv_publisher_thread import ThreadedKvEventPublisher

log = logging.getLogger("kvscout.publisher")

CLOSE_SECONDS: Final = 5.0
"""Longest wait of `close` for what is on its way."""
_TRANSPORTS: Final = (Transport.NATS_CORE, Transport.JETSTREAM, Transport.GRPC)


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """Status of a publisher."""

    connected: bool
    """True if NATS, or every indexer, is there now."""
    buffered: int
    """Batches that have not arrived everywhere."""
    buffered_bytes: int
    dropped: int
    """Batches that were not sent as they are, because too many waited or one was too large: readers got the state
    instead, or without a local index see a gap."""
    states: int
    """States sent."""
    last_event_id: int | None
    """None = nothing was published in this incarnation."""
    epoch: int
    history_incomplete: bool
    """The engine's own event ids had a gap: blocks from before it are not vouched for, until the cache is cleared."""
    problem: str
    """Problem for an operator; "" = none."""


class _Outlet(Outlet, Protocol):
    """An `Outlet` with what runs beside it."""

    @property
    def connected(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    @property
    def buffered(self) -> tuple[int, int]: ...

    @property
    def dropped(self) -> int: ...

    @property
    def states(self) -> int: ...

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]: ...

    async def drained(self) -> None: ...

    async def close(self, *, deregister: bool) -> None: ...


class CacheEvents:
    """Events of one rank's cache, published where `publish` says."""

    spec: WorkerSpec

    def publish(self, events: Sequence[Event], event_id: int | None = None) -> int | None:
        """Publish ready-made events; the other methods call it."""
        raise NotImplementedError

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        medium: str | None = None,
        cache_salt: str | None = None,
        mm_items: Sequence[Sequence[str]] = (),
        event_id: int | None = None,
    ) -> int | None:
        """Publish that blocks were stored; a short one and the ones after it are left out.

        Args:
            token_ids: Tokens of all blocks, u32. Empty, and `num_block_tokens` too: the blocks are known already and
                are now on this medium as well.
            num_block_tokens: Tokens in each block.
            block_hashes: The engine's own hash of each block: any 64 bits that name it until it is removed.
            parent_hash: Hash of the block before the first one; None = the first one begins a prompt.
            lora_name: Adapter that computed them; None = the base model.
            medium: Medium that holds them, such as "CPU"; None = the device.
            cache_salt: Salt of the prompt.
            mm_items: Ids of the multimodal items in each block; empty = no block has any.
            event_id: The engine's number of this event, one above the one before, from 0; a larger one means that
                events are missing. None = the next one.

        Returns:
            Number of the last event; None if there was none.

        Raises:
            ValueError: The arguments contradict each other, or the number was published already.
        """
        return self.publish(
            stored_events(
                token_ids,
                num_block_tokens,
                block_hashes,
                parent_hash,
                block_size=self.spec.block_size,
                lora_name=lora_name,
                medium=medium,
                cache_salt=cache_salt,
                mm_items=mm_items,
            ),
            event_id,
        )

    def publish_removed(
        self, block_hashes: Sequence[int], *, medium: str | None = None, event_id: int | None = None
    ) -> int | None:
        """Publish that one physical copy of each block is gone from a medium; arguments as of `publish_stored`."""
        return self.publish(removed_events(block_hashes, medium=medium), event_id)

    def publish_cleared(self, *, event_id: int | None = None) -> int | None:
        """Publish that the whole cache was dropped."""
        return self.publish([Cleared()], event_id)


class KvEventPublisher(CacheEvents):
    """Publishes the events of one rank. Everything runs on the event loop that opens it; see `in_thread` for others.

    Args:
        worker_id: The worker.
        model: Model that it serves.
        block_size: Tokens a block.
        tenant: Tenant.
        dp_rank: Data-parallel rank whose events these are; each rank has a publisher of its own.
        dp_size: Data-parallel ranks of the worker; all its publishers say the same.
        transport: "grpc", "nats-core" or "jetstream".
        nats_servers: URLs, for the NATS transports.
        namespace: Keeps everything in NATS apart from other namespaces.
        nats: Connection to NATS where more must be said, such as credentials; in place of the two before.
        indexers: host:port of every indexer, for "grpc".
        security: TLS and token, for "grpc".
        enable_local_indexer: Keep an index of what is published, so that readers that missed events, or come late, get
            the whole state. Without it they keep what they have and say that it is a lower bound.
        max_buffered_bytes: Largest size of the events that wait to be sent.
        register: Register the worker, and keep its lease; if not, somebody else does, with the same transport.
        lease_seconds: Time from the end of the process to that of the registration; at least 1.
        total_kv_blocks: KV blocks of one rank's device cache; 0 = unknown.
        copies: "count" if a block that is stored twice must be removed twice, "set" if once.
        http_endpoint: Base URL of the engine, for the registration; "" = none.
        engine: API of the engine, for the registration: "custom" = gateways only say where a request should go;
            "openai" = they dispatch requests over HTTP to it; "vllm" and "sglang" = they also ask it what such engines
            answer, such as health, metrics and tokens.
        labels: Labels of the worker, for the registration.
        epoch: Number of this incarnation of the engine, above those before; None = wall clock in milliseconds.

    Raises:
        ValueError: An argument is out of range, or does not go with the transport.
        TypeError: One address stands where a list of them is wanted.
        InvalidArgument: A field of the worker is out of range.
    """

    def __init__(  # noqa: C901, PLR0912  # one check of a field after the other
        self,
        *,
        worker_id: str,
        model: str,
        block_size: int,
        tenant: str = DEFAULT_TENANT,
        dp_rank: int = 0,
        dp_size: int = 1,
        transport: str = "nats-core",
        nats_servers: Sequence[str] = (DEFAULT_SERVER,),
        namespace: str = DEFAULT_NAMESPACE,
        nats: NatsConfig | None = None,
        indexers: Sequence[str] = (),
        security: ClientSecurity = PLAINTEXT,
        enable_local_indexer: bool = True,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        register: bool = True,
        lease_seconds: int = DEFAULT_LEASE_SECONDS,
        total_kv_blocks: int = 0,
        copies: str = "count",
        http_endpoint: str = "",
        engine: str = "custom",
        labels: Mapping[str, str] | None = None,
        epoch: int | None = None,
    ) -> None:
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport {transport!r} is not one of {', '.join(_TRANSPORTS)}")
        if copies not in tuple(CopyMode):
            raise ValueError(f"copies {copies!r} is not one of {', '.join(CopyMode)}")
        if engine not in tuple(EngineKind):
            raise ValueError(f"engine {engine!r} is not one of {', '.join(EngineKind)}")
        if engine != EngineKind.CUSTOM and not http_endpoint:
            raise ValueError(f"http_endpoint must be given for an engine {engine!r}: requests are dispatched there")
        if (transport == Transport.GRPC) != bool(indexers):
            raise ValueError("indexers must be given for transport grpc, and only for it")
        if isinstance(indexers, str) or isinstance(nats_servers, str):
            raise TypeError("indexers and nats_servers are lists of addresses")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} must be between 0 and dp_size - 1 ({dp_size - 1})")
        if max_buffered_bytes < 1:
            raise ValueError("max_buffered_bytes must be at least 1")
        if lease_seconds < 1:
            raise ValueError("lease_seconds must be at least 1")
        if epoch is not None and not 0 < epoch < 2**64:
            raise ValueError(f"epoch {epoch} must be between 1 and 2**64 - 1")
        self.spec = WorkerSpec(
            worker_id=worker_id,
            model=model,
            block_size=block_size,
            tenant=tenant,
            engine=EngineKind(engine),
            http_endpoint=http_endpoint,
            dp_size=dp_size,
            total_kv_blocks=total_kv_blocks,
            labels=dict(labels or {}),
            transport=Transport(transport),
            copies=CopyMode(copies),
        ).validate()
        """The worker as it is registered."""
        self._nats: NatsConfig | None = None
        if not indexers:
            values = {"nats_server": nats_servers, "namespace": namespace}
            unused = {"nats_credentials": None, "nats_ca": None, "nats_replicas": 1}
            self._nats = nats if nats is not None else NatsConfig.from_flags({**values, **unused})
            if self._nats is None:
                raise ValueError(f"nats_servers must be given for transport {transport}")
        self._indexers = tuple(indexers)
        self._security = security
        self._max_buffered_bytes = max_buffered_bytes
        self._lease_seconds = lease_seconds if register else None
        ring_batches, ring_bytes = RING_BATCHES, RING_BYTES
        if self._indexers:
            # What waits for an indexer waits in the ring: what is published while it loads a state, too.
            ring_bytes = max_buffered_bytes
            ring_batches = max(RING_BATCHES, max_buffered_bytes // MESSAGE_OVERHEAD_BYTES)
        elif not enable_local_indexer:
            ring_batches = 0
        self._rank = PublishedRank(
            self.spec,
            WorkerRank(worker_id, dp_rank),
            has_state=enable_local_indexer,
            epoch=epoch,
            ring_batches=ring_batches,
            ring_bytes=ring_bytes,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self._outlet: _Outlet | None = None
        self._opened = False
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        """Error that ended one of our tasks."""
        self._failed = asyncio.Event()

    async def open(self) -> KvEventPublisher:
        """Begin to publish; connections are made in the background. `async with` does it.

        Raises:
            ValueError: It was opened before: what is new is another incarnation, and another publisher's.
        """
        if self._opened:
            raise ValueError("the publisher was opened before")
        self._opened = True
        if self._nats is not None:
            # Only here: the library is an extra.
            from kvscout_client.kv_publisher_nats import NatsOutlet

            self._outlet = NatsOutlet(
                self._rank,
                self._nats,
                max_buffered_bytes=self._max_buffered_bytes,
                lease_seconds=self._lease_seconds,
            )
        else:
            self._outlet = PushOutlet(
                self._rank, self._indexers, lease_seconds=self._lease_seconds, security=self._security
            )
        loop = asyncio.get_running_loop()
        for name, make in self._outlet.tasks().items():
            task = loop.create_task(make(), name=name)
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)
        return self

    def in_thread(self) -> ThreadedKvEventPublisher:
        """Return the same for engines without an event loop: any thread may publish."""
        from kvscout_client.kv_publisher_thread import ThreadedKvEventPublisher

        return ThreadedKvEventPublisher(self)

    def restart(self, *, epoch: int | None = None) -> None:
        """Begin the next incarnation: the engine lost its cache, and counts from 0 again.

        Raises:
            ValueError: The epoch is not above the one before.
        """
        self._rank.restart(self._open_outlet(), epoch)

    def publish(self, events: Sequence[Event], event_id: int | None = None) -> int | None:
        """See `CacheEvents.publish`."""
        return self._rank.publish(self._open_outlet(), events, event_id)

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until NATS, or every indexer, has all that was published, and the registration.

        Args:
            timeout: In seconds; None = as long as it takes.

        Returns:
            Whether they have.

        Raises:
            FailedPrecondition: Somebody removed the worker from the registry in NATS: nobody reads what is published.
            KvscoutError: The connection was refused permanently.
        """
        loop = asyncio.get_running_loop()
        drained = loop.create_task(self._open_outlet().drained(), name="flush")
        failed = loop.create_task(self._failed.wait(), name="flush failure")
        try:
            await asyncio.wait({drained, failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            if drained.done():
                drained.result()
            return drained.done()
        finally:
            drained.cancel()
            failed.cancel()

    @property
    def status(self) -> PublisherStatus:
        """Return the state of the connection, the buffer and the rank."""
        outlet, rank = self._outlet, self._rank
        buffered, buffered_bytes = outlet.buffered if outlet is not None else (0, 0)
        failure = self._failure
        return PublisherStatus(
            connected=outlet is not None and outlet.connected and failure is None,
            buffered=buffered,
            buffered_bytes=buffered_bytes,
            dropped=outlet.dropped if outlet is not None else 0,
            states=outlet.states if outlet is not None else 0,
            last_event_id=rank.last_event_id,
            epoch=rank.epoch,
            history_incomplete=rank.history_incomplete,
            problem=str(failure) if failure is not None else outlet.problem if outlet is not None else "not open",
        )

    async def close(self, *, timeout: float = CLOSE_SECONDS) -> None:
        """Send buffered events, for `timeout` seconds at most, and end; a worker of one rank is deregistered.

        Of several ranks the others may go on: then the registration ends with its lease.
        """
        if self._outlet is None:
            return
        try:
            if not await self.flush(timeout):
                log.warning(
                    "events of worker %s/%d did not reach every indexer: %s", *self._rank.rank, self._outlet.problem
                )
        except KvscoutError as error:
            log.warning("events of worker %s/%d were not delivered: %s", *self._rank.rank, error)
        finally:
            outlet, self._outlet = self._outlet, None
            self._end(Cancelled("the publisher was closed"))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
            await outlet.close(deregister=self.spec.dp_size == 1)

    async def __aenter__(self) -> KvEventPublisher:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open_outlet(self) -> _Outlet:
        if self._outlet is None:
            raise ValueError("the publisher is not open")
        return self._outlet

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the publisher's task %r ended: %r", task.get_name(), error)
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Report to every waiter, present and later, why nothing arrives any more."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
