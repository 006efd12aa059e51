"""Where fuzzing begins: real payloads, requests and dumps, for every decoder."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import msgpack

from kvscout.v1 import indexer_pb2
from kvscout_blocks.bytes.codec import encode_dump
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.worker import PoolKey, WorkerRank
from support import zmtp_peer
from support.http2_resets import (
    ACK,
    CANCEL,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    frame,
    headers_of,
)
from support.http2_resets import (
    DATA as DATA_FRAME,
)
from support.wide_msgpack import Entries, Raw, extension, pack

DATA = Path(__file__).parents[1] / "data"
POOL = PoolKey("m", "default", 4, False)
WORKER = WorkerRank("w", 0)
RANDOM_SEEDS = 64
STREAMS = [
    b": ping\n\ndata: " + b"\n\ndata: ".join(documents) + b"\n\ndata: [DONE]\n\n"
    for documents in (
        [
            b'{"choices": [{"token_ids": [1, 2], "text": "a\\u00e9", "finish_reason": null}], "usage": null}',
            b'{"choices": [{"token_ids": [3], "text": "b", "finish_reason": "stop"}, {"text": "c"}]}',
            b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, '
            b'"prompt_tokens_details": {"cached_tokens": 4}}}',
        ],
        [
            b'{"object": "x", "choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            b'{"choices": [{"delta": {"content": "\\ud83d\\ude00 \\ud800"}}]}',
            b'{"choices": [{"delta": {"reasoning_content": "hm", "tool_calls": [{"index": 0}]}}]}',
            b'{"error": {"message": "gone", "code": 400}}',
            b'{"object": "error", "message": "gone"}',
        ],
        [
            b'{"text": "a", "output_ids": [10], "meta_info": {"completion_tokens": 1, "finish_reason": null}}',
            b'{"text": "ab", "output_ids": [10, 11], "meta_info": {"completion_tokens": 2, "prompt_tokens": 9}}',
            b'{"text": "c", "output_ids": [12], "meta_info": {"completion_tokens": 3, "finish_reason": "length"}}',
            b'{"text": "abcd", "output_ids": [10, 11, 12, 13], "meta_info": {"completion_tokens": 4, '
            b'"cached_tokens": 8, "prompt_tokens": 9, "finish_reason": {"type": "length", "length": 4}}}',
            b'{"text": "", "meta_info": {"finish_reason": {"type": "abort", "status_code": 500}}}',
        ],
        [b"[[[[[[[[[[", b"{}", b'{"a": [1.5e-7, -0, NaN, -Infinity, 1E400, "\\/\\b\\f\\t"]}', b'{"usage": {}}'],
    )
]

EMPTY_EXTENSION = (
    "83a27473cb3ff8000000000000a66576656e747392c70010a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
)
"""Two events, one an extension without data."""

HTTP = [
    b"POST /v1/completions?a=b HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
    b"GET http://a/ HTTP/1.0\r\nConnection: keep-alive, x\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    b'3\r\nabc\r\nA;x="y"\r\n0123456789\r\n0\r\nX: 1\r\n\r\nrest',
]


def golden_payloads() -> dict[str, bytes]:
    """One batch of every engine release, by release."""
    texts: dict[str, str] = json.loads((DATA / "golden_payloads.json").read_text())
    return {release: bytes.fromhex(text) for release, text in texts.items()}


def unusual_payloads() -> list[bytes]:
    """Batches in forms that msgpack has and engines do not send: extensions, nesting at its limit, fields twice."""
    rng = random.Random(0)
    cleared: Any = Entries([("type", "AllBlocksCleared"), ("future", None)])
    values: list[Any] = [
        *(form for kind in (-128, -2, 127) for size in (0, 1, 2, 3, 4, 8, 16) for form in extension(kind, bytes(size))),
        *(form for size in (0, 1, 4, 8, 12, 13) for form in extension(-1, bytes(size))),
        # Timestamps of a second and more below a second.
        *(form for data in (b"\xff" * 8, b"\x3b\x9a\xca\0" + bytes(8)) for form in extension(-1, data)),
        *(Raw(b"\x91" * depth + end) for depth in range(1019, 1026) for end in (b"\xc0", b"\x90")),
        *(Raw(b"\x81\xc0" * depth + end) for depth in range(1019, 1026) for end in (b"\xc0", b"\x80")),
    ]  # fmt: skip
    batches: list[Any] = [
        *([1.5, [cleared, value]] for value in values),
        *([1.5, [Entries([("type", "AllBlocksCleared"), ("future", value)])]] for value in values),
        *([1.5, [], None, value] for value in values),
        *([value, []] for value in values[::5]),
        *(values[::5]),
        [1.5, [Entries([("type", "AllBlocksCleared"), (extension(3, b"")[0], 1)])]],
        [1.5, [Entries([("type", "AllBlocksCleared"), ("type", "Unknown")])]],
        [1.5, [Entries([("future", 1), ("type", "Unknown"), ("type", "AllBlocksCleared")])]],
        [1.5, [Entries([("type", "BlockRemoved"), ("block_hashes", "no"), ("block_hashes", [1])])]],
        [1.5, [Entries([("type", "BlockRemoved"), ("block_hashes", [1]), ("block_hashes", "no")])]],
        # The tag under a name of a longer form than needed.
        [1.5, [Entries([(Raw(b"\xd9\x04type"), "AllBlocksCleared"), ("type", "Unknown")])]],
        Entries([("ts", 1), ("events", 3), ("events", [cleared]), ("ts", 2)]),
        [1.5, [["BlockStored", [1], None, [[1, 2.0], [2, 3]], 2]]],
    ]
    return [pack(batch, rng, wide=0.0) for batch in batches] + [bytes.fromhex(EMPTY_EXTENSION)]


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


def rpc_peers() -> list[bytes]:
    """What peers of gRPC send; the first byte says to whom: what reads frames, a server, a client."""
    message = b"\0\0\0\0\x03abc"
    opened = frame(HEADERS, END_HEADERS, 1, headers_of("/s/Both"))
    unary = frame(HEADERS, END_HEADERS, 3, headers_of("/s/Unary"))
    data = frame(DATA_FRAME, END_STREAM, 3, message)
    answer = frame(HEADERS, END_HEADERS, 1, b"\x88") + frame(DATA_FRAME, END_STREAM, 1, message)
    return [
        b"\0\0" + message * 3,
        b"\0\1" + b"\1" + message[1:],
        b"\1" + opened + frame(DATA_FRAME, 0, 1, message * 2) + unary + data,
        b"\1" + opened + frame(RST_STREAM, 0, 1, CANCEL) + unary + frame(PING, 0, 0, bytes(8)) + data,
        b"\2" + frame(SETTINGS, ACK, 0) + answer,
    ]


def write_corpus(folder: Path) -> None:
    """Writes the seeds of each libFuzzer target into a folder of its own, by content."""
    rng = random.Random(0)
    noise = [rng.randbytes(rng.randrange(1, 600)) for _ in range(RANDOM_SEEDS)]
    corpora = {
        "events": [*golden_payloads().values(), *unusual_payloads()],
        "requests": requests(),
        # The first byte says where the rest is cut in two.
        "state": [b"\0" + b"".join(messages) for messages in dumps()],
        "hashing": noise,
        "operations": noise,
        # Where the bytes are cut; of streams also whether there is a limit, and which.
        "http": [b"\7" + seed for seed in HTTP],
        "event_stream": [b"\7" + limit + seed for seed in STREAMS for limit in (b"\0", b"\1\3")],
        "zmtp": [b"\7" + stream for stream in zmtp_peer.streams()],
        "rpc": rpc_peers(),
    }
    for target, seeds in corpora.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            (folder / target / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
