"""The native half of kvscout: same results as the reference backend in plain Python, faster.

Nothing but the module that pairs with a section below imports it:

* hashing: `kvscout_common.hashing`, which documents the functions; the reference is `hashing_reference`.
* token ids as JSON: `kvscout_common.http.json_scan`; the reference is `token_json_reference`.
* JSON objects: `kvscout_common.http.json_scan`; the reference is `json_scan_reference`.
* index: `kvscout_blocks.index.native`; `kvscout_blocks.index.block_index` documents what the methods do, the reference is
  `kvscout_blocks.index.reference`.
* load: `kvscout_scheduler.load.native`; the reference backends are `active_load`, `prefix_tree` beside it,
  `kvscout_scheduler.costs.cost` and `time_cost`.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvscout_blocks.bytes.dump import WorkerDump

__version__: str

# --- hashing ---------------------------------------------------------------------------------------

def block_hashes(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> list[int]:
    """Local hashes of a prompt's complete blocks; `bytes` are read in place, other forms copied once."""

def block_hashes_packed(
    token_ids: Sequence[int] | bytes | bytearray | memoryview,
    block_size: int,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    mm_items: Sequence[tuple[str, int, int]] = (),
    eagle: bool = False,
) -> bytes:
    """Return the same as little-endian u64s, without a Python integer per block."""

def sequence_hashes(local: Sequence[int] | bytes | bytearray | memoryview) -> list[int]:
    """Sequence hashes of a chain that begins at the prompt's first block."""

def keyed_sequence_hashes(local: Sequence[int] | bytes | bytearray | memoryview, stride: int, key: bytes) -> bytes:
    """SipHash-2-4 of the sequence hash of every `stride`-th block, as little-endian u64s."""

def extend_sequence(parent_sequence_hash: int | None, local: int) -> int:
    """Sequence hash of a block after its parent."""

def mm_hash(item_id: str) -> int:
    """Return the number of a multimodal item."""

def engine_hash(value: int | bytes) -> int:
    """Return an engine's block hash as u64."""

def block_seed(lora_name: str, cache_salt: str, first: bool) -> int:
    """Seed of a prompt's first block, or of every other one."""

# --- token ids as JSON -----------------------------------------------------------------------------

def write_tokens(token_ids: bytes) -> bytes:
    """Numbers with commas between them, of u32 each."""

def read_tokens(text: str, at: int) -> tuple[bytes, int] | None:
    """Return the token ids of a list that begins at a place of an ASCII text, u32 each, and the place behind it."""

# --- JSON objects ----------------------------------------------------------------------------------

def scan_object(
    data: bytes,
    *,
    max_fields: int,
    max_values: int,
    strict: bool,
    packed: str,
    text_fields: Sequence[str],
    text_keys: Sequence[str],
) -> tuple[list[tuple[str, int, int, int, int, int]], tuple[bytes | None, tuple[int, int] | None, int]]:
    """Return the fields of an object; holds no lock for long texts. See `kvscout_common.http.json_scan`.

    Raises:
        ValueError: It is no object, or beyond a bound.
    """

def load_value(data: bytes, begin: int, end: int) -> Any:
    """Return a value of a text that was scanned as Python objects; other threads run while a long one is made.

    Raises:
        ValueError: There is no value between these places.
    """

# --- index -----------------------------------------------------------------------------------------

_Name = tuple[str, int]
"""(worker_id, dp_rank)"""
_Copies = tuple[int, int, int]
"""(group, tier, number)"""
_Applied = tuple[int, int, bool, str]
_Column = tuple[int, ...]

class BlockIndex:
    """The native block index.

    ::

        query ──▶ directory (bit → worker) ──▶ trie (runs of blocks, bits and their reach)
        event ──▶ ledger (engine hashes, counts, ghosts, orphans) ──▶ one node of the trie at a time

    Any number of queries run during a write, one write at a time; a query during a write may see a mixture
    of before and after, but of no worker more than it held at one of these times. Calls of more than about
    50 µs release the GIL. Complexity is that of `kvscout_blocks.index.block_index.BlockIndex`.
    """

    def __new__(
        cls, block_size: int, eagle: bool, max_blocks: int, max_predictions: int, prune_ratio: float
    ) -> BlockIndex: ...
    def add_worker(
        self,
        worker: _Name,
        set_copies: bool,
        adapters: dict[int, str],
        total_kv_blocks: int,
        shared: tuple[str, int | None, int],
    ) -> None:
        """`worker` itself stands for it in the answers of `find_matches`; `shared`: the fields of `SharedOptions`."""

    def remove_rank(self, worker: _Name) -> bool: ...
    def reset(self, worker: _Name) -> None: ...
    def begin_demotion(self, worker: _Name, ttl_seconds: float, now: float) -> None: ...
    def go_on_demoting(self, worker: _Name) -> int | None:
        """Demotes a slice; how many blocks of it were not predicted before, None if nothing was left."""

    def apply_payload(self, worker: _Name, payload: bytes, epoch: int, event_id: int | None) -> _Applied:
        """From an engine's bytes, without a Python object a token."""

    def repeated(self, worker: _Name, block_hashes: Sequence[int] | bytes, first: int) -> int: ...
    def predict(self, worker: _Name, block_hashes: Sequence[int] | bytes, ttl_seconds: float, now: float) -> int: ...
    def find_matches(
        self, block_hashes: Sequence[int] | bytes, now: float, early_exit: bool, usable: int | None
    ) -> tuple[tuple[Any, ...], _Column, _Column, _Column, _Column, _Column]:
        """Workers, then the columns of `Overlaps`; bytes are read in place."""

    def maintain(self, now: float, budget: int) -> bool: ...
    def workers(self) -> list[_Name]: ...
    def cursor(self, worker: _Name) -> tuple[int, int | None] | None: ...
    def worker_stats(self, worker: _Name) -> dict[str, Any] | None:
        """Return the fields of `WorkerStats`; `ignored` in the order of `Ignored`."""

    def incomplete(self) -> list[_Name]: ...
    def shared_caches(self) -> list[dict[str, Any]]:
        """Return the fields of `SharedCacheStats` of each, by name."""

    def stats(self) -> dict[str, int]:
        """Return the fields of `IndexStats`."""

    def check_invariants(self) -> None: ...

