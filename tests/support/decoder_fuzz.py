"""Damaged bytes for every decoder: each reads them or refuses them by a documented error, and backends agree.

A *decoder* here is where bytes begin and what is done with them; its check raises where something is wrong.
Native backends take part where the extension is built.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from google.protobuf.message import DecodeError

from kvscout.v1 import events_pb2, indexer_pb2
from kvscout_blocks.bytes.codec import Dumped, DumpReader
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, EventBatch, Removed, Stored
from kvscout_blocks.bytes.frames import MalformedBatch, parse_message, parse_replay_reply
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.native import NativeIndex, NativeQueries
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common import hashing, hashing_reference
from kvscout_common.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.hashing import native_available
from kvscout_common.http.event_relay import EventRelay
from kvscout_common.http.http import Form, StreamReport
from kvscout_common.registry.workers_file import load_workers
from kvscout_gateway.values.dialects import OPENAI, SGLANG
from kvscout_lab.workloads.trace import read_trace
from support.fuzz_seeds import POOL, STREAMS, WORKER, dumps, golden_payloads, requests, unusual_payloads

if native_available():
    import kvscout_native
    from kvscout_common.http.native_http_client import native_dialect

BLOCK_SIZE = POOL.block_size

WORKERS_FILE = b"""workers:
  - worker_id: vllm-0
    model: llama-3-8b
    block_size: 16
    role: prefill
    labels: {zone: a, gpu: "8"}
    lora_adapters: {sql: 1}
    event_endpoints:
      - {endpoint: "tcp://10.0.0.5:5557", replay_endpoint: "tcp://10.0.0.5:5657", dp_rank: 0}
