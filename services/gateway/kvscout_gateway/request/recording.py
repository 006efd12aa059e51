"""Requests as they end, for those who record them as a trace.

A record has lengths, times, keyed hashes of prefixes, the decision and its outcome; no token and no text.

Nothing is made while nobody records. A recorder that reads too slowly loses the oldest requests, and is told how many.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import InvalidArgument, ResourceExhausted
from kvscout_common.hashing import keyed_sequence_hashes
from kvscout_common.worker import ALL_TENANTS, Role
from kvscout_gateway.engines.observation import predicted_cached_tokens
from kvscout_gateway.values.prompt import HASH_BYTES

if TYPE_CHECKING:
    from kvscout_gateway.request.attempt import Attempt
    from kvscout_gateway.values.request import Request

MAX_RECORDERS: Final = 4
KEPT_BYTES: Final = 8 * 1024 * 1024
"""Bytes of requests that wait for one recorder, about; above, the oldest go."""
MESSAGE_BYTES: Final = 1024 * 1024
"""Bytes of a message, about."""
KEY_BYTES: Final = 16
DEFAULT_TOKENS_PER_HASH: Final = 64
MAX_TOKENS_PER_HASH: Final = 65_536

_RECORD_BYTES: Final = 512
"""Of a request without hashes, about; names are counted beside them."""


class Recorder:
    """Requests that one caller records, and has not read yet.

    Args:
        tenant: Whose requests; "*" = all.
        model: "" = all.
        key: Sixteen secret bytes.
        tokens_per_hash: Rounded down to whole blocks; 0 = the default.
        wake: Called when there is something to read; must not block.

    Raises:
        InvalidArgument: The key, or tokens_per_hash, is out of range.
    """

    def __init__(self, tenant: str, model: str, key: bytes, tokens_per_hash: int, wake: Callable[[], None]) -> None:
        if len(key) != KEY_BYTES:
            raise InvalidArgument(f"must have {KEY_BYTES} bytes, has {len(key)}", field="key")
        if tokens_per_hash > MAX_TOKENS_PER_HASH:
            raise InvalidArgument(f"must be at most {MAX_TOKENS_PER_HASH}", field="tokens_per_hash")
        self._tenant = tenant
        self._model = model
        self._key = key
        self._tokens_per_hash = tokens_per_hash or DEFAULT_TOKENS_PER_HASH
        self._wake = wake
        self._kept: deque[tuple[int, gateway_pb2.RecordedRequest]] = deque()
        """With their bytes."""
        self._bytes = 0
        self._lost = 0

    def wants(self, request: Request) -> bool:
        """Return whether it records a request."""
        return self._tenant in (ALL_TENANTS, request.tenant) and self._model in ("", request.model)

    def put(self, made: gateway_pb2.RecordedRequest, session_id: int, attempt: Attempt | None) -> None:
        """Add a request; the oldest make room.

        Args:
            made: All of it but what the key is needed for.
            session_id: Its session; 0 = unknown.
            attempt: What computed its prompt; None = nothing did.
        """
        mine = gateway_pb2.RecordedRequest()
        mine.CopyFrom(made)
        if session_id:
            (mine.session,) = struct.unpack("<Q", keyed_sequence_hashes([session_id], 1, self._key))
        if attempt is not None and attempt.decision.block_size:
            block_size = attempt.decision.block_size
            stride = max(1, self._tokens_per_hash // block_size)
            packed = keyed_sequence_hashes(attempt.decision.block_hashes, stride, self._key)
            mine.tokens_per_hash = stride * block_size
            mine.prefix_hashes.extend(struct.unpack(f"<{len(packed) // HASH_BYTES}Q", packed))
        size = _RECORD_BYTES + 4 * (len(mine.model) + len(mine.tenant) + len(mine.worker_id) + len(mine.degraded))
        size += HASH_BYTES * len(mine.prefix_hashes)
        self._kept.append((size, mine))
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.popleft()[0]
            self._lost += 1
        self._wake()

    def take(self) -> gateway_pb2.RecordRequestsResponse | None:
        """Return the next requests, oldest first, as a message of bounded size; None = there are none."""
        if not self._kept:
            return None
        message = gateway_pb2.RecordRequestsResponse(lost=self._lost)
        self._lost = size = 0
        while self._kept and size < MESSAGE_BYTES:
            taken, request = self._kept.popleft()
            size += taken
            message.requests.append(request)
        self._bytes -= size
        return message


class Recording:
    """Everyone who records the requests of a gateway."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time) -> None:
        """Record nothing yet.

        Args:
            clock: That of attempts.
            wall_clock: Seconds since the Unix epoch.
        """
        self._recorders: list[Recorder] = []
        self._clock = clock
        self._wall_clock = wall_clock

    def add(self, recorder: Recorder) -> None:
        """Add a recorder.

        Raises:
            ResourceExhausted: There are too many.
        """
        if len(self._recorders) >= MAX_RECORDERS:
            raise ResourceExhausted(f"{MAX_RECORDERS} record already (limit)")
        self._recorders.append(recorder)

    def remove(self, recorder: Recorder) -> None:
        """End it."""
        self._recorders.remove(recorder)

    def over(self, request: Request, attempts: Sequence[Attempt], outcome: str, started: float) -> None:
        """Record a request that has ended.

        Args:
            request: As its client sent it.
            attempts: What it was run by, in order.
            outcome: "ok", "cancelled", or the kind of its error.
            started: When it came, on the clock.
        """
        interested = [recorder for recorder in self._recorders if recorder.wants(request)]
        if not interested:
            return
        seconds = self._clock() - started
        # Of a pair, one computes the prompt and the other the output.
        prompt = next((attempt for attempt in reversed(attempts) if not attempt.request.remote_prefill), None)
        output = next((attempt for attempt in reversed(attempts) if attempt.request.role is not Role.PREFILL), None)
        made = gateway_pb2.RecordedRequest(
            arrived_unix_seconds=self._wall_clock() - seconds,
            tenant=request.tenant,
            model=request.lora_name or request.model,
            prompt_tokens=request.prompt.isl_tokens,
            max_tokens=request.output.max_tokens,
            streamed=not request.body.whole_answer,
            priority=request.priority,
            seconds=seconds,
            outcome=outcome,
        )
        session_id = request.session.session_id
        if prompt is not None:
            decision, usage = prompt.decision, prompt.usage
            session_id = decision.session_id or session_id
            made.worker_id, made.dp_rank = decision.worker
            if usage is not None:
                made.prompt_tokens = _u32(usage.prompt_tokens)
                if usage.cached_tokens is not None:
                    made.cached_tokens = _u32(usage.cached_tokens)
            made.predicted_tokens = predicted_cached_tokens(
                decision.overlap_blocks, made.prompt_tokens, decision.block_size
            )
            made.degraded = ", ".join(decision.degraded_for(in_full=False))
        if output is not None:
            made.output_tokens, made.ttft_seconds = _u32(output.output_tokens), output.ttft_seconds
        for recorder in interested:
            recorder.put(made, session_id, prompt)


def _u32(claimed: int) -> int:
    """Return a number that a client or an engine says, in the range of its field."""
    return min(max(0, claimed), 2**32 - 1)