class Cut:
    """`kvscout_blocks.index.block_index.Cut`; slices take the index's lock, and release the GIL. Thread-safe."""

    @staticmethod
    def begin(index: BlockIndex, worker: _Name) -> Cut | None:
        """None if the worker is not known."""

    def step(self) -> bool: ...
    def dump(
        self,
    ) -> (
        tuple[
            int,
            int | None,
            list[tuple[int, bool]],
            list[tuple[int | None, int, int, list[_Copies]]],
            list[tuple[int, int, int, list[_Copies]]],
            str,
            list[tuple[int, int, int]],
            list[tuple[int, int, list[_Copies]]],
            bool,
        ]
        | None
    ):
        """Epoch, last event id and so on: the fields of `WorkerDump` but for the worker. Once."""

    def encode(self, pool: _Pool, history_incomplete: bool, max_chunk_bytes: int, epoch: int | None = None) -> bool:
        """Make serialised `KvEventBatch` messages of the dump, once; `epoch` is written in place of its own.

        False: the worker was reset meanwhile.
        """

    def next_message(self) -> bytes | None:
        """Return the next message; None after the last one."""

class Loading:
    """`kvscout_blocks.index.block_index.Loading`; slices take the index's lock, and release the GIL. Thread-safe.

    Gives up what it has loaded with the object, unless it was put in place.
    """

    @staticmethod
    def of_dump(index: BlockIndex, dump: WorkerDump) -> Loading:
        """Read the attributes of a dump."""

    @staticmethod
    def of_messages(index: BlockIndex, messages: Sequence[bytes]) -> Loading:
        """Read the messages of a dump."""

    def step(self) -> bool: ...
    def commit(self) -> bool: ...

def decode_batch(
    payload: bytes,
) -> tuple[list[tuple[Any, ...]], float, int | None, list[tuple[str, str]]]:
    """Return what `apply_payload` reads from a payload: events, timestamp, rank, faults; for tests."""

class Batch:
    """A decoded payload that stays native until it is applied: no Python object a token or a block.

    Raises MalformedBatch as `decode_batch` does. Immutable. Payloads above 16 KiB release the GIL.
    """

    def __new__(cls, payload: bytes) -> Batch: ...
    @staticmethod
    def of_events(events: Iterable[Any], faults: int, timestamp: float, dp_rank: int | None) -> Batch:
        """Copy events of `kvscout_blocks.bytes.events`; `faults` is the number of others, which could not be read."""

    @property
    def dp_rank(self) -> int | None: ...
    @property
    def cleared(self) -> bool: ...
    @property
    def faults(self) -> list[tuple[str, str]]: ...

def apply_batch(index: BlockIndex, worker: _Name, batch: Batch, epoch: int, event_id: int | None) -> _Applied:
    """`BlockIndex.apply` for a decoded payload."""

# --- queries ---------------------------------------------------------------------------------------

class Queries:
    """`FindMatches` and `StreamFindMatches` from bytes to bytes, over the indexes of all pools.

    Answers what is usual, with the bytes that protobuf itself would make; None leaves the request to the plain
    path: errors, multimodal items, another tenant than the caller's, a pool that is not there or not unique.
    Thread-safe. Releases the GIL for requests above 256 KiB.
    """

    def __new__(cls) -> Queries: ...
    def set_pool(self, pool: _Pool, index: BlockIndex) -> None: ...
    def remove_pool(self, pool: _Pool) -> None: ...
    def set_incomplete(self, pool: _Pool, rank: _Name, incomplete: bool) -> None:
        """Say whether the history of a rank is incomplete: answers say so."""

    def find(
        self, pool: _Pool, hashes: bytes, prompt_tokens: int, top_k: int, now: float
    ) -> tuple[Overlaps, bool, list[int], tuple[int, int]] | None:
        """Return overlaps, whether workers may have more, the rows whose history is incomplete, and the `RankSet`."""

    def answer(self, request: bytes, now: float, caller_tenant: str) -> bytes | None: ...
    def answer_stream(self, message: bytes, now: float, caller_tenant: str) -> bytes | None: ...
    def answers(self) -> Answers:
        """`answer` for `Rpc.answer_method`."""

    def stream_answers(self) -> Answers:
        """`answer_stream` for `Rpc.answer_stream`."""

