"""Where fuzzing begins: real payloads, requests and dumps, for every decoder."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import msgpack

from kvscout.v1 import indexer_pb2
from kvscout_blocks.codec import encode_dump
from kvscout_blocks.index import BlockIndex, WorkerOptions
from kvscout_blocks.reference_index import ReferenceIndex
from kvscout_common.worker import PoolKey, WorkerRank

DATA = Path(__file__).parent / "data"
POOL = PoolKey("m", "default", 4, False)
WORKER = WorkerRank("w", 0)
RANDOM_SEEDS = 64


def golden_payloads() -> dict[str, bytes]:
    """One batch of every engine release, by release."""
    texts: dict[str, str] = json.loads((DATA / "golden_payloads.json").read_text())
    return {release: bytes.fromhex(text) for release, text in texts.items()}


def requests() -> list[bytes]:
    """Serialised `FindMatchesRequest`s and streams of them."""
    tokens = indexer_pb2.FindMatchesRequest(model="m", token_ids=range(20))
    seeds = [
        tokens,
        indexer_pb2.FindMatchesRequest(model="m", token_ids=range(8), lora_name="sql", cache_salt="x", early_exit=True),
        indexer_pb2.FindMatchesRequest(model="m", tenant="default", block_size=4, block_hashes=[1, 2, 2**64 - 1], id=7),
        indexer_pb2.FindMatchesRequest(model="m", eagle=False, token_ids=[2**32 - 1] * 5),
        indexer_pb2.StreamFindMatchesRequest(requests=[tokens, tokens], tenant="default"),
    ]
    return [seed.SerializeToString() for seed in seeds]


def dumps() -> list[list[bytes]]:
    """Messages of dumps: chains, copies, tiers, groups, holes and orphans, and an empty one."""
    index: BlockIndex = ReferenceIndex(4)
    index.add_worker(WORKER, WorkerOptions())
    found: list[list[bytes]] = []
    for payload in [msgpack.packb([0.0, []]), *golden_payloads().values()]:
        index.apply_payload(WORKER, payload, epoch=1, event_id=len(found))
        dump = index.dump(WORKER)
        assert dump is not None
        found.append([message.SerializeToString() for message in encode_dump(POOL, dump)])
    return found


def write_corpus(folder: Path) -> None:
    """Writes the seeds of each libFuzzer target into a folder of its own, by content."""
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randrange(1, 600)) for _ in range(RANDOM_SEEDS)]
    corpora = {
        "events": list(golden_payloads().values()),
        "requests": requests(),
        # The first byte says where the rest is cut in two.
        "state": [b"\0" + b"".join(messages) for messages in dumps()],
        "hashing": noise,
        "operations": noise,
    }
    for target, seeds in corpora.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            (folder / target / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
