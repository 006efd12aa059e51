"""Guard that every call passes on its way to its handler and back, whatever carries it and however it is handled.

::

    call ──▶ who is it, may it ──▶ is the message one, are its tenants the caller's ──▶ handler
      ◀── status, by the one table of errors ◀── raised, or cut because the server stops ◀──┘

grpc.aio has a `Guard` as its only interceptor; the native server asks the same `GuardedMethod`s itself.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from kvscout_common.errors import KvscoutError, PermissionDenied, Unauthenticated, Unimplemented
from kvscout_common.identity.audit import audited
from kvscout_common.identity.identity import AUDITED, AccessRole, Identity, MethodAccess, TokenTable, enter, leave
from kvscout_common.observability import tracing
from kvscout_common.observability.rpc_metrics import MethodTimes, RpcTimes
from kvscout_common.process.endings import INTENDED
from kvscout_common.process.running_calls import ENDLESS, RunningCall, RunningCalls, draining
from kvscout_common.rpc.handlers import Context, Continuation, Handler, Synchronous, read_message
from kvscout_common.transport.statuses import caller_gone, status_of
from kvscout_common.transport.waiting import running_task

BEGIN_TRACES = frozenset({"FindMatches", "Generate", "Reserve", "Route", "Select", "SelectAndReserve"})
"""Rpcs with which a request begins; without a trace of their caller, all others are part of none."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Guard(grpc.aio.ServerInterceptor):
    """Admission and accounting of the calls of one server.

    Args:
        tokens: Who may call; None = everybody.
        calls: Counts those that run; None = those of this server alone.
        times: Counts those that have ended; None = those of this server alone.
    """

    def __init__(
        self, tokens: TokenTable | None = None, calls: RunningCalls | None = None, times: RpcTimes | None = None
    ) -> None:
        self.calls = calls or RunningCalls()
        self._times = times or RpcTimes()
        self._tokens = tokens
        self._guarded: dict[str, tuple[Handler, GuardedMethod, Handler, Handler]] = {}
        """By method: what was registered, the rpc, what is called in its place, and what refuses a call unread."""

    def method(self, name: str, handler: Handler) -> GuardedMethod:
        """Return an rpc of the server.

        Args:
            name: Its full name.
            handler: As it was registered.
        """
        return GuardedMethod(name, handler, MethodAccess(name, self._tokens), self.calls, self._times.method(name))

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED itself
            return handler
        name = handler_call_details.method
        known = self._guarded.get(name)
        if known is None or known[0] is not handler:
            method = self.method(name, handler)
            known = self._guarded[name] = (handler, method, method.as_handler(), method.as_handler(reads=False))
        _, method, guarded, refuses = known
        # grpc would read the one message of a call, however long it takes to come, before anybody is asked.
        return guarded if method.admits(handler_call_details.invocation_metadata or ()) else refuses