# --- codec -----------------------------------------------------------------------------------------

_Pool = tuple[str, str, int, bool]
"""(tenant, model, block_size, eagle)"""

def decode_events(message: bytes) -> tuple[_Name, _Pool, int, int | None, bool, Batch]:
    """Return a serialised `KvEventBatch` of events: who, of which pool, epoch, event id, whether it resets, the events."""

def encode_events(
    batch: Batch, worker: _Name, pool: _Pool, adapters: Sequence[tuple[int, str]], epoch: int, event_id: int | None
) -> bytes:
    """Return a batch of events as a serialised `KvEventBatch`, with local hashes in place of tokens."""

# --- ingest ----------------------------------------------------------------------------------------

class Bypass:
    """The usual case of one source: applies the next batch in order, if it can be read, is of the right rank and
    clears nothing. `kvscout_blocks.source.feed.Bypass` says what lending means. Thread-safe.
    """

    def __new__(cls, index: BlockIndex, worker: _Name, digests_kept: int) -> Bypass: ...
    def lend(self, last_id: int, digests: bytes, before: int | None = None) -> bool:
        """Go on behind `last_id`, with batches below `before`; None = with all."""

    def take(self) -> tuple[int, bytes, int, float | None, bool, str] | None:
        """Return the fields of `Progress`."""

    def peek(self) -> tuple[int, int, float | None] | None:
        """Return the fields of `Lent`."""

    def offer(self, event_id: int, payload: bytes) -> str:
        """ "applied", "stopped" (applied, and now to be looked at), "declined" or "closed"; for tests."""

class Intake:
    """Threads that read engines' sockets by ZMTP 3 without security, and offer what comes to their bypasses, without
    the GIL. Each source is one thread's, and each thread has about as many.

    What a bypass declines, and all of its source after it, waits for `take`: at most 256 messages or 8 MiB a source,
    then its socket is left unread; beyond 256 MiB of all sources, so is every one of which something waits. After
    sockets were read empty a thread pauses for a millisecond, so that what
    comes meanwhile shares the costs.
    """

    def __new__(cls, threads: int) -> Intake:
        """Start them, one at least."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has something."""

    def add(self, bypass: Bypass, endpoint: str, *, bind: bool, topic: str, longest_frame: int) -> int | None:
        """Read a source from now on; return its number, or None: the address has a name that has to be looked up.

        Raises:
            OSError: It cannot be bound, or the system watches no more.
        """

    def replay(
        self,
        bypass: Bypass,
        endpoint: str,
        first_id: int,
        *,
        longest_frame: int,
        first_within: float,
        next_within: float,
    ) -> int | None:
        """Request all batches from `first_id` on; return a number as `add` does. Replies are offered to the bypass.

        Args:
            bypass: One of its own.
            endpoint: The replay socket.
            first_id: First batch wanted.
            longest_frame: In bytes.
            first_within: Seconds until the first reply.
            next_within: Seconds from one reply to the next.
        """

    def pause(self, source: int, paused: bool) -> None:
        """Leave a source unread from where it is connected, or read it again. A replay pauses by itself, behind a reply that
        was declined.
        """

    def hand_over(self, source: int, bytes: int) -> None:
        """Note that a notice of a replay was dealt with, whose payload has so many bytes."""

    def remove(self, source: int) -> None:
        """Close a source's sockets: nothing of it is applied or reported any more."""

    def take(self, most: int) -> list[tuple[int, str, Any]]:
        """Return the oldest notices, (source, kind, detail):

        "message", (event id, payload) · "malformed", lengths of the frames · "connected", None: a connection was made, and
        what came over the one before was reported or applied · "unconnected", None: there is none, another one is made when
        that is possible · "refused", reason: it was ended because of what came; where we connect no other one is made ·
        "stopped", None: see `Bypass.offer` · of a replay "reply", (event id, payload), "reply stopped", None, and last
        "reply end", None, or "reply broken", reason, each of which waits until `hand_over` · "failed", reason: a thread has ended; source means nothing.
        """

    def close(self) -> None:
        """End the threads and close every socket; blocks until that is done."""

# --- load ------------------------------------------------------------------------------------------

class Allocation:
    """Allocation of one request; opaque but for its slot, valid until removed."""

    @property
    def slot(self) -> int: ...

class Overlaps:
    """Overlaps of one prompt; raises `ValueError` if the columns contradict each other."""

    def __new__(
        cls,
        worker_ids: Sequence[str],
        dp_ranks: Sequence[int],
        tiers: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
        predicted: Sequence[int],
        others: tuple[int, int, int, int, int] | None,
    ) -> Overlaps: ...
    @property
    def columns(self) -> tuple[list[str], list[int], list[int], list[int], list[int], list[int], list[int]]:
        """Worker ids, ranks, device, host, disk, external and predicted blocks, made anew; empty as in the message."""

    @property
    def others(self) -> tuple[int, int, int, int, int] | None:
        """Device, host, disk, external and predicted blocks of each worker rank without a row; None = 0."""

    @property
    def longest_on_device(self) -> int: ...
    @property
    def has_predictions(self) -> bool: ...
    def within(self, blocks: int) -> bool:
        """Return whether no row says more than a prompt has."""

