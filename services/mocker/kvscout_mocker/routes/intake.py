"""Admission of validated requests to the engine of a rank, for every API of the process."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine.kv_transfer import KvTransfer
from kvscout_mocker.engine.rank import Rank, TokenStream
from kvscout_mocker.engine.request import Finish, Request
from kvscout_mocker.faults import Faults
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.server import Document
from kvscout_mocker.tokens.sequence import Sequence as TokenSequence


class Admitted:
    """A request that an engine works on."""

    def __init__(self, stream: TokenStream, transfer: KvTransfer, rank: Rank) -> None:
        self.stream = stream
        self.rank = rank
        self._transfer = transfer
        self._done = False

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that no engine had to compute."""
        return self._transfer.cached_tokens(self.stream.requests[0])

    @property
    def written_tokens(self) -> int:
        """Return the prompt tokens that were added to the cache: those of complete blocks."""
        request = self.stream.requests[0]
        complete = request.prompt_tokens - request.prompt_tokens % request.sequence.block_size
        return max(0, complete - self.cached_tokens)

    def done(self) -> Document:
        """Take note that the last token was read; return the fields that the transfer adds to the answer."""
        self._done = True
        return self._transfer.done(self.stream.requests[0], self.rank)

    def close(self) -> None:
        """Abort what is not done."""
        self.rank.abort(self.stream)
        if not self._done:
            self.rank.release(self.stream.requests[0])


class Intake:
    """Admits requests: chooses their ranks and transfers.

    Args:
        config: Configuration of the process.
        ranks: In order of their number.
        faults: Faults of the process.
        transfer_of: Returns the transfer of a request, if two engines serve it.
    """

    def __init__(
        self,
        config: MockerConfig,
        ranks: Sequence[Rank],
        faults: Faults,
        transfer_of: Callable[[Generation], KvTransfer],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._faults = faults
        self._transfer_of = transfer_of
        self._next_rank = 0

    @asynccontextmanager
    async def admitted(self, generation: Generation, request_id: str, dp_rank: str | None) -> AsyncIterator[Admitted]:
        """Submit a request to an engine; leaving the context aborts what is left of it.

        Args:
            generation: Validated request.
            request_id: For logs and transfers.
            dp_rank: The rank that the client wants; None: the least loaded.

        Raises:
            InvalidArgument: There is no such rank, or the request lacks what this engine's role needs.
            InternalError: The other transfer does not come.
            ResourceExhausted: The waiting queue is full.
        """
        named = self._named(dp_rank)
        transfer = self._transfer_of(generation)
        try:
            await transfer.ready()
            rank = self._ranks[transfer.dp_rank] if transfer.dp_rank is not None else named or self._least_loaded()
            requests = [
                self._request(generation, request_id, index, rank, transfer) for index in range(generation.choices)
            ]
            admitted = Admitted(rank.submit(requests, transfer.source), transfer, rank)
            try:
                yield admitted
            finally:
                admitted.close()
        finally:
            transfer.close()

    def _request(
        self, generation: Generation, request_id: str, index: int, rank: Rank, transfer: KvTransfer
    ) -> Request:
        return Request(
            request_id,
            TokenSequence(
                array("I", generation.prompt),  # of its own: it grows by what is generated
                block_size=self._config.engine.block_size,
                hash_seed=rank.hash_seed,
                scope=generation.scope,
            ),
            generation.max_tokens if transfer.max_tokens is None else min(generation.max_tokens, transfer.max_tokens),
            generation.seed + index & 2**64 - 1,
            generation.report_prefix,
            Finish.STOP if generation.ends_early else Finish.LENGTH,
            self._faults.fails_after(),
            # One choice goes across; further ones are computed, or found cached.
            receives=transfer.source is not None and index == 0,
            holds=transfer.holds and index == 0,
            priority=generation.priority,
        )

    def _named(self, dp_rank: str | None) -> Rank | None:
        if dp_rank is None:
            return None
        named = next((rank for rank in self._ranks if str(rank.dp_rank) == dp_rank), None)
        if named is None:
            raise InvalidArgument(
                f"must be a rank between 0 and {len(self._ranks) - 1}, not {dp_rank!r}", field="X-data-parallel-rank"
            )
        return named

    def _least_loaded(self) -> Rank:
        order = [*self._ranks[self._next_rank :], *self._ranks[: self._next_rank]]
        rank = min(order, key=lambda r: r.load)
        self._next_rank = (rank.dp_rank + 1) % len(self._ranks)
        return rank
