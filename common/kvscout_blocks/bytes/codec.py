"""Events and dumps ↔ `KvEventBatch` messages, in plain Python.

A dump becomes a sequence of messages of at most `MAX_CHUNK_BYTES`; equal dumps become equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvscout.v1 import events_pb2, types_pb2
from kvscout_blocks.bytes.acceptance import Ignored, judge_content, local_hashes_of
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, WindowGroup, WorkerDump
from kvscout_blocks.bytes.events import (
    FAULT_LIMIT,
    Cleared,
    Event,
    EventBatch,
    Fault,
    FaultKind,
    Removed,
    Stored,
    Tier,
)
from kvscout_blocks.bytes.messages import MAX_CHUNK_BYTES, VERSION, Published, check_version, parse_batch, source_of
from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import PoolKey, WorkerRank

_BLOCK_BYTES = 8 + 8 + 5
"""Two hashes and a count of copies."""
_RUN_BYTES = 48
"""Tags, lengths, position, tier and group of a run."""
_ENTRY_BYTES = 64
"""A further copy, or an orphan with one copy."""
_HEADER_BYTES = 4096
"""Names, cursor and groups."""


class Dumped(NamedTuple):
    """A dump and which index it belongs to."""

    pool: PoolKey
    dump: WorkerDump
    history_incomplete: bool


def encode_dump(
    pool: PoolKey,
    dump: WorkerDump,
    *,
    history_incomplete: bool = False,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Iterator[events_pb2.KvEventBatch]:
    """Encode a dump as messages, in order; at least one.

    Args:
        pool: The index it is from.
        dump: One consistent cut.
        history_incomplete: Whether events before the cut may be missing.
        max_chunk_bytes: Largest message.
    """
    chunks = _chunks(dump, max_chunk_bytes - _HEADER_BYTES)
    current = next(chunks)
    index = 0
    windows = {group.number: group for group in dump.windows}
    while True:
        following = next(chunks, None)
        current.index = index
        current.last = following is None
        current.history_incomplete = history_incomplete or dump.incomplete
        if index == 0:
            current.incompatible = dump.incompatible
            current.groups.extend(
                events_pb2.CacheGroup(
                    group=group,
                    attention_kind=events_pb2.ATTENTION_KIND_FULL if full else events_pb2.ATTENTION_KIND_OTHER,
                    sliding_window=windows[group].window if group in windows else 0,
                    block_size=windows[group].block_size if group in windows else 0,
                )
                for group, full in dump.groups
            )
        yield events_pb2.KvEventBatch(
            version=VERSION,
            worker_id=dump.worker.worker_id,
            dp_rank=dump.worker.dp_rank,
            model=pool.model,
            tenant=pool.tenant,
            block_size=pool.block_size,
            eagle=pool.eagle,
            epoch=dump.epoch,
            event_id=dump.last_event_id,
            events=[events_pb2.KvEvent(state=current)],
        )
        if following is None:
            return
        current, index = following, index + 1


def _chunks(dump: WorkerDump, budget: int) -> Iterator[events_pb2.StateChunk]:
    chunk, left = events_pb2.StateChunk(), budget
    run: events_pb2.StateRun | None = None
    place = (-1, -1)
    for position, block in enumerate(dump.blocks):
        first = block.copies[0] if block.copies else Copies(0, Tier.DEVICE, 0)
        needed = _BLOCK_BYTES + _RUN_BYTES + _ENTRY_BYTES * max(0, len(block.copies) - 1)
        if needed > left:
            yield chunk
            chunk, left, run = events_pb2.StateChunk(), budget, None
        if run is None or block.parent != position - 1 or place != (first.group, first.tier):
            run = chunk.runs.add(tier=_tier_to_proto(first.tier), group=first.group)
            if block.parent >= 0:
                run.parent_position = block.parent
            place = (first.group, first.tier)
            left -= _RUN_BYTES
        run.local_hashes.append(block.local_hash)
        run.engine_hashes.append(block.engine_hash or 0)
        if first.number != 1 and not run.copies:
            run.copies.extend([1] * (len(run.local_hashes) - 1))
        if run.copies or first.number != 1:
            run.copies.append(first.number)
        left -= _BLOCK_BYTES
        for copies in block.copies[1:]:
            chunk.further_copies.append(_copies_to_proto(copies, position))
            left -= _ENTRY_BYTES
    for orphan in dump.orphans:
        needed = _ENTRY_BYTES * len(orphan.copies)
        if needed > left:
            yield chunk
            chunk, left = events_pb2.StateChunk(), budget
        chunk.orphans.add(
            engine_hash=orphan.engine_hash,
            parent_engine_hash=orphan.parent_engine_hash,
            local_hash=orphan.local_hash,
            copies=[_copies_to_proto(copies) for copies in orphan.copies],
        )
        left -= needed
    for window_block in dump.window_blocks:
        needed = _ENTRY_BYTES * len(window_block.copies)
        if needed > left:
            yield chunk
            chunk, left = events_pb2.StateChunk(), budget
        chunk.window_blocks.add(
            engine_hash=window_block.engine_hash,
            sequence_hash=window_block.sequence_hash,
            copies=[_copies_to_proto(copies) for copies in window_block.copies],
        )
        left -= needed
    yield chunk


def _tier_to_proto(tier: Tier) -> types_pb2.Tier.ValueType:
    # Unset is the device: the common case costs no byte.
    return types_pb2.TIER_UNSPECIFIED if tier is Tier.DEVICE else types_pb2.Tier.Value(f"TIER_{tier.name}")


def _tier_from_proto(number: int) -> Tier:
    if not 0 <= number <= types_pb2.TIER_EXTERNAL:
        raise InvalidArgument(f"unknown tier {number}", field="tier")
    return Tier(max(0, number - 1))


def _copies_to_proto(copies: Copies, position: int = 0) -> events_pb2.StateCopies:
    return events_pb2.StateCopies(
        position=position, tier=_tier_to_proto(copies.tier), group=copies.group, copies=copies.number
    )


def decode_events(message: events_pb2.KvEventBatch) -> Published:
    """Read a message of events; one that cannot be read costs itself, as in the engines' own batches.

    Raises:
        FailedPrecondition: If its version cannot be read.
        InvalidArgument: If it has a state chunk, or a reset that does not come first.
    """
    check_version(message)
    events: list[Event] = []
    faults: list[Fault] = []
    reset = False
    for place, event in enumerate(message.events):
        if len(faults) > FAULT_LIMIT:
            raise InvalidArgument(f"more than {FAULT_LIMIT} of them cannot be read", field="events")
        kind = event.WhichOneof("kind")
        try:
            if kind == "stored":
                events.append(_stored_from_proto(event.stored, message.block_size))
            elif kind == "removed":
                hashes = tuple(event.removed.engine_hashes)
                events.append(Removed(hashes, _tier_from_proto(event.removed.tier), event.removed.group))
            elif kind == "cleared":
                events.append(Cleared())
            elif kind is None:
                faults.append(Fault(FaultKind.UNKNOWN_TAG, "no kind that is known"))
        except InvalidArgument as error:
            faults.append(Fault(FaultKind.BAD_EVENT, str(error)))
        if kind == "state":
            raise InvalidArgument("state chunks come by themselves", field="events")
        if kind == "reset":
            if place:
                raise InvalidArgument("a reset comes first", field="events")
            reset = True
    return Published(
        *source_of(message),
        message.epoch,
        message.event_id if message.HasField("event_id") else None,
        reset,
        EventBatch(tuple(events), message.made_unix_seconds, message.dp_rank, tuple(faults)),
    )


def _stored_from_proto(message: events_pb2.BlocksStored, block_size: int) -> Stored:
    if message.local_hashes and len(message.local_hashes) != len(message.engine_hashes):
        raise InvalidArgument("not one a block", field="local_hashes")
    full = message.attention_kind == events_pb2.ATTENTION_KIND_FULL
    if message.attention_kind not in (events_pb2.ATTENTION_KIND_FULL, events_pb2.ATTENTION_KIND_OTHER):
        full = message.group == 0
    window = 0 if full else message.sliding_window
    own_size = message.block_size or block_size
    foreign = not window and own_size != block_size
    return Stored(
        engine_hashes=tuple(message.engine_hashes),
        parent=message.parent_engine_hash if message.HasField("parent_engine_hash") else None,
        # One token stands for the content that is not there: a tier change has none.
        tokens=(0,) if foreign else (),
        block_size=own_size,
        tier=_tier_from_proto(message.tier),
        group=message.group,
        full_attention=full,
        window=window,
        local_hashes=() if foreign else tuple(message.local_hashes),
        foreign=foreign,
    )


def encode_events(
    pool: PoolKey,
    adapters: Mapping[int, str],
    worker: WorkerRank,
    batch: EventBatch,
    *,
    epoch: int,
    event_id: int | None,
) -> events_pb2.KvEventBatch:
    """Encode a batch as a message, with local hashes in place of tokens.

    A reader's index does with it what it would have done with the engine's own bytes: what cannot be indexed is sent
    without its hashes, as it still shows the kind of its group; full blocks of another size are known by that size.

    Args:
        pool: The index it belongs to.
        adapters: LoRA number → adapter name, as registered.
        worker: The source.
        batch: Events as the engine sent them; what could not be read is left out.
        epoch: Incarnation of the engine.
        event_id: The engine's number of the batch.
    """
    return events_pb2.KvEventBatch(
        version=VERSION,
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        model=pool.model,
        tenant=pool.tenant,
        block_size=pool.block_size,
        eagle=pool.eagle,
        epoch=epoch,
        event_id=event_id,
        made_unix_seconds=batch.timestamp,
        events=[_event_to_proto(event, pool, adapters) for event in batch.events],
    )


def _event_to_proto(event: Event, pool: PoolKey, adapters: Mapping[int, str]) -> events_pb2.KvEvent:
    if isinstance(event, Cleared):
        return events_pb2.KvEvent(cleared=events_pb2.CacheCleared())
    if isinstance(event, Stored):
        return events_pb2.KvEvent(stored=_stored_to_proto(event, pool, adapters))
    return events_pb2.KvEvent(
        removed=events_pb2.BlocksRemoved(
            engine_hashes=event.engine_hashes, tier=_tier_to_proto(event.tier), group=event.group
        )
    )


def _stored_to_proto(event: Stored, pool: PoolKey, adapters: Mapping[int, str]) -> events_pb2.BlocksStored:
    message = events_pb2.BlocksStored(group=event.group)
    # Readers take group 0, and no other, for full attention where the kind is missing.
    if event.full_attention != (event.group == 0):
        message.attention_kind = (
            events_pb2.ATTENTION_KIND_FULL if event.full_attention else events_pb2.ATTENTION_KIND_OTHER
        )
    has_content = bool(event.tokens or event.local_hashes)
    # Blocks that move often come without their size: then they say nothing about their group.
    window = event.window if has_content or event.block_size else 0
    message.sliding_window = window
    verdict = judge_content(event, pool.block_size, pool.eagle, adapters) if has_content else None
    if window:
        # Its prefixes most often follow from other groups.
        has_content = has_content and verdict is None
        verdict = None
        if event.block_size != pool.block_size:
            message.block_size = event.block_size
    if verdict is None:
        message.engine_hashes.extend(event.engine_hashes)
        message.tier = _tier_to_proto(event.tier)
        if has_content:
            if event.parent is not None:
                message.parent_engine_hash = event.parent
            message.local_hashes.extend(local_hashes_of(event, pool.block_size, pool.eagle, adapters))
    elif verdict is Ignored.BLOCK_SIZE:
        message.block_size = event.block_size
    return message


@dataclass(slots=True)
class DumpReader:
    """Reader that puts the chunks of one source's dump together again."""

    _header: events_pb2.KvEventBatch | None = None
    _next_index: int = 0
    _blocks: list[DumpedBlock] = field(default_factory=list)
    _further: dict[int, list[Copies]] = field(default_factory=dict)
    _orphans: list[DumpedOrphan] = field(default_factory=list)
    _windows: list[WindowGroup] = field(default_factory=list)
    _window_blocks: list[DumpedWindowBlock] = field(default_factory=list)
    _groups: tuple[tuple[int, bool], ...] = ()
    _incompatible: str = ""

    def feed(self, batch: events_pb2.KvEventBatch) -> Dumped | None:
        """Take the next message; return the dump with the last one, else None.

        Raises:
            FailedPrecondition: If its version cannot be read.
            InvalidArgument: If it is not the next chunk of the same dump, or contradicts itself.
        """
        check_version(batch)
        if len(batch.events) != 1 or not batch.events[0].HasField("state"):
            raise InvalidArgument("is not one state chunk", field="events")
        chunk = batch.events[0].state
        if chunk.index != self._next_index:
            raise InvalidArgument(f"chunk {chunk.index} where {self._next_index} comes next", field="state.index")
        if self._header is None:
            self._header = batch
            self._incompatible = chunk.incompatible
            self._groups = tuple(
                (group.group, group.attention_kind != events_pb2.ATTENTION_KIND_OTHER) for group in chunk.groups
            )
            self._windows = [
                WindowGroup(group.group, group.sliding_window, group.block_size)
                for group in chunk.groups
                if group.sliding_window
            ]
        elif _identity(batch) != _identity(self._header):
            raise InvalidArgument("chunks of two dumps", field="state")
        self._next_index += 1
        for run in chunk.runs:
            self._read_run(run)
        for further in chunk.further_copies:
            self._further.setdefault(further.position, []).append(_copies_from_proto(further))
        for orphan in chunk.orphans:
            copies = tuple(map(_copies_from_proto, orphan.copies))
            self._orphans.append(DumpedOrphan(orphan.engine_hash, orphan.parent_engine_hash, orphan.local_hash, copies))
        for block in chunk.window_blocks:
            copies = tuple(sorted(map(_copies_from_proto, block.copies)))
            self._window_blocks.append(DumpedWindowBlock(block.engine_hash, block.sequence_hash, copies))
        return self._finish(batch, chunk.history_incomplete) if chunk.last else None

    def _read_run(self, run: events_pb2.StateRun) -> None:
        length = len(run.local_hashes)
        if len(run.engine_hashes) != length or len(run.copies) not in (0, length):
            raise InvalidArgument("columns of different lengths", field="state.runs")
        parent = run.parent_position if run.HasField("parent_position") else -1
        if parent >= len(self._blocks):
            raise InvalidArgument(f"position {parent} comes later", field="state.runs.parent_position")
        tier, group = _tier_from_proto(run.tier), run.group
        for number, (local, engine) in enumerate(zip(run.local_hashes, run.engine_hashes, strict=True)):
            copies = run.copies[number] if run.copies else 1
            held = (Copies(group, tier, copies),) if copies else ()
            self._blocks.append(DumpedBlock(engine if copies else None, parent, local, held))
            parent = len(self._blocks) - 1

    def _finish(self, header: events_pb2.KvEventBatch, history_incomplete: bool) -> Dumped:
        for position, further in self._further.items():
            if position >= len(self._blocks) or not self._blocks[position].copies:
                raise InvalidArgument(f"no block at position {position}", field="state.further_copies")
            block = self._blocks[position]
            self._blocks[position] = block._replace(copies=tuple(sorted((*block.copies, *further))))
        worker, pool = source_of(header)
        dump = WorkerDump(
            worker=worker,
            epoch=header.epoch,
            last_event_id=header.event_id if header.HasField("event_id") else None,
            groups=self._groups,
            blocks=tuple(self._blocks),
            orphans=tuple(self._orphans),
            incompatible=self._incompatible,
            windows=tuple(self._windows),
            window_blocks=tuple(self._window_blocks),
        )
        return Dumped(pool, dump, history_incomplete)


def read_dump(messages: Sequence[bytes]) -> Dumped:
    """Read the serialised messages of a dump.

    Raises:
        FailedPrecondition: If a version cannot be read.
        InvalidArgument: If they are not all messages of one dump, in order.
    """
    reader, dumped = DumpReader(), None
    for message in messages:
        if dumped is not None:
            raise InvalidArgument("a message after the last one", field="state")
        dumped = reader.feed(parse_batch(message))
    if dumped is None:
        raise InvalidArgument("the last message is missing", field="state")
    return dumped


def _identity(batch: events_pb2.KvEventBatch) -> tuple[object, ...]:
    cursor = batch.event_id if batch.HasField("event_id") else None
    return (
        batch.tenant,
        batch.model,
        batch.worker_id,
        batch.dp_rank,
        batch.block_size,
        batch.eagle,
        batch.epoch,
        cursor,
    )


def _copies_from_proto(message: events_pb2.StateCopies) -> Copies:
    if message.copies < 1:
        raise InvalidArgument("must be at least 1", field="state.copies")
    return Copies(message.group, _tier_from_proto(message.tier), message.copies)
