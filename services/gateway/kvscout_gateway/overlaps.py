"""Asking the indexers where a prompt is cached. Whatever goes wrong there costs knowledge, never the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_gateway.failover import HelperDown, Member
from kvscout_gateway.placement import Indexers
from kvscout_gateway.prompt import Geometry


class Found(NamedTuple):
    """What the indexers know of one prompt."""

    overlaps: dict[Geometry, types_pb2.Overlaps]
    """By geometry; one that is missing was not asked for, or not answered."""
    problem: str = ""
    """Why the answer is not complete; "" = it is."""


NOTHING_FOUND = Found({})


class OverlapQuery:
    """FindMatches, once a geometry, all within one deadline."""

    def __init__(self, indexers: Indexers, *, timeout_seconds: float, resync: Callable[[Member[Any]], object]) -> None:
        """Asks these indexers.

        Args:
            indexers: In order of preference.
            timeout_seconds: Longest wait for an answer.
            resync: Told of an indexer that does not know workers which this gateway knows.
        """
        self._indexers = indexers
        self._timeout = timeout_seconds
        self._resync = resync

    async def find(self, model: str, tenant: str, hashes: Mapping[Geometry, list[int]]) -> Found:
        """The overlaps of a prompt with every cache; nothing is asked for a prompt without a complete block."""
        asked = [pool for pool in hashes if hashes[pool]]
        if not asked or not self._indexers.members:
            return NOTHING_FOUND
        if len(asked) == 1:  # nearly always: no need for a task of its own
            answers = [await self._ask(model, tenant, asked[0], hashes[asked[0]])]
        else:
            answers = await asyncio.gather(*(self._ask(model, tenant, pool, hashes[pool]) for pool in asked))
        overlaps = {
            pool: answer for pool, answer in zip(asked, answers, strict=True) if isinstance(answer, types_pb2.Overlaps)
        }
        return Found(overlaps, next((answer for answer in answers if isinstance(answer, str)), ""))

    async def _ask(self, model: str, tenant: str, pool: Geometry, hashes: list[int]) -> types_pb2.Overlaps | str:
        request = indexer_pb2.FindMatchesRequest(
            model=model, tenant=tenant, block_size=pool.block_size, eagle=pool.eagle, block_hashes=hashes
        )
        try:
            answer, _ = await self._indexers.call(
                lambda stub: stub.FindMatches, request, timeout_seconds=self._timeout, uninformed=self._uninformed
            )
        except HelperDown as error:
            return str(error)
        except KvscoutError as error:
            return f"indexer: {error}"
        return answer.overlaps

    def _uninformed(self, member: Member[Any], error: KvscoutError) -> bool:
        """It may have restarted, with the workers that this gateway knows still under way to it."""
        if not isinstance(error, (NotFound, FailedPrecondition)):
            return False
        self._resync(member)
        return True
