"""From a validated request to the engine of a rank: one way in for every API of the process."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.answers import Document
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine import Finish, Request
from kvscout_mocker.faults import Faults
from kvscout_mocker.generation import Generation
from kvscout_mocker.handshakes import Handshakes
from kvscout_mocker.legs import Leg
from kvscout_mocker.rank import Rank, TokenStream
from kvscout_mocker.sequence import Sequence as TokenSequence


class Admitted:
    """A request that an engine works on."""

    def __init__(self, stream: TokenStream, leg: Leg, rank: Rank) -> None:
        self.stream = stream
        self.rank = rank
        self._leg = leg
        self._done = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute."""
        return self._leg.cached_tokens(self.stream.requests[0])

    def done(self) -> Document:
        """To be called when the last token was read; gives what the answer says besides."""
        self._done = True
        return self._leg.done(self.stream.requests[0], self.rank)

    def close(self) -> None:
        """Takes back what is not done."""
        self.rank.abort(self.stream)
        if not self._done:
            self.rank.release(self.stream.requests[0])


class Intake:
    """Chooses ranks and legs.

    Args:
        config: Of the process.
        ranks: In order of their number.
        faults: Of the process.
        handshakes: With engines that serve the other leg of a request.
    """

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank], faults: Faults, handshakes: Handshakes) -> None:
        self._config = config
        self._ranks = ranks
        self._faults = faults
        self._handshakes = handshakes
        self._next_rank = 0

    @asynccontextmanager
    async def admitted(self, asked: Generation, request_id: str, dp_rank: str | None) -> AsyncIterator[Admitted]:
        """Gives a request to an engine; leaving takes it back, whatever became of it.

        Args:
            asked: What to generate.
            request_id: For logs and transfers.
            dp_rank: The rank that the client wants; None: the least loaded.

        Raises:
            InvalidArgument: There is no such rank, or the request lacks what this engine's role needs.
            InternalError: The other leg does not come.
            ResourceExhausted: The waiting queue is full.
        """
        named = self._named(dp_rank)
        leg = self._handshakes.leg(asked)
        try:
            await leg.admitted()
            rank = self._ranks[leg.dp_rank] if leg.dp_rank is not None else named or self._least_loaded()
            requests = [self._request(asked, request_id, index, rank, leg) for index in range(asked.choices)]
            admitted = Admitted(rank.submit(requests, leg.source), leg, rank)
            try:
                yield admitted
            finally:
                admitted.close()
        finally:
            leg.close()

    def _request(self, asked: Generation, request_id: str, index: int, rank: Rank, leg: Leg) -> Request:
        return Request(
            request_id,
            TokenSequence(
                array("I", asked.prompt),  # of its own: it grows by what is generated
                block_size=self._config.engine.block_size,
                hash_seed=rank.hash_seed,
                scope=asked.scope,
            ),
            asked.max_tokens if leg.max_tokens is None else min(asked.max_tokens, leg.max_tokens),
            asked.seed + index & 2**64 - 1,
            asked.report_prefix,
            Finish.STOP if asked.ends_early else Finish.LENGTH,
            self._faults.fails_after(),
            # One choice goes across; further ones are computed, or found cached.
            receives=leg.source is not None and index == 0,
            holds=leg.holds and index == 0,
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
