"""Runs scenario files: event sequences and what a block index must answer after them, one a line.

::

    worker w1 copies=set capacity=8 adapters=3:math    options of a worker; others are added when first named
    stored w1 [a b c]                  blocks a, b, c on worker w1, rank 0 (w1.2: rank 2)
    stored w1 [x:7 y] after=c          x with engine hash 7; a block's engine hash is its name by default
           tier=host group=1 kind=mamba window=8 lora=A lora_id=3 salt=S mm=img,, block_size=8 tokens=7
    stored w1 [p q] local=yes          with local hashes instead of tokens, as bridges send them
    moved w1 [a] tier=host             Stored without tokens
    removed w1 [b] tier=host group=1
    begin w1 ... end                   the events between, in one batch
    cleared w1 / reset w1 / remove w1 (all ranks) / rank w1.2 (that rank) / demote w1 ttl=10
    predict w1 [a b] ttl=10 / at 5     (the clock, seconds)
    reload                             dump, load into an empty index, go on with that one
    find [a b c] lora=A salt=S usable=2   must be followed by its answer:
    ---- w1=3 w2=1/2/4                 device, or device/host/disk/external (the last one repeats); nobody else
    ---- w1=1~3                        1 block on the device, 3 with the predicted ones
    expect w1 orphans=1 hidden=0 incompatible=yes hash_conflict=2
    expect all blocks=3 memberships=4 workers=2

After every event line the invariants are checked, at the end a dump is loaded and compared.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.events import STATE_WINDOW, Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.wire import STATE_KINDS, is_full_attention
from kvscout_blocks.index.block_index import BlockIndex, Overlap, WorkerOptions
from kvscout_common.hashing import MmItem, block_hashes
from kvscout_common.worker import CopyMode, WorkerRank


class IndexFactory(Protocol):
    """Makes an empty index of one implementation."""

    def __call__(
        self,
        block_size: int,
        eagle: bool = False,
        *,
        max_blocks: int = 0,
        max_predicted_blocks: int = 1_048_576,
        prune_ratio: float = 0.8,
    ) -> BlockIndex: ...


def settle(index: BlockIndex, now: float = 0.0) -> None:
    """Lets an index free everything that was dropped."""
    while index.maintain(now=now):
        pass


def reload(index: BlockIndex, empty: BlockIndex, options: dict[WorkerRank, WorkerOptions]) -> None:
    """Loads the dump of every worker into an empty index and compares the two."""
    for worker in index.workers():
        dump = index.dump(worker)
        assert dump is not None
        empty.add_worker(worker, options.get(worker, WorkerOptions()))
        empty.load(dump)
        assert empty.dump(worker) == dump, "dump → load → dump changes nothing"
        assert empty.cursor(worker) == index.cursor(worker)
    assert empty.workers() == index.workers()
    empty.check_invariants()


def engine_hash(name: str) -> int:
    """The engine hash that a name stands for; numbers stand for themselves."""
    return int(name) if name.isdigit() else xxh3_64_intdigest(name.encode(), seed=7)


def tokens_of(content: str, block_size: int) -> tuple[int, ...]:
    """Token ids that a block's name stands for."""
    return tuple(
        xxh3_64_intdigest(struct.pack("<I", position) + content.encode()) & 0xFFFF_FFFF
        for position in range(block_size)
    )


def scenario_hashes(contents: list[str], block_size: int, words: dict[str, str]) -> list[int]:
    """Local hashes of a prompt made of named blocks."""
    tokens = [token for content in contents for token in tokens_of(content, block_size)]
    items = words.get("mm", "").split(",")
    return block_hashes(
        tokens,
        block_size,
        lora_name=words.get("lora", ""),
        cache_salt=words.get("salt", ""),
        mm_items=[MmItem(item, i * block_size, 1) for i, item in enumerate(items) if item],
    )


