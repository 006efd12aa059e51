"""The methods of Dynamo's `KvPushRouter` (`KvRouter` in later releases) over a `Router`, for code that moves.

What it takes and returns has Dynamo's shapes: dictionaries for options and loads, tuples for workers, numbers for
worker ids that are numbers. docs/migration.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

from kvscout.v1 import events_pb2
from kvscout_client.booking import Booking
from kvscout_client.options import OutputOptions, RouterOverride, SamplingOptions, StopConditions, WorkerId
from kvscout_client.router import Router
from kvscout_client.tokens import Tokens
from kvscout_common.errors import InvalidArgument

Options: TypeAlias = Mapping[str, Any]
O = TypeVar("O", StopConditions, SamplingOptions, OutputOptions, RouterOverride)  # noqa: E741


class KvPushRouter:
    """A router with Dynamo's method names. A booking made by `best_worker` is owed `free`, or ends with its lease."""

    def __init__(self, router: Router, *, model: str = "") -> None:
        """Use a router, and leaves it open.

        Args:
            router: Client of the gateway.
            model: Model of all calls; "" = the router's.
        """
        self._router = router
        self._model = model

    async def generate(  # by place as by name, as there
        self,
        token_ids: Tokens,
        model: str = "",
        stop_conditions: Options | None = None,
        sampling_options: Options | None = None,
        output_options: Options | None = None,
        router_config_override: Options | None = None,
        worker_id: WorkerId | None = None,
        dp_rank: int | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Route a prompt and run it; book and free by itself.

        Returns:
            Its chunks of output: `token_ids`, `text`, and in the last ones `finish_reason` and `usage`.

        Raises:
            InvalidArgument: An option has a name that kvscout does not know.
            others: As `Router.generate`, from the iterator.
        """
        chunks = self._router.generate(
            token_ids,
            model=model or self._model,
            stop=_options(StopConditions, "stop_conditions", stop_conditions),
            sampling=_options(SamplingOptions, "sampling_options", sampling_options),
            output=_options(OutputOptions, "output_options", output_options),
            override=_options(RouterOverride, "router_config_override", router_config_override),
            pinned_worker_id="" if worker_id is None else worker_id,
            pinned_dp_rank=dp_rank,
        )

        async def dicts() -> AsyncGenerator[dict[str, Any], None]:
            async with aclosing(chunks):
                async for chunk in chunks:
                    chunk_dict: dict[str, Any] = {"token_ids": list(chunk.token_ids)}
                    if chunk.text:
                        chunk_dict["text"] = chunk.text
                    if chunk.finish_reason is not None:
                        chunk_dict["finish_reason"] = chunk.finish_reason.value
                    if chunk.usage is not None:
                        chunk_dict["usage"] = {one.name: getattr(chunk.usage, one.name) for one in fields(chunk.usage)}
                    if len(chunk_dict) > 1 or chunk.token_ids:
                        yield chunk_dict

        return dicts()

    async def best_worker(
        self, token_ids: Tokens, router_config_override: Options | None = None, request_id: str | None = None
    ) -> tuple[WorkerId, int, int]:
        """Choose the worker of a prompt; with a request id it is booked there.

        Returns:
            Worker id, data-parallel rank, leading blocks of the prompt that it has.
        """
        override = _options(RouterOverride, "router_config_override", router_config_override)
        answer: Any = await self._router.route(
            token_ids,
            model=self._model,
            override=override,
            request_id=request_id,
        )
        decision = answer.decision if isinstance(answer, Booking) else answer
        return _number_or_text(decision.worker.worker_id), decision.worker.dp_rank, decision.overlap_blocks

    async def best_worker_id(
        self, token_ids: Tokens, router_config_override: Options | None = None, request_id: str | None = None
    ) -> tuple[WorkerId, int]:
        """As `best_worker`, without the rank."""
        worker_id, _, overlap_blocks = await self.best_worker(token_ids, router_config_override, request_id)
        return worker_id, overlap_blocks

    async def get_potential_loads(self, token_ids: Tokens) -> list[dict[str, Any]]:
        """Return the load of each worker rank with a prompt added."""
        return [
            {
                "worker_id": _number_or_text(load.worker.worker_id),
                "dp_rank": load.worker.dp_rank,
                "potential_prefill_tokens": load.potential_prefill_tokens,
                "potential_decode_blocks": load.potential_decode_blocks,
            }
            for load in await self._router.potential_loads(token_ids, model=self._model)
        ]

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Report the first token of a request that `best_worker` booked."""
        await self._router.mark_prefill_complete(request_id, model=self._model)

    async def free(self, request_id: str) -> None:
        """End a request that `best_worker` booked."""
        await self._router.free(request_id, model=self._model)

    async def dump_events(self) -> str:
        """Return the index as events that make it, as JSON. Blocks below one that is missing are left out."""
        events: list[dict[str, Any]] = []
        hashes: list[int | None] = []
        async with aclosing(self._router.dump(model=self._model)) as batches:
            async for batch in batches:
                for chunk in (event.state for event in batch.events if event.HasField("state")):
                    if chunk.index == 0:
                        hashes = []
                    for stored in _stored(chunk, hashes):
                        worker_id = _number_or_text(batch.worker_id)
                        event = {"event_id": len(events), "data": {"stored": stored}, "dp_rank": batch.dp_rank}
                        events.append({"worker_id": worker_id, "event": event})
        return json.dumps(events)


def _stored(chunk: events_pb2.StateChunk, hashes: list[int | None]) -> Iterator[dict[str, Any]]:
    """Yield the runs of a chunk as stored blocks.

    Args:
        chunk: Chunk of a dump.
        hashes: Engine hash of each position before, None where no prefix leads there; grows.
    """
    for run in chunk.runs:
        rooted = not run.HasField("parent_position")
        parent = None if rooted else hashes[run.parent_position]
        reachable, first, blocks = rooted or parent is not None, parent, []
        for number, (local, engine) in enumerate(zip(run.local_hashes, run.engine_hashes, strict=True)):
            reachable = reachable and (not run.copies or run.copies[number] > 0)
            hashes.append(engine if reachable else None)
            if reachable:
                blocks.append({"block_hash": engine, "tokens_hash": local})
        if blocks:
            yield {"parent_hash": first, "blocks": blocks}


def _options(kind: type[O], name: str, given: Options | None) -> O | None:
    if given is None:
        return None
    known = {one.name for one in fields(kind)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidArgument(f"knows no {', '.join(unknown)}; it has {', '.join(sorted(known))}", field=name)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    make: Any = kind
    made: O = make(**{key: value for key, value in values.items() if value is not None})
    return made


def _number_or_text(worker_id: str) -> WorkerId:
    """As the worker was named: Dynamo's ids are numbers."""
    return (
        int(worker_id)
        if worker_id.isascii() and worker_id.isdecimal() and str(int(worker_id)) == worker_id
        else worker_id
    )