class Costs:
    """Cost of each candidate."""

    def __len__(self) -> int: ...
    def at(self, index: int) -> float: ...
    @property
    def values(self) -> list[float]:
        """Made anew."""

    def draw(self, temperature: float, uniform: float) -> int:
        """Return the candidate that a number in 0 .. 1 draws at a temperature above 0."""

    def least(self) -> list[int]:
        """Indexes of the least cost, ascending."""

TIME_ROW_FIELDS: tuple[str, ...]
"""Fields of `kvscout_scheduler.costs.time_cost.TimeRow`, in the order of a row of the table."""

class Scores:
    """The columns of one decision, one entry a candidate; a getter makes a new list, where it depends on the load by that
    of now."""

    def overlap(self, index: int) -> tuple[int, float]:
        """Device blocks and effective blocks of one candidate."""

    def slot(self, index: int) -> int:
        """Return where one candidate is."""

    @property
    def device_blocks(self) -> list[int]: ...
    @property
    def effective_blocks(self) -> list[float]: ...
    @property
    def cached_tokens(self) -> list[float]: ...
    @property
    def prefill_tokens(self) -> list[float]: ...
    @property
    def decode_blocks(self) -> list[int]: ...
    def costs(self) -> Costs: ...
    def seconds(self, times: _Times) -> Costs:
        """Return the costs in seconds."""

    def response_times(
        self, times: _Times, prefill: float, decode: float, context_token: float
    ) -> list[tuple[float, float]]:
        """Return seconds to the first token and between tokens; see `kvscout_scheduler.costs.targets`."""

