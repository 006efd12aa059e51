"""Recovery over NATS: a reader that lost events requests them from their publisher, which answers from its local index.

::

    reader                                                    publisher
      │ RecoverRequest, reply = inbox ──▶ recovery subject ──▶ │
      │ ◀── inbox ── RecoverResponse part 0, reply = flow ──── │ answer(request)
      │ ──── empty message ──▶ flow ─────────────────────────▶ │  at most WINDOW parts unread
      │ ◀── inbox ── ... part n, last ──────────────────────── │

NATS core may lose a message: parts are numbered, so a loss ends the recovery, and the reader repeats it. Both ends
give up on one another when nothing moves; neither holds more than `WINDOW` parts of at most 512 KiB on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final

import nats.aio.client
import nats.aio.msg
import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.subscription import Subscription

from kvscout.v1 import bridge_pb2, types_pb2
from kvscout_blocks.source.feed import HistoryBroken
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.worker import WorkerRank

log = logging.getLogger("kvscout.events")

WINDOW: Final = 16
"""Parts under way that the reader has not read."""
MAX_ANSWERS: Final = 8
"""Requests of one rank answered at once; the next is refused for now."""
IDLE_SECONDS: Final = 5.0
"""Either end gives up when the other was silent this long."""

Answer = Callable[[bridge_pb2.RecoverRequest], Awaitable[Iterable[bridge_pb2.RecoverResponse]]]
"""Answers a request, part by part; `part` and `last` are set. Raises KvscoutError before the first part."""


def recover_request(tenant: str, worker: WorkerRank, first_id: int | None) -> bridge_pb2.RecoverRequest:
    """Return a request for everything from `first_id` on; None = the state."""
    rank = types_pb2.WorkerRank(worker_id=worker.worker_id, dp_rank=worker.dp_rank)
    return bridge_pb2.RecoverRequest(tenant=tenant, worker=rank, from_event_id=first_id)


async def recover(
    client: nats.aio.client.Client,
    subject: str,
    request: bridge_pb2.RecoverRequest,
    *,
    idle_seconds: float = IDLE_SECONDS,
) -> AsyncGenerator[bridge_pb2.RecoverResponse, None]:
    """Send a request to a publisher; yield the parts of its answer in order, the last one included.

    Args:
        client: Connected to NATS.
        subject: `NatsNames.recover` of the rank.
        request: What is wanted.
        idle_seconds: Longest wait for a part.

    Raises:
        HistoryBroken: Nobody answers, the answer broke off or lost a part, or the request was refused.
    """
    try:
        inbox = await client.subscribe(client.new_inbox())
    except (nats.errors.Error, OSError) as error:
        raise HistoryBroken(f"cannot send a request to {subject}: {error!r}") from error
    try:
        await client.publish(subject, request.SerializeToString(), reply=inbox.subject)
        expected = 0
        while True:
            message = await inbox.next_msg(timeout=idle_seconds)
            response = _part(message, expected)
            yield response
            if response.last:
                return
            expected += 1
            await client.publish(message.reply, b"")
    except TimeoutError as error:
        raise HistoryBroken(f"the publisher was silent for {idle_seconds:g} s") from error
    except (nats.errors.Error, OSError) as error:
        raise HistoryBroken(f"the request to the publisher failed: {error!r}") from error
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await inbox.unsubscribe()


def _part(message: nats.aio.msg.Msg, expected: int) -> bridge_pb2.RecoverResponse:
    if _nobody_there(message):
        raise HistoryBroken("no publisher answers")
    try:
        response = bridge_pb2.RecoverResponse.FromString(message.data)
    except DecodeError as error:
        raise HistoryBroken("the publisher's answer cannot be read") from error
    if response.error:
        raise HistoryBroken(f"the publisher refused: {response.error}")
    if response.part != expected:
        raise HistoryBroken(f"part {response.part} came where {expected} comes next")
    return response


def _nobody_there(message: nats.aio.msg.Msg) -> bool:
    """Return whether the server says that no one has subscribed to what we sent."""
    return not message.data and (message.headers or {}).get("Status") == "503"


class RecoveryService:
    """Answers the requests for one rank; made by `serve_recovery`."""

    def __init__(self, client: nats.aio.client.Client, answer: Answer, idle_seconds: float) -> None:
        self.answered = 0
        """Requests answered to the end."""
        self._client = client
        self._answer = answer
        self._idle_seconds = idle_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def open(self, subject: str) -> None:
        """Subscribe; the client keeps the subscription over reconnects."""
        self._subscription = await self._client.subscribe(subject, cb=self._on_request)

    async def close(self) -> None:
        """End it, and what is being answered."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._subscription.unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_request(self, message: nats.aio.msg.Msg) -> None:
        if not message.reply:
            return
        if len(self._tasks) >= MAX_ANSWERS:
            await self._refuse(message.reply, f"{MAX_ANSWERS} others are being answered, come again")
            return
        task = asyncio.get_running_loop().create_task(self._respond(message), name=f"recovery {message.subject}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse(self, reply: str, reason: str) -> None:
        await self._client.publish(reply, bridge_pb2.RecoverResponse(error=reason, last=True).SerializeToString())

    async def _respond(self, message: nats.aio.msg.Msg) -> None:
        try:
            try:
                parts = await self._answer(_request(message.data))
            except KvscoutError as error:
                await self._refuse(message.reply, str(error))
                return
            await self._send(message.reply, parts)
            self.answered += 1
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.info("a recovery was cancelled because its reader is gone: %r", error)
        except Exception:
            # A reader gets no answer and repeats its request; what happens is in the log each time.
            log.exception("a recovery failed")

    async def _send(self, reply: str, parts: Iterable[bridge_pb2.RecoverResponse]) -> None:
        flow = await self._client.subscribe(self._client.new_inbox())
        try:
            unread = 0
            for part in parts:
                if unread == WINDOW:
                    if _nobody_there(await flow.next_msg(timeout=self._idle_seconds)):
                        raise nats.errors.NoRespondersError
                    unread -= 1
                await self._client.publish(reply, part.SerializeToString(), reply="" if part.last else flow.subject)
                unread += 1
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await flow.unsubscribe()


def _request(data: bytes) -> bridge_pb2.RecoverRequest:
    try:
        return bridge_pb2.RecoverRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument("is not a message", field="request") from error


async def serve_recovery(
    client: nats.aio.client.Client, subject: str, answer: Answer, *, idle_seconds: float = IDLE_SECONDS
) -> RecoveryService:
    """Answer requests that come to a subject until the service is closed.

    Args:
        client: Connected to NATS.
        subject: `NatsNames.recover` of the rank.
        answer: What answers them; called on the event loop.
        idle_seconds: A reader that reads nothing this long is gone.

    Raises:
        nats.errors.Error: It cannot be subscribed to.
    """
    service = RecoveryService(client, answer, idle_seconds)
    await service.open(subject)
    return service