class GuardedMethod:
    """One rpc, what is the same for all its calls found once.

    It takes bytes and reads them itself: what grpc cannot read it would answer with INTERNAL, past all of us.
    """

    def __init__(
        self, name: str, handler: Handler, admission: MethodAccess, calls: RunningCalls, times: MethodTimes
    ) -> None:
        self.name = name
        self.handler = handler
        self.admission = admission
        self.calls = calls
        self.times = times
        # grpcio's stubs type the behaviour of a handler as the synchronous one, whatever the server is.
        self._behaviour: Any = (
            handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        )
        self._traced = tracing.enabled() and name.startswith("/kvscout.") and name not in ENDLESS
        self._begins_traces = name.rpartition("/")[2] in BEGIN_TRACES
        self._answers = isinstance(self._behaviour, Synchronous)
        self.synchronous = self._answers and not self._traced
        """True = calls need no task; one that is traced has one, to which what it is part of belongs."""
        self.native: Any = getattr(self._behaviour, "native", None) if self.synchronous else None
        """The extension's `Answers`; None = it has none."""
        self._audited = name.startswith("/kvscout.") and name.rpartition("/")[2] in AUDITED
        self.streams = (bool(handler.request_streaming), bool(handler.response_streaming))
        """(many requests, many answers)"""

    def begin(self, call: RunningCall, identity: Identity) -> None:
        """Begin a call; it ends with `end`.

        Raises:
            Draining: It is endless, and the server stops.
            ResourceExhausted: Its tenant has as many endless ones as it may have.
        """
        self.admission.opened(identity)
        try:
            self.calls.begin(call, self.name)
        except BaseException:
            self.admission.closed(identity)
            raise

    def end(self, call: RunningCall, identity: Identity) -> None:
        """End the call."""
        self.admission.closed(identity)
        self.calls.end(call)

    def as_handler(self, *, reads: bool = True) -> Handler:
        """Return it as a handler of grpc.aio.

        Args:
            reads: False = for a call that is not admitted: nothing that its caller sends is waited for.
        """
        many_requests, many_answers = self.streams
        make: Callable[..., Handler] = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[(many_requests or not reads, many_answers)]

        # Writes to the context instead of yielding: when the caller goes away, the behaviour's generator is closed here
        # and now, in the call's own task, and not whenever it happens to be collected.
        async def run(request: Any, context: Any) -> Any:
            return await self.run(request if many_requests else [request], context)

        return make(run, response_serializer=self.handler.response_serializer)

    def admit(self, metadata: Any) -> Identity:
        """Return who calls, as the metadata of the call say.

        Raises:
            Unauthenticated: Nobody that is known.
            PermissionDenied: One that may not call this.
        """
        return self.admission.admit(metadata)

    def admits(self, metadata: Any) -> bool:
        """Return whether `admit` lets the caller in."""
        try:
            self.admit(metadata)
        except (Unauthenticated, PermissionDenied):
            return False
        return True

    def answer(self, request: bytes, identity: Identity) -> bytes:
        """Return the answer of a synchronous handler to one message."""
        entered = enter(identity)
        try:
            answer: bytes = self._behaviour.answer(request)
            return answer
        finally:
            leave(entered)

    async def run(self, request: Any, context: Any, *, admitted: Callable[[Identity], None] | None = None) -> Any:
        """Run a call in its own task.

        Args:
            request: A list of its bytes, taken out when they are read: the request of a stream is not kept until its
                end. Or the iterator of several.
            context: Given the answers of a handler that has several.
            admitted: Receives who calls.

        Returns:
            The one answer.

        Raises:
            grpc.aio.AbortError: It ended with a status, which the context has.
            asyncio.CancelledError: Nobody waits for it any more.
        """
        started, ended = time.perf_counter(), grpc.StatusCode.OK
        try:
            if all(self.streams):
                # The first write carries the headers, and so does a status where none went out before: a status while
                # another task's first write is on its way would be refused by grpc, and the caller wait for ever.
                await context.send_initial_metadata(())
            metadata = context.invocation_metadata() or ()
            identity = self.admit(metadata)
            if admitted is not None:
                admitted(identity)
            with self._span(metadata) if self._traced else tracing.NOTHING:
                return await self._counted(request, context, identity)
        except grpc.aio.AbortError:
            code = context.code()  # grpcio's is a number
            ended = code if isinstance(code, grpc.StatusCode) else _CODES[code]
            raise
        except INTENDED:
            ended = grpc.StatusCode.CANCELLED
            raise
        except BaseException as error:
            # What generated servicers raise for an rpc that nobody wrote, after they set this code.
            missing = isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED
            shown = Unimplemented(f"this release does not have {self.name}") if missing else error
            code, text, trailers = status_of(shown, self.name)
            ended = code
        finally:
            self.times.ended(ended, started)
        try:
            await context.abort(code, text, trailing_metadata=trailers)
        except grpc.aio.InternalError as error:
            if not caller_gone(error):
                raise
            raise asyncio.CancelledError from error

    def _span(self, metadata: Any) -> tracing.Span:
        """Return the span of a call: part of its caller's trace; of those without one, requests begin one."""
        parent = next((str(value) for key, value in metadata if key == tracing.TRACEPARENT), "")
        if not parent and not self._begins_traces:
            return tracing.NOTHING
        return tracing.span(self.name.lstrip("/"), tracing.SpanKind.SERVER, parent=parent)

    async def _counted(self, request: Any, context: Context, identity: Identity) -> Any:
        task = running_task()
        self.begin(task, identity)
        entered = enter(identity)
        try:
            return await self._handled(request, context, identity)
        except asyncio.CancelledError:
            # A caller that goes away meanwhile has cancelled it as well, and gets no answer.
            if not self.calls.ends(self.name):
                raise
            while task.cancelling():
                task.uncancel()
            raise draining() from None
        except KvscoutError as error:
            raise (error if identity.role is AccessRole.ADMIN else error.for_clients()) from error.__cause__
        finally:
            leave(entered)
            self.end(task, identity)

    async def _handled(self, request: Any, context: Context, identity: Identity) -> Any:
        many_requests, many_answers = self.streams
        if self._answers:
            if not many_requests:
                return self._behaviour.answer(request.pop())
            async for message in request:
                await context.write(self._behaviour.answer(message))
            return None
        if self._audited:
            message = self._read(request.pop(), identity)
            return await audited(self.name, message, identity, self._behaviour(message, context))
        result = self._behaviour(
            self._each(request, identity) if many_requests else self._read(request.pop(), identity), context
        )
        if not many_answers:
            return await result
        if inspect.isawaitable(result):  # a behaviour that writes to the context itself
            await result
            return None
        async with aclosing(result):
            async for response in result:
                await context.write(response)
        return None

    def _read(self, request: bytes, identity: Identity) -> Any:
        # grpcio's stubs do not know that a handler may go without.
        deserialize: Any = self.handler.request_deserializer
        if deserialize is None:
            return request
        message = read_message(deserialize, request)
        self.admission.check(message, identity)
        return message

    async def _each(self, requests: AsyncIterator[bytes], identity: Identity) -> AsyncIterator[Any]:
        async for request in requests:
            yield self._read(request, identity)