class _Times(Protocol):
    """`kvscout_scheduler.costs.time_cost.TimeCostInputs`, which is read by name."""

    @property
    def table(self) -> array[float]: ...
    @property
    def row_of(self) -> array[int]: ...
    @property
    def now(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def own_seconds(self) -> float: ...
    @property
    def empty(self) -> float: ...
    @property
    def popular_tokens(self) -> float: ...
    @property
    def popular_discount(self) -> float: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def stage_seconds(self) -> tuple[float, float, float, float, float]: ...

_ScoreInputs = tuple[tuple[int, bool], bytes, int, float, tuple[float, float], bool, float]
"""Block format, packed hashes, prompt tokens, weight of overlaps, weights of host and disk, whether the prefill is charged,
scale."""

class ActiveLoad:
    """Load columns of one pool; a getter makes a new list."""

    def __new__(cls, track_blocks: bool) -> ActiveLoad: ...
    @property
    def requests(self) -> list[int]: ...
    @property
    def prefill_tokens(self) -> list[int]: ...
    @property
    def decode_blocks(self) -> list[int]: ...
    def at(self, slot: int) -> tuple[int, int, int]:
        """Requests, prefill tokens and decode blocks of one slot."""

    def ensure_slot(self, slot: int) -> None: ...
    def limit(self, slot: int, limits: tuple[int, int, int]) -> None: ...
    def busy(self) -> bytes:
        """Return a set of slots, a bit each, the lowest first; as `full` and the `slots` of `score`."""

    def full(self) -> bytes: ...
    def arrange(self, ranks: Sequence[tuple[str, int, int]]) -> None:
        """(worker id, rank, slot) of the slots in use, by rank."""

    def add(
        self, slot: int, pool_key: tuple[int, bool], hashes: bytes, *, private_blocks: int = 0, prefill_tokens: int = 0
    ) -> Allocation: ...
    def complete_prefill(self, allocation: Allocation) -> None: ...
    def add_private(self, allocation: Allocation, blocks: int) -> None: ...
    def remove(self, allocation: Allocation) -> None: ...
    def shared(self, pool_key: tuple[int, bool], hashes: bytes) -> dict[int, int]: ...
    def score(self, inputs: _ScoreInputs, overlaps: Overlaps | None, slots: bytes | None) -> Scores: ...
    def cheapest(
        self,
        inputs: _ScoreInputs,
        overlaps: Overlaps | None,
        slots: bytes | None,
        times: _Times | None,
        home: int,
        draw: Callable[[int], int],
    ) -> tuple[int, int, float, float, float]:
        """Return the slot of least cost, its leading blocks on the device, its effective blocks, the cost, and what the
        cheapest of those with most blocks on the device would cost more.

        Args:
            inputs, overlaps, slots: As of `score`.
            times: Costs are in seconds, by these; None = in blocks.
            home: The slot that is taken where several cost as little.
            draw: Called with their number where that is none of them; returns which, by rank.
        """

    def check_invariants(self, allocations: Sequence[Allocation]) -> None:
        """Raises `AssertionError`."""

_RequestName = tuple[str, str, int, str, int]
"""Model, tenant ("" = that of the stream), role, request id, attempt id."""
_Output = tuple[int, int, str, bool]
"""expected_output_tokens, max_output_tokens, output_class, estimate_prefill_complete"""
_Session = tuple[int, bool, bool, int]
"""session, no_lineage, overlaps_unknown, parent_session"""
_Select = tuple[int, int, _RequestName, bytes, int, int, Overlaps | None, int, int, bool, str, tuple[_Output, _Session]]
"""2 (select) or 3 (select_and_reserve), operation id, name, packed hashes, isl_tokens, block_size, overlaps, priority,
lease_seconds, prefill_elsewhere, traceparent, (output, session)"""
_Decision = tuple[str, int, str, int, float, float, int, int, int, float]
"""Worker id, rank, HTTP endpoint, overlap blocks, effective overlap blocks, cost, uncached tokens, block size, session."""

def lifecycle_operations(message: bytes, caller_tenant: str) -> list[tuple[Any, ...]] | None:
    """Return the operations of a `LifecycleRequest`; None if the plain path must read it.

    Args:
        message: The serialised message.
        caller_tenant: What the caller is bound to; "*" = all.

    Returns:
        Tuples that begin with the number of the operation's field: 2 and 3 are a `_Select`; 5 (prefill_complete) and 7
        (free) have the operation's id, a `_RequestName` and the microseconds since then, 7 also the tokens that the
        request generated; 0 has the bytes of an operation that is left to the plain path.
    """

def select_request(message: bytes) -> _Select | None:
    """Return a `SelectRequest` without rare fields; None if the plain path must read it."""

def select_response(decision: _Decision) -> bytes:
    """Return a serialised `SelectResponse`."""

def select_result(id: int, decision: _Decision) -> bytes:
    """Return a serialised `LifecycleResponse` of one result; several in a row are one message. So is the next one."""

def number_result(id: int, kind: int, number: int) -> bytes:
    """Of an operation whose answer is one number; `kind` is the number of its field in a result."""

RPC_EVENTS: dict[str, int]
"""Kinds of what `Rpc.poll` returns, by name; each event is a tuple that begins with its kind.

* (OPEN, call, listener, method, metadata, timeout in µs or None, message or None): a call came. `method` is its place in
  the listener's list; the message is there where a method has one request.
* (MESSAGE, call, bytes), of either side; say `consumed` when it was handled.
* (HALF_CLOSED, call): the caller sends no more.
* (RESET, call): the caller has gone; nothing more can be sent.
* (WRITABLE, call): there is room again after `send` said False.
* (HEADERS, call, metadata), (END, call, code, details, metadata, seen): of a call that was made here; END comes once,
  last. `seen`: 0 = the peer may have looked at the call; 1 = it refused it unseen; 2 = so did the whole connection, or
  the call was never sent.
* (ANSWERED, call, headers, message, code, details, trailers): HEADERS, MESSAGE and END at once.
* (HEAD, call, listener, place of the method, metadata): a call of one message came that is not all here: say `admit` or
  `finish`; OPEN follows when the message is here.
* (CONNECTED, connection), (CLOSED, connection, reason): of `connect`; CLOSED comes last, after END of its calls.
* (ACCEPT_FAILED, errno, text): connections wait; they are accepted with the next `tick` that can.
* (CROWDED, listener): there is no room for more connections; idle ones were closed, or else new ones.
"""

class ServerTls:
    """Certificates of a server."""

    def __init__(self, certificate: bytes, key: bytes, client_ca: bytes | None = None) -> None:
        """Take PEM.

        Args:
            certificate: Chain, own certificate first.
            key: Its private key.
            client_ca: Clients must have a certificate of this CA; None = they need none.

        Raises:
            ValueError: One of them is wrong.
        """

class ClientTls:
    """Certificates of a client."""

    def __init__(self, ca: bytes, certificate: bytes | None = None, key: bytes | None = None) -> None:
        """Take PEM.

        Args:
            ca: Servers must have a certificate of this CA.
            certificate: Own chain, with `key`; None = none is shown.
            key: Its private key.

        Raises:
            ValueError: One of them is wrong.
        """

class ByteBudget:
    """See `kvscout_common.http.byte_budget.Budget`."""

    def __init__(self, limit: int, share: int) -> None:
        """Bytes of all tenants together, and of each."""

    @property
    def limit(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def refused(self) -> tuple[int, int]: ...
    def charge(self, tenant: str | None = None, copies: int = 1) -> ByteCharge: ...

class ByteCharge:
    """See `kvscout_common.http.http.Charge`."""

    @property
    def bytes(self) -> int: ...
    def grow(self, bytes: int, /) -> tuple[int, str] | None: ...
    def look(self, bytes: int, /) -> tuple[int, str] | None: ...
    def release(self) -> None: ...

class Answers:
    """Makes answers of messages where a server has them, without Python. Messages above 256 KiB are declined."""

class AnswerTimes:
    """Durations of answers that Python has not seen, in the buckets of a histogram. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """The upper bounds of the buckets, in seconds, ascending."""

    def read(self) -> tuple[list[int], float]:
        """Answers by bucket, the last one without a bound, and the seconds of all of them together."""

class ReuseSampler:
    """A sample of the blocks that were used; see `kvscout_gateway.ladder.reuse.ReuseSampler`.

    Not thread-safe; keeps the GIL: a call takes about 1 ns a block and 0.1 us a sampled one, 64 a request on average.
    """

    def __init__(self, max_samples: int) -> None: ...
    @property
    def weight(self) -> int: ...
    def __len__(self) -> int: ...
    def observe(
        self, local: bytes, content: bytes, blocks: int, overlap: int, capacity: int, worker_capacity: int
    ) -> tuple[int, ...]: ...


class Rpc:
    """gRPC over HTTP/2, driven by one event loop, from one thread::

        epoll of the loop ──▶ poll ──▶ events ──▶ handlers and callers
                              flush ◀── send, answer, finish, call ◀──┘

    Nothing blocks, nothing runs beside it. Calls and connections are known by numbers that are never used twice: one that
    is over is ignored by every method. Metadata are (name, value) pairs; names that end in "-bin" have bytes, others text.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = ...,
        max_streams: int = ...,
        max_connections: int = ...,
        keepalive_seconds: float = ...,
        keepalive_timeout_seconds: float = ...,
        handshake_seconds: float = ...,
        queue_bytes: int = ...,
        budget: ByteBudget | None = ...,
        message_seconds: float = ...,
        message_window_seconds: float = ...,
        max_age_seconds: float | None = ...,
        clock: float = ...,
    ) -> None:
        """Open its epoll.

        Args:
            max_message_bytes: Longest message that is taken.
            max_streams: Calls that come and are open at once, a connection.
            max_connections: Accepted and open at once; further ones are closed, and counted.
            keepalive_seconds: Silence after which a peer is pinged.
            keepalive_timeout_seconds: Then it has so long to say anything.
            handshake_seconds: From the connection to the end of the HTTP/2 preface.
            queue_bytes: Of messages that came and are not handled; with more, new calls are refused, and calls whose message
                is still coming end.
            budget: The same, shared with others; instead of `queue_bytes`.
            message_seconds: Longest time that a message to a server may take to come.
            message_window_seconds: In each of these periods 10 KiB of it have to.
            max_age_seconds: After about so long an accepted connection takes no new calls; None = it always does.
            clock: What the clock of `Answers` says now.

        Raises:
            OSError: There is no descriptor for it.
        """

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""

    def poll(self) -> list[tuple[Any, ...]]:
        """Read and drive what is ready; return what happened, see `RPC_EVENTS`.

        Raises:
            OSError: The kernel refuses to poll.
        """

    def flush(self) -> bool:
        """Send what was said since the last time, in one write a connection; True: call `poll` again now."""

    def tick(self) -> None:
        """Pings, gives up and accepts what is due; to be called once a second."""

    def stats(self) -> dict[str, int]:
        """connections, calls and queued_bytes now; connections_refused, connections_evicted and calls_refused until now."""

    def listen(
        self, host: str, port: int, methods: list[tuple[str, bool, bool]], tls: ServerTls | None = None
    ) -> tuple[int, int]:
        """Bind; return the listener's number and its port.

        Args:
            host: IP address.
            port: 0 = any free one.
            methods: "/package.Service/Method", whether its requests and whether its answers are a stream.
            tls: None = plaintext.

        Raises:
            ValueError: `host` is no address.
            OSError: It cannot be bound.
        """

    def answer_method(self, listener: int, place: int, answers: Answers, tenant: str, times: AnswerTimes) -> None:
        """Let `poll` itself answer calls of a method of one message and one answer; what is declined becomes OPEN.

        Args:
            listener: Its number.
            place: Of the method in its list.
            answers: Makes them.
            tenant: Of the callers; "*" = all.
            times: Counts each.
        """

    def answer_stream(self, call: int, answers: Answers, tenant: str) -> None:
        """Let `poll` itself answer the messages of a call that came, in order, until one is declined, which becomes
        MESSAGE, or an answer finds no room; then all that follow are reported until this is called again.

        Args:
            call: Its number; nothing that it sent waits to be answered.
            answers: Makes one of each.
            tenant: Of the caller; "*" = all.
        """

    def set_tls(self, listener: int, tls: ServerTls | None = None) -> None:
        """New connections get other certificates."""

    def stop_listening(self, listener: int) -> None:
        """Accept no more; calls that come on connections that are open are served."""

    def leave(self, listener: int) -> None:
        """Send GOAWAY on each of its connections: what runs goes on, new calls go to other servers."""

    def close_connections(self, listener: int) -> None:
        """Close them now."""

    def connect(self, host: str, port: int, authority: str, tls: ClientTls | None = None, server_name: str = "") -> int:
        """Begin to connect; return the connection's number. CONNECTED or CLOSED follows.

        Args:
            host: IP address.
            port: Its port.
            authority: Said to the server with each call.
            tls: None = plaintext.
            server_name: What the server's certificate must be for.

        Raises:
            ValueError: `host` is no address.
            OSError: There is no way to it, or no descriptor.
        """

    def close(self, connection: int) -> None:
        """End its calls, and close it."""

    def call(
        self,
        connection: int,
        method: str,
        metadata_pairs: list[tuple[str, str | bytes]],
        timeout_us: int | None = None,
        message: bytes | None = None,
        end: bool = False,
    ) -> int | None:
        """Make a call; return its number, None if the connection is over.

        Args:
            connection: That is open, or will be.
            method: "/package.Service/Method".
            metadata_pairs: Sent with it.
            timeout_us: Said to the server; the caller ends it by `reset`.
            message: The first one; None = none yet.
            end: No more messages follow.

        Raises:
            ValueError: Metadata that cannot be sent, by name.
        """

    def answer(self, call: int, message: bytes, metadata_pairs: list[tuple[str, str | bytes]] | None = None) -> None:
        """Send the one message of an answer, and OK."""

    def headers(self, call: int, metadata_pairs: list[tuple[str, str | bytes]]) -> None:
        """Send headers, unless they went out with a message."""

    def send(self, call: int, message: bytes) -> bool:
        """Queues a message; False: wait for WRITABLE before the next."""

    def half_close(self, call: int) -> None:
        """End the messages of a call that was made here."""

    def finish(self, call: int, code: int, details: str, metadata_pairs: list[tuple[str, str | bytes]]) -> None:
        """End a call that came, behind what is queued."""

    def reset(self, call: int) -> None:
        """Break a call off; no event follows."""

    def admit(self, call: int, tenant: str | None = None) -> None:
        """The caller of a call that came may make it: messages larger than the windows of a stranger may come.

        Args:
            call: Its number.
            tenant: Whose share of the budget they count for; None = nobody's.
        """

    def consumed(self, call: int, message_bytes: int) -> None:
        """A message was handled: its sender may send more."""

    def trust(self, call: int) -> None:
        """Say that the caller of a call is a known one: its connection is not closed to make room for others."""

    def peer(self, call: int) -> str | None:
        """Address of the other side; None: the call is over."""

HTTP_EVENTS: dict[str, int]
"""Kinds of what `Http.poll` and `flush` return, by name; each event is a tuple that begins with its kind.

* (REQUEST, call, listener, method, target, headers, peer, body or None): a request came to a server; the body, if all of it
  came with the head; say `want_body` for it otherwise.
* (BODY, call, bytes) or (BODY_FAILED, call, status, text): after `want_body`.
* (GONE, call): the client has gone.
* (WRITABLE, call): there is room again after `write` said False.
* (ANSWER, answer, status, headers): the head of an answer; say what is to become of its body, or `abort`.
* (FIRST, answer): output began.
* (CHUNK, answer, bytes): some of a body, after `stream`; say `resume` for the next.
* (FULL, answer): the gRPC call that an answer goes to takes no more; say `resume` when it does.
* (ENDED, answer, what went wrong or "", text, report, body): comes once, last; the body, after `keep`. A report has the
  fields of `StreamReport`. What may go wrong is named as a `FailureKind`, or "sink gone", "sink stalled".
* (ACCEPT_FAILED, errno, text): connections wait; they are accepted with the next `tick` that can.
* (RPC_DUE, rpc): that `Rpc` has events: call its `poll`.
* (AGAIN,): there is more to do: call `poll` soon.
* (CROWDED, listener): there is no room for more connections; idle ones were closed, or else new ones.
"""

class Http:
    """HTTP/1.1, clients and servers, and what is passed from one to the other, driven by one event loop, from one thread.

    Nothing blocks, nothing runs beside it. Calls (requests that came) and answers (to requests that were sent) are known by
    numbers that are never used twice: one that is over is ignored by every method.
    """

    def __init__(self, clock: float, *, vanished_seconds: float = 60.0) -> None:
        """Open its epoll.

        Args:
            clock: What the loop's clock says now: times in reports are its.
            vanished_seconds: A peer whose kernel acknowledges nothing for so long is gone; a client: for
                `write_seconds`, if that is longer.

        Raises:
            OSError: There is no descriptor for it.
        """

    def fileno(self) -> int:
        """Is readable when `poll` has something to do."""

    def poll(self) -> list[tuple[Any, ...]]:
        """Read and drive what is ready; return what happened, see `HTTP_EVENTS`.

        Raises:
            OSError: The kernel refuses to poll.
        """

    def flush(self) -> list[tuple[Any, ...]]:
        """Send what was said since the last time, in one write a connection; return what happened."""

    def tick(self) -> bool:
        """Give up and accept what is due; to be called a few times a second while it returns True, since something is
        under way on a connection, and else once. `poll` after it."""

    def stats(self) -> dict[str, int]:
        """connections, calls and answers now; connections_refused and connections_evicted until now."""

    def listen(
        self,
        host: str,
        port: int,
        *,
        connections: int,
        head_bytes: int,
        headers: int,
        body_bytes: int,
        idle_seconds: float,
        body_seconds: float,
        body_window_seconds: float = ...,
        body_window_bytes: int = ...,
        write_seconds: float,
        tls: ServerTls | None = None,
    ) -> tuple[int, int]:
        """Listens at a numeric address, with the limits of `HttpLimits`; returns the listener and the port.

        Raises:
            OSError: It cannot be bound.
        """

    def set_tls(self, listener: int, tls: ServerTls) -> None:
        """New connections are answered with other certificates."""

    def stop_listening(self, listener: int) -> None:
        """Take no new connections; those there are end behind their next answer, or a second later if none is asked for."""

    def close_connections(self, listener: int) -> None:
        """Close those of a listener at once."""

    def trust(self, call: int) -> None:
        """Say that the client of a call is a known one: its connection is not closed to make room for others."""

    def open_connections(self, listener: int) -> int:
        """Return how many connections came to a listener and are open."""

    def want_body(self, call: int, charge: ByteCharge | None = None) -> None:
        """Ask for a body that did not come with its head; BODY or BODY_FAILED follows.

        Args:
            call: Its number.
            charge: Grows with what comes; with no room for it the body fails.
        """

    def start(self, call: int, status: int, headers: list[tuple[str, str]]) -> None:
        """Begin an answer; its head leaves with the first bytes of the body, or the end.

        Raises:
            ValueError: A header cannot be sent.
        """

    def respond(self, call: int, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Answers with a body. Raises as `start`."""

    def write(self, call: int, data: bytes) -> bool | None:
        """Write some of a body that was started. False: wait for WRITABLE; None: the client has gone."""

    def end(self, call: int) -> None:
        """End what was started."""

    def handled(self, call: int) -> None:
        """Nothing more is said of a call: unless it was answered, its connection is closed."""

    def send(
        self,
        origin: str,
        peer: tuple[str, int] | None,
        connect_seconds: float,
        method: str,
        target: str,
        host: str,
        headers: list[tuple[str, str]],
        body: bytes,
        tls: ClientTls | None = None,
        server_name: str = "",
    ) -> int | None:
        """Send a request on an idle connection of this origin, or else on a new one; return the answer to come.

        Args:
            origin: Whatever tells connections apart that must not be used for one another.
            peer: Numeric address and port for a new connection; None = only an idle one will do.
            connect_seconds: Longest wait for a new one.
            method: Of the request, as the next ones.
            target: Path and query.
            host: The header.
            headers: The others.
            body: All of it.
            tls: None = plaintext.
            server_name: What the server's certificate has to say.

        Returns:
            None = no connection is idle, and there was no address for a new one.

        Raises:
            ValueError: Something of it cannot be sent.
            OSError: There is no socket to be had, or no way to the address.
        """

    def keep(self, answer: int, most: int) -> None:
        """Collect a body, up to so many bytes; it comes with ENDED."""

    def stream(self, answer: int, events: tuple[str, Dialect, int | None] | None = None) -> None:
        """Deliver a body chunk by chunk, each as CHUNK.

        Args:
            answer: Of which.
            events: A `Form`, the dialect and `max_tokens` of `HttpAnswer.relay`; None = as it comes, and nothing is
                noticed.

        Raises:
            ValueError: There is no such form.
        """

    def pass_to_call(
        self,
        answer: int,
        call: int,
        ends: bool,
        write_seconds: float,
        first: bytes,
        events: tuple[str, Dialect, int | None] | None,
    ) -> None:
        """Has a body passed on to a call whose answer was started.

        Args:
            answer: As the others, see `stream`. Raises as that.
            call: Where to.
            ends: True: the call is ended as well where the stream is done, and has reported no error.
            write_seconds: Longest wait for it.
            first: Goes out before the first bytes, and with them.
            events: As of `stream`.
        """

    def pass_to_messages(
        self,
        answer: int,
        server: Rpc,
        call: int,
        write_seconds: float,
        first: bytes,
        events: tuple[str, Dialect, int | None],
    ) -> None:
        """Has a body passed on as messages of a call of a gRPC server, as `pass_to_call`; its form is that of messages."""

    def resume(self, answer: int) -> None:
        """Report that what came was handled: the next may come."""

    def report(self, answer: int) -> dict[str, Any] | None:
        """Return what was noticed until now; None = it is over."""

    def abort(self, answer: int) -> None:
        """Close the connection; ENDED follows, unless it came already."""

    def close_idle(self, origins: str) -> None:
        """Close idle connections whose origin begins so."""

class Dialect:
    """Native form of `kvscout_common.http.dialect.Dialect`."""

    def __init__(self, marks: Sequence[tuple[str, Sequence[str]]], *, cumulative: bool) -> None:
        """Compile the paths and marks of each meaning.

        Raises:
            ValueError: There is no such meaning.
        """

class EventRelay:
    """Native backend of `kvscout_common.http.event_relay.EventRelay`, which passes events on inside `Http`."""

    def __init__(self, form: str, dialect: Dialect, max_tokens: int | None = None) -> None:
        """As `Http.stream`."""

    def feed(self, data: bytes, now: float, ends: bool = False) -> bytes:
        """Take the next bytes, the last if it `ends`; return what is to be passed on."""

    @property
    def over(self) -> bool:
        """Nothing more is to be passed on."""

    @property
    def failure(self) -> str:
        """Return why it ended before its end; "" = it has not."""

    @property
    def report(self) -> dict[str, Any]:
        """The fields of `StreamReport`."""
