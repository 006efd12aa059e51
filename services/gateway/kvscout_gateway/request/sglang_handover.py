"""SGLang's handshake: both engines get the client's request at once, and meet in a room of the prefill worker's.

Each engine waits for the other, so that the end of one is soon that of both, and what each of them says of it is not
who began: a worker that is gone, hangs or talks nonsense is to blame before one that refuses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError
from kvscout_gateway.engines.faults import Ejection, EngineFailed
from kvscout_gateway.request.attempt import Attempt, Reply
from kvscout_gateway.request.plan import PrefillFailed
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.request import Request

if TYPE_CHECKING:
    from kvscout_gateway.request.exchange import Exchange

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's `--disaggregation-bootstrap-port`."""
BLAME_SECONDS = 0.25
"""When one attempt fails, the other may have so much longer to fail, too, before it is decided which began."""
ROOMS = 1 << 63
_UNSTREAMED: Mapping[str, Any] = {"stream": False, "stream_options": None}
"""Prefill's one token is decode's first, too: nobody needs it, and nobody waits for it."""


_Job: TypeAlias = Coroutine[Any, Any, None]


class _DecodeEnded(Exception):
    """The decode attempt came to an end that is none of the prefill worker's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class SglangHandover:
    """See `Handover`.

    Args:
        draw: A random number below that.
    """

    def __init__(self, draw: Callable[[int], int] = secrets.randbelow) -> None:
        self._draw = draw

    async def run(self, exchange: Exchange, prefill: Request, decode: Attempt, reply: Reply) -> None:
        """See `Handover`."""
        tries = 0
        await reply.placed(decode.decision)

        async def both(attempt: Attempt) -> None:
            nonlocal tries
            meeting = self.meeting(attempt.decision)
            # An engine refuses an id whose end it has not seen.
            again: Mapping[str, Any] = {"rid": f"{exchange.request_id}-{tries}"} if tries else {}
            tries += 1

            answered = False

            async def compute() -> None:
                nonlocal answered
                document = await attempt.read(await attempt.send({**meeting, **_UNSTREAMED}, whole_answer=False))
                answered = True
                attempt.prefilled(attempt.dialect.usage(document))

            async def generate() -> None:
                await decode.relay(await decode.send({**meeting, **again}), reply)

            try:
                await _run_both(compute(), generate(), decode)
            finally:
                # Who answers shortly may be done first; what it says of the prompt is what the other one had cached.
                # When that one was done nobody knows then.
                if not answered and decode.usage is not None:
                    attempt.prefilled(decode.usage._replace(output_tokens=0))

        try:
            await exchange.run_attempts(prefill, both)
        except _DecodeEnded as ended:
            raise ended.error from ended.error.__cause__
        except InvalidArgument:
            raise
        except KvscoutError as error:
            raise PrefillFailed(error) from error

    def meeting(self, decision: Decision) -> Mapping[str, Any]:
        """Return where the attempts meet: a room whose number says which rank of the prefill worker it is on.

        Raises:
            FailedPrecondition: Nobody knows where the prefill worker can be met.
        """
        spec = decision.spec
        host = (spec.bootstrap_host if spec is not None else "") or urlsplit(decision.endpoint).hostname
        if spec is None or not host:
            raise FailedPrecondition(f"worker {decision.worker.worker_id!r} has no bootstrap host")
        room = self._draw(ROOMS // spec.dp_size) * spec.dp_size + decision.worker.dp_rank - spec.dp_start_rank
        return {
            "bootstrap_host": host,
            "bootstrap_port": spec.bootstrap_port or DEFAULT_BOOTSTRAP_PORT,
            "bootstrap_room": room,
        }


async def _run_both(compute: _Job, generate: _Job, decode: Attempt) -> None:
    """Raise EngineFailed for failures of prefill, `_DecodeEnded` for everything that ends decode."""
    computing = asyncio.create_task(compute, name="prefill-attempt")
    generating = asyncio.create_task(generate, name="decode-attempt")
    attempts = (computing, generating)
    try:
        await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
        if not computing.done() and _error_of(generating) is not None:
            await asyncio.wait(attempts, timeout=BLAME_SECONDS)
        elif not generating.done():
            if _error_of(computing) is not None and not decode.passed:
                await asyncio.wait(attempts, timeout=BLAME_SECONDS)
            if _error_of(computing) is None or decode.passed:
                await asyncio.wait((generating,))  # the prompt is across: its engine matters no more
    except asyncio.CancelledError:
        await _end(computing, generating)
        raise
    if generating.done() and _error_of(generating) is None:
        computing.cancel()
        computing.add_done_callback(_error_of)  # seen, whatever it was
        return  # at once: the client has its answer, and may be gone
    # That they end is how the engines learn of it, which has to be before another try.
    await _end(computing, generating)
    computed, generated = _error_of(computing), _error_of(generating)
    if generating.cancelled() and computed is not None:
        raise computed  # decode waits still
    assert generated is not None
    if not decode.passed and _began(computed, generated):
        assert computed is not None
        raise computed
    raise _DecodeEnded(generated)


async def _end(*attempts: asyncio.Task[None]) -> None:
    for attempt in attempts:
        attempt.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)


def _began(computed: BaseException | None, generated: BaseException) -> bool:
    """Tell whether the prefill attempt's failure is the cause of the other."""
    if not isinstance(generated, EngineFailed) or not isinstance(computed, EngineFailed):
        return False
    return computed.rule.ejection is Ejection.COUNTS or generated.rule.ejection is not Ejection.COUNTS


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Return how a task that is done failed; one that was cancelled did not."""
    return None if task.cancelled() else task.exception()
