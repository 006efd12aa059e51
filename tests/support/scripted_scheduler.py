"""A scheduler that behaves, or misbehaves, as a test says: bookings by request id, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common import errors
from support.grpc_server import serving

FULL = "full"
"""A model without room: what asks for it waits in line until it is freed, or `make_room`."""


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """One scheduler."""

    def __init__(self) -> None:
        self.booked: dict[str, str] = {}
        """Worker by request id."""
        self.reserved: dict[str, scheduler_pb2.ReserveRequest] = {}
        """What was booked where it runs, by request id."""
        self.hellos: list[list[str]] = []
        """Request ids that were listed."""
        self.heartbeats_ms: list[int] = []
        """That were promised."""
        self.messages: list[int] = []
        """Operations of each message."""
        self.unknown_models = {"nobody"}
        """Models of which it knows no worker."""
        self.received: list[str] = []
        """What was asked on streams, such as "free r"."""
        self.unary: list[str] = []
        self.statuses = 0
        """How often it was asked for its status."""
        self.refuses: Exception | None = None
        """Raised by every rpc."""
        self.goes_on = asyncio.Event()
        """Cleared = it hangs."""
        self.goes_on.set()
        self.draining = False
        self.queues_requests = False
        self.answers_all = False
        """Every operation has a result, as of releases that acknowledge none."""
        self.ages_us: list[int] = []
        """Ages of operations that said one."""
        self.line_ends = asyncio.Event()
        """Set = unary calls that wait in line have done so for too long."""
        self._waiting: dict[str, tuple[int, Any]] = {}
        self._contexts: list[Any] = []
        self._writing = asyncio.Lock()
        self._readers: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()

    async def drain(self) -> None:
        """Tells every stream that it drains."""
        self.draining = True
        for context in self._contexts:
            await self._write(context, scheduler_pb2.LifecycleResponse(draining=True))

    def cut(self) -> None:
        """Breaks every stream."""
        self._cut.update(self._readers)
        for reader in self._readers:
            reader.cancel()

    async def make_room(self) -> None:
        """Books everybody who waits."""
        for request_id, (number, context) in self._waiting.items():
            self.booked[request_id] = "late"
            result = scheduler_pb2.LifecycleResult(id=number, select=_selected("late"))
            await self._write(context, scheduler_pb2.LifecycleResponse(results=[result]))
        self._waiting.clear()

    async def _write(self, context: Any, message: scheduler_pb2.LifecycleResponse) -> None:
        async with self._writing:  # grpc takes one at a time
            await context.write(message)

    # It writes to its context, which grpc allows and its stubs do not know.
    async def Lifecycle(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        if self.refuses is not None:
            raise self.refuses
        reader = asyncio.current_task()
        assert reader is not None
        self._readers.add(reader)
        try:
            first = await anext(request_iterator)
            await self.goes_on.wait()
            listed = [ref.request_id for ref in first.hello.in_flight]
            self.hellos.append(listed)
            self.heartbeats_ms.append(first.hello.heartbeat_ms)
            self.booked = {name: worker for name, worker in self.booked.items() if name in listed}
            unknown = [ref for ref in first.hello.in_flight if ref.request_id not in self.booked]
            hello = scheduler_pb2.LifecycleResponse(
                unknown_in_flight=unknown, draining=self.draining, queues_requests=self.queues_requests
            )
            await self._write(context, hello)
            self._contexts.append(context)
            if self.draining and not hello.draining:
                # The owner knows us already, and the test after it.
                await self._write(context, scheduler_pb2.LifecycleResponse(draining=True))
            async for message in request_iterator:
                await self.goes_on.wait()
                self.messages.append(len(message.operations))
                response = scheduler_pb2.LifecycleResponse()
                for operation in message.operations:
                    self._carry_out(operation, response, context)
                silent = ("prefill_complete", "free") if not self.answers_all else ()
                kinds = {each.id: each.WhichOneof("operation") for each in message.operations}
                results = [each for each in response.results if each.code or kinds.get(each.id) not in silent]
                if all(kind in silent for kind in kinds.values()) and not results:
                    continue
                results.reverse()  # answers come in no order
                await self._write(context, scheduler_pb2.LifecycleResponse(results=results))
        except asyncio.CancelledError:
            if reader not in self._cut:
                raise
            reader.uncancel()
            raise errors.Unavailable("cut") from None
        finally:
            self._readers.discard(reader)
            if context in self._contexts:
                self._contexts.remove(context)
            self._waiting = {name: entry for name, entry in self._waiting.items() if entry[1] is not context}

    def _carry_out(self, operation: Any, response: scheduler_pb2.LifecycleResponse, context: Any) -> None:
        kind = operation.WhichOneof("operation")
        asked = getattr(operation, kind)
        if operation.age_us:
            self.ages_us.append(operation.age_us)
        name = getattr(asked, "request_id", "")
        if kind != "renew":
            self.received.append(f"{kind} {name}".strip())
        if kind == "select_and_reserve" and asked.model == FULL and name not in self.booked:
            if name in self._waiting:
                response.results.add(id=self._waiting[name][0], code=1, message="a repeated call waits in its place")
            self._waiting[name] = (operation.id, context)
            return
        result = response.results.add(id=operation.id)
        if asked.DESCRIPTOR.fields_by_name.get("model") is not None and asked.model in self.unknown_models:
            result.code, result.message = grpc.StatusCode.NOT_FOUND.value[0], "no such model"
        elif kind.startswith("select"):
            if name:
                self.booked[name] = "w"
            result.select.CopyFrom(_selected("w"))
        elif kind == "reserve":
            self.booked[name], self.reserved[name] = asked.worker.worker_id, asked
            result.reserve.uncached_tokens = asked.isl_tokens - asked.cached_tokens
        elif kind == "free":
            if name in self._waiting:
                response.results.add(id=self._waiting.pop(name)[0], code=1, message="freed while it waited")
            self.booked.pop(name, None)
            result.free.outcome = scheduler_pb2.FREE_OUTCOME_FREED

    async def Select(self, request: Any, context: Any) -> scheduler_pb2.SelectResponse:
        await self._unary("select")
        return _selected("unary")

    async def SelectAndReserve(self, request: Any, context: Any) -> scheduler_pb2.SelectResponse:
        await self._unary(f"select_and_reserve {request.request_id}")
        if request.model == FULL:
            await self.line_ends.wait()
            raise errors.DeadlineExceeded("Deadline Exceeded")
        if request.model in self.unknown_models:
            raise errors.NotFound("no such model")
        self.booked[request.request_id] = "unary"
        return _selected("unary")

    async def Free(self, request: Any, context: Any) -> scheduler_pb2.FreeResponse:
        await self._unary(f"free {request.request_id}")
        self.booked.pop(request.request_id, None)
        return scheduler_pb2.FreeResponse(outcome=scheduler_pb2.FREE_OUTCOME_FREED)

    async def GetStatus(self, request: Any, context: Any) -> scheduler_pb2.SchedulerGetStatusResponse:
        self.statuses += 1
        await self._unary("")
        return scheduler_pb2.SchedulerGetStatusResponse(service=types_pb2.ServiceInfo(draining=self.draining))

    async def _unary(self, received: str) -> None:
        if received:
            self.unary.append(received)
        if self.refuses is not None:
            raise self.refuses
        await self.goes_on.wait()


def _selected(worker_id: str) -> scheduler_pb2.SelectResponse:
    response = scheduler_pb2.SelectResponse()
    response.worker.worker_id = worker_id
    return response


@asynccontextmanager
async def scripted_scheduler(
    on_port: Callable[[int], object] = lambda port: None,
) -> AsyncIterator[tuple[ScriptedScheduler, grpc.aio.Channel]]:
    """A scripted scheduler in this process, and a channel to it; `on_port` is told where, for further channels."""
    servicer = ScriptedScheduler()  # type: ignore[abstract]  # the rest answers UNIMPLEMENTED

    def add(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)

    async with serving(add, on_port=on_port) as channel:
        yield servicer, channel