"""
WORKERS_FILES = [
    WORKERS_FILE,
    b"workers: [{worker_id: a, model: m, block_size: 16, labels: [1], lora_adapters: 3, role: [prefill]}]",
    b"workers: [{worker_id: 2024-01-01, model: {a: b}, 16: [*x], copies: null, eagle: 1e400}]",
    b"{workers: &a [*a]}",
]
TRACES = [
    b'{"timestamp": 27482, "input_length": 1000, "output_length": 52, "hash_ids": [46, 47]}\n' * 2,
    b'{"session_id": "s", "timestamp": 0.0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}\n'
    b'{"session_id": "s", "delay": 12.5, "input_length": 9, "output_length": 5, "hash_ids": [200069]}\n',
]


class Decoder(NamedTuple):
    """One place where bytes come in."""

    seeds: Sequence[bytes]
    check: Callable[[bytes], None]


def mutate(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, damaged in a few places."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 4, 9, 40])
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 1] = rng.randbytes(1)
        elif kind == 2:
            data[at : at + length] = b""
        elif kind == 3:
            data[at:at] = rng.randbytes(length)
        elif kind == 4:
            data[at:at] = data[at : at + length] * rng.choice([1, 2, 50])
        elif kind == 5:
            # Lengths, counts and signs at their ends.
            data[at : at + length] = rng.choice([b"\x00", b"\x7f", b"\x80", b"\xff"]) * length
        elif kind == 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at : at + length] = other[start : start + rng.choice([length, len(other)])]
        else:
            del data[at:]
    return bytes(data)


def fuzz(decoder: Decoder, rng: random.Random, cases: int) -> None:
    """Runs a decoder's check over its seeds and so many damaged ones.

    Raises:
        AssertionError: With the bytes at fault.
    """
    for payload in (*decoder.seeds, *(mutate(rng, decoder.seeds) for _ in range(cases))):
        try:
            decoder.check(payload)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nbytes: {payload.hex()}") from error


# Engine payloads

Plain = tuple[list[Any], str, int | None, list[str]] | str


def plain(batch: EventBatch) -> Plain:
    """A batch in the form in which the native decoder shows it."""
    events: list[Any] = []
    for event in batch.events:
        if isinstance(event, Cleared):
            events.append(("cleared",))
        elif isinstance(event, Removed):
            events.append(("removed", list(event.engine_hashes), int(event.tier), event.group))
        else:
            assert isinstance(event, Stored)
            fields = asdict(event)
            # What only publishers say.
            assert not fields.pop("local_hashes")
            assert not fields.pop("foreign")
            fields["mm_items"] = [list(items) for items in event.mm_items]
            for name in ("engine_hashes", "tokens"):
                fields[name] = list(fields[name])
            events.append(("stored", fields | {"tier": int(event.tier)}))
    return events, repr(batch.timestamp), batch.dp_rank, [fault.kind.value for fault in batch.faults]


def by_reference(payload: bytes) -> Plain:
    """What the reference reads from a payload."""
    try:
        return plain(decode_batch(payload))
    except MalformedBatch:
        return "malformed"


def by_native(payload: bytes) -> Plain:
    """What the native backend reads from a payload."""
    try:
        events, timestamp, rank, faults = kvscout_native.decode_batch(payload)
    except MalformedBatch:
        return "malformed"
    return events, repr(timestamp), rank, [kind for kind, _ in faults]


def check_payload(payload: bytes) -> None:
    """Both decoders read the same, and both indexes make the same of it."""
    expected = by_reference(payload)
    if not native_available():
        return
    assert by_native(payload) == expected
    found = []
    for index in (ReferenceIndex(BLOCK_SIZE), NativeIndex(BLOCK_SIZE)):
        index.add_worker(WORKER, WorkerOptions())
        try:
            index.apply_payload(WORKER, payload, epoch=1, event_id=2)
        except MalformedBatch:
            assert expected == "malformed"
        index.check_invariants()
        found.append((index.dump(WORKER), index.worker_stats(WORKER)))
    assert found[0] == found[1]


def check_frames(data: bytes) -> None:
    """Frames of any number and length are a message or refused."""
    frames = data.split(b"\0")
    for parse in (parse_message, parse_replay_reply):
        try:
            parse(frames)
        except MalformedBatch:
            continue


# State


def read_dump(message: bytes) -> Dumped | None:
    """What the reference reads; None if it refuses, or waits for more."""
    try:
        return DumpReader().feed(events_pb2.KvEventBatch.FromString(message))
    except (DecodeError, InvalidArgument, FailedPrecondition):
        return None


def loaded(index: BlockIndex, load: Callable[[], object]) -> WorkerDump | None:
    """The state after loading; None if it was refused, which must change nothing."""
    index.add_worker(WORKER, WorkerOptions())
    index.apply(WORKER, EventBatch((Stored((77,), None, local_hashes=(7,)),)))
    before = index.dump(WORKER)
    try:
        load()
    except (InvalidArgument, FailedPrecondition, NotFound):
        assert index.dump(WORKER) == before, "what is refused changes nothing"
        return None
    index.check_invariants()
    return index.dump(WORKER)


UNKNOWN_GROUP = bytes.fromhex("73 81652a0764656661756c 74")
"""Field 14, with one field in it."""


def check_state(message: bytes) -> None:
    """Both readers refuse the same messages and load the others to the same state."""
    dumped = read_dump(message)
    expected = None
    if dumped is not None:
        reference = ReferenceIndex(BLOCK_SIZE)
        expected = loaded(reference, lambda: reference.load(dumped.dump))
    if not native_available():
        return
    native = NativeIndex(BLOCK_SIZE)
    found = loaded(native, lambda: native.load_messages([message]))
    if found is None and expected is not None:
        # No writer sends a message within a message in chunks; only protobuf itself puts them together.
        whole = events_pb2.KvEventBatch.FromString(message).SerializeToString()
        found = loaded(native, lambda: native.load_messages([whole]))
    assert found == expected, f"native {found}, reference {expected}"


# Requests


class Queries:
    """The native query path beside protobuf and the reference."""

    def __init__(self) -> None:
        self.reference = ReferenceIndex(BLOCK_SIZE)
        self.native = NativeIndex(BLOCK_SIZE)
        self.queries = NativeQueries()
        self.queries.set_pool(POOL, self.native)
        tokens = tuple(range(20))
        stored = Stored((1, 2, 3, 4, 5), None, tokens, BLOCK_SIZE)
        for index in (self.reference, self.native):
            index.add_worker(WORKER, WorkerOptions())
            index.apply(WORKER, EventBatch((stored,)))

    def check(self, request: bytes) -> None:
        """What is answered is what the reference finds; the rest is left to the plain path."""
        stream = self.queries.answer_stream(request, now=0, caller_tenant="*")
        if stream is not None:
            assert indexer_pb2.StreamFindMatchesRequest.FromString(request) is not None
            indexer_pb2.StreamFindMatchesResponse.FromString(stream)
        answer = self.queries.answer(request, now=0, caller_tenant="*")
        if answer is None:
            return
        asked = indexer_pb2.FindMatchesRequest.FromString(request)
        hashes = list(asked.block_hashes) or hashing_reference.block_hashes(
            list(asked.token_ids), BLOCK_SIZE, lora_name=asked.lora_name, cache_salt=asked.cache_salt
        )
        found = indexer_pb2.FindMatchesResponse.FromString(answer)
        expected = self.reference.find_matches(hashes, now=0, early_exit=asked.early_exit)
        device = tuple(found.overlaps.device_blocks)
        if asked.early_exit:
            # Each backend may stop where it likes: what it says then is a lower bound.
            assert found.lower_bound
            assert len(device) == len(expected.device)
            assert all(low <= exact for low, exact in zip(device, expected.device, strict=True))
        else:
            assert device == expected.device
        assert found.num_blocks == len(hashes)


# Hashing


def check_hashing(data: bytes) -> None:
    """Both backends hash any input alike, and refuse the same."""
    rng = random.Random(data)
    block_size = rng.choice([0, 1, 3, 16, 2**31])
    names = [data[at : at + 20].decode(errors="replace") for at in (0, 20)]
    items = [(names[0], rng.choice([-1, 0, 5, 2**62]), rng.choice([0, 1, 9, 2**62])) for _ in range(rng.randrange(3))]
    arguments: dict[str, Any] = {"lora_name": names[0], "cache_salt": names[1], "eagle": rng.random() < 0.5}
    found: list[object] = []
    for backend in (hashing_reference, kvscout_native) if native_available() else (hashing_reference,):
        spans: Any = [hashing.MmItem(*item) for item in items]
        try:
            found.append(backend.block_hashes(data, block_size, mm_items=spans, **arguments))
        except InvalidArgument:
            # Which of several wrong arguments is named may differ.
            found.append("refused")
        if len(data) % 8 == 0:
            found[-1] = found[-1], backend.sequence_hashes(struct.unpack(f"<{len(data) // 8}Q", data))
    assert all(other == found[0] for other in found)


# Files


def check_file(read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """A file of any content is read, or refused by a `ConfigError`."""

    def check(content: bytes) -> None:
        with tempfile.NamedTemporaryFile(prefix="kvscout-fuzz-") as file:
            file.write(content)
            file.flush()
            try:
                read(Path(file.name))
            except ConfigError:
                return

    return check


# Events of engines


def passed_on(relay: Any, chunks: Sequence[bytes]) -> tuple[Any, ...]:
    """What a relay makes of a stream that comes so."""
    passed = [relay.feed(chunk, 1.0) for chunk in chunks if not relay.over]
    passed.append(relay.feed(b"", 2.0, ends=True) if isinstance(relay, kvscout_native.EventRelay) else relay.end(2.0))
    report = relay.report if isinstance(relay.report, StreamReport) else StreamReport(**relay.report)
    told = asdict(report)
    told["error"] = told["error"] and repr(json.loads(told["error"]))
    return passed, relay.over, bool(relay.failure), told


def check_events(data: bytes) -> None:
    """Both relays pass the same on, and notice the same, in every form and dialect."""
    rng = random.Random(data)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 5])))
    chunks = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]
    max_tokens = rng.choice([None, None, 0, 1, 3])
    for form, dialect in itertools.product(Form, (OPENAI, SGLANG)):
        reference = EventRelay(form, dialect, max_tokens, StreamReport())
        expected = passed_on(reference, chunks) if native_available() else reference.feed(data, 1.0)
        if native_available():
            native = kvscout_native.EventRelay(form.value, native_dialect(dialect), max_tokens)
            found = passed_on(native, chunks)
            assert found == expected, f"{form} {dialect}: native {found!r}, reference {expected!r}"


def decoders() -> dict[str, Decoder]:
    """All decoders by name; those of native code alone are left out where the extension is not built."""
    payloads = list(golden_payloads().values())
    frames = [b"\0".join([b"kv-events", struct.pack(">Q", 2**60 + 1), payloads[0].replace(b"\0", b"")])]
    numbers = [random.Random(seed).randbytes(8 * seed) for seed in range(12)]
    found = {
        "payload": Decoder([*payloads, *unusual_payloads(), msgpack.packb([0.0, []])], check_payload),
        "frames": Decoder(frames, check_frames),
        # With an unknown group, too, as only proto2 has them.
        "state": Decoder(
            [m for messages in dumps() for message in messages for m in (message, UNKNOWN_GROUP + message)], check_state
        ),
        "hashing": Decoder(numbers, check_hashing),
        "workers file": Decoder(WORKERS_FILES, check_file(load_workers)),
        "events of engines": Decoder(STREAMS, check_events),
        "trace": Decoder(TRACES, check_file(lambda path: list(read_trace(path)))),
    }
    if native_available():
        found["requests"] = Decoder(requests(), Queries().check)
    return found