class ScenarioRunner:
    """Runs one scenario over one implementation."""

    def __init__(self, factory: IndexFactory, block_size: int = 4) -> None:
        self._factory = factory
        self._block_size = block_size
        self._index = factory(block_size)
        self._options: dict[WorkerRank, WorkerOptions] = {}
        self._now = 0.0
        self._event_id = 0
        self._found: dict[WorkerRank, Overlap] | None = None
        self._batch: tuple[WorkerRank, list[Event]] | None = None

    def run(self, text: str, name: str) -> None:
        """Runs a scenario; a failure names its file and line."""
        for number, line in enumerate(text.splitlines(), 1):
            line = line.split("#")[0].strip()
            if not line:
                continue
            try:
                self._line(line)
                self._index.check_invariants()
            except Exception as error:
                raise AssertionError(f"{name}:{number}: {line}\n{type(error).__name__}: {error}") from error
        assert self._found is None, f"{name}: the last find has no answer"
        reload(self._index, self._factory(self._block_size), self._options)

    def _line(self, line: str) -> None:
        if line.startswith("----"):
            assert self._found is not None, "an answer without a find"
            expected = dict(_answer(line[4:].split()))
            assert self._found == expected, self._found
            self._found = None
            return
        assert self._found is None, "the find before has no answer"
        command, _, rest = line.partition(" ")
        blocks = re.search(r"\[(.*?)\]", rest)
        names = blocks.group(1).split() if blocks else []
        words = dict(w.split("=", 1) for w in re.sub(r"\[.*?\]", "", rest).split() if "=" in w)
        subject = rest.split()[0] if rest else ""
        handler: Callable[[str, list[str], dict[str, str]], None] | None = getattr(self, f"_{command}", None)
        assert handler is not None, f"unknown command {command}"
        handler(subject, names, words)

    def _worker(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        adapters = [pair.split(":") for pair in words.get("adapters", "").split(",") if pair]
        options = WorkerOptions(
            copies=CopyMode(words.get("copies", "count")),
            adapters={int(number): name for number, name in adapters},
            total_kv_blocks=int(words.get("capacity", 0)),
        )
        self._options[_rank(subject)] = options
        self._index.add_worker(_rank(subject), options)

    def _stored(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        contents = [name.split(":")[0] for name in names]
        size = int(words.get("block_size", self._block_size))
        tokens = [token for content in contents for token in tokens_of(content, size)]
        by_hash = words.get("local") == "yes"
        group = int(words.get("group", 0))
        items = words.get("mm", "").split(",") if "mm" in words else []
        event = Stored(
            engine_hashes=tuple(engine_hash(name.split(":")[-1]) for name in names),
            parent=engine_hash(words["after"]) if "after" in words else None,
            tokens=() if by_hash else tuple(tokens[: int(words.get("tokens", len(tokens)))]),
            block_size=size,
            tier=Tier[words.get("tier", "device").upper()],
            group=group,
            full_attention=is_full_attention(words.get("kind"), group),
            window=STATE_WINDOW if words.get("kind") in STATE_KINDS else int(words.get("window", 0)),
            lora_id=int(words.get("lora_id", 0)),
            lora_name=words.get("lora", ""),
            cache_salt=words.get("salt", ""),
            mm_items=tuple((item,) if item else () for item in items),
            local_hashes=tuple(scenario_hashes(contents, size, words)) if by_hash else (),
        )
        self._apply(subject, event)

    def _moved(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        tier, group = Tier[words.get("tier", "device").upper()], int(words.get("group", 0))
        full = is_full_attention(words.get("kind"), group)
        hashes = tuple(engine_hash(name) for name in names)
        self._apply(subject, Stored(hashes, tier=tier, group=group, full_attention=full))

    def _removed(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        tier, group = Tier[words.get("tier", "device").upper()], int(words.get("group", 0))
        self._apply(subject, Removed(tuple(engine_hash(name) for name in names), tier, group))

    def _cleared(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        self._apply(subject, Cleared())

    def _batch_(self, worker: WorkerRank, events: list[Event]) -> None:
        if worker not in self._index.workers():
            self._index.add_worker(worker, WorkerOptions())
        self._index.apply(worker, EventBatch(tuple(events)), event_id=self._event_id)
        self._event_id += 1

    def _apply(self, subject: str, event: Event) -> None:
        if self._batch is not None and self._batch[0] == _rank(subject):
            self._batch[1].append(event)
            return
        assert self._batch is None, "a batch has one worker"
        self._batch_(_rank(subject), [event])

    def _begin(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        self._batch = (_rank(subject), [])

    def _end(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        assert self._batch is not None, "no batch was begun"
        self._batch_(*self._batch)
        self._batch = None

    def _reset(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        self._index.reset(_rank(subject))

    def _remove(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        assert self._index.remove_worker(subject)

    def _rank(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        assert self._index.remove_rank(_rank(subject))

    def _demote(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        self._index.demote(_rank(subject), ttl_seconds=float(words["ttl"]), now=self._now)

    def _predict(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        if _rank(subject) not in self._index.workers():
            self._index.add_worker(_rank(subject), WorkerOptions())
        hashes = scenario_hashes(names, self._block_size, words)
        self._index.predict(_rank(subject), hashes, ttl_seconds=float(words["ttl"]), now=self._now)

    def _at(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        self._now = float(subject)
        self._index.maintain(now=self._now)

    def _reload(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        fresh = self._factory(self._block_size)
        reload(self._index, fresh, self._options)
        self._index = fresh

    def _find(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        hashes = scenario_hashes(names, self._block_size, words)
        usable = int(words["usable"]) if "usable" in words else None
        self._found = self._index.find_matches(hashes, now=self._now, usable=usable).by_worker()
        packed = struct.pack(f"<{len(hashes)}Q", *hashes)
        assert self._index.find_matches(packed, now=self._now, usable=usable).by_worker() == self._found

    def _expect(self, subject: str, names: list[str], words: dict[str, str]) -> None:
        settle(self._index, self._now)
        if subject == "all":
            values = {key: str(getattr(self._index.stats(), key)) for key in words}
        else:
            stats = self._index.worker_stats(_rank(subject))
            assert stats is not None
            reasons = {reason.value for reason in Ignored}
            values = {
                key: str(stats.ignored.get(Ignored(key), 0))
                if key in reasons and key != "incompatible"
                else _plain(getattr(stats, key))
                for key in words
            }
        assert values == words, values


def _plain(value: object) -> str:
    if isinstance(value, (bool, str)):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value)


def _rank(subject: str) -> WorkerRank:
    worker_id, _, rank = subject.partition(".")
    return WorkerRank(worker_id, int(rank or 0))


def _answer(words: list[str]) -> Iterator[tuple[WorkerRank, Overlap]]:
    for word in words:
        subject, _, numbers = word.partition("=")
        tiers, _, predicted = numbers.partition("~")
        columns = [int(number) for number in tiers.split("/")]
        columns += [columns[-1]] * (4 - len(columns))
        device, host, disk, external = columns
        yield _rank(subject), Overlap(device, host, disk, external, int(predicted or device))


def scenario_files(folder: Path) -> list[Path]:
    """All scenario files of a folder."""
    return sorted(folder.glob("*.txt"))
