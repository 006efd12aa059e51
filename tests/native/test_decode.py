"""The native decoder reads what the reference decoder reads, from good bytes and from bad ones.

`KVSCOUT_TEST_SEED` reruns a seed, `KVSCOUT_DECODE_CASES` sets how many payloads are made of it.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from support.decoder_fuzz import by_native, by_reference
from support.fuzz_seeds import golden_payloads, unusual_payloads
from support.seeds import test_seed
from support.wide_msgpack import Entries, Raw, extension, pack

from kvscout_common.hashing import native_available

if not native_available():
    pytest.skip("the extension is not built", allow_module_level=True)

CASES = int(os.environ.get("KVSCOUT_DECODE_CASES", "3000"))


def test_golden_payloads_of_all_engine_releases_decode_to_the_same_events() -> None:
    payloads = golden_payloads()
    assert len(payloads) >= 45
    for payload in payloads.values():
        expected = by_reference(payload)
        assert expected != "malformed"
        assert by_native(payload) == expected


def test_payloads_in_forms_that_no_engine_sends_decode_to_the_same_events() -> None:
    read = [by_reference(payload) for payload in unusual_payloads()]
    assert [by_native(payload) for payload in unusual_payloads()] == read
    assert 0 < read.count("malformed") < len(read)


class Payloads:
    """Batches like those of engines, with anything anywhere now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def strange(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.2:
            length = rng.choice([0, 1, 2, 3, 4, 4, 8, 8, 12, 12, 16, 300])
            data = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
            return rng.choice(extension(rng.choice([-1, -1, -2, -128, 0, 3, 127]), data))
        if kind < 0.25:
            opened = rng.choice([b"\x91", b"\xdc\x00\x01", b"\x81\xc0", b"\x81\xa4type"])
            return Raw(opened * rng.choice([3, 500, *range(1017, 1027)]) + rng.choice([b"\xc0", b"\x90", b"\x80"]))
        if kind < 0.28:
            # More elements or bytes than there are, or than are read.
            head = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + rng.choice([b"\xff\xff", b"\0\1"])
            return Raw(head + rng.randbytes(2))
        if kind < 0.32:
            number = rng.choice([255, 256, 257, 70_000])
            return Entries([(n, None) for n in range(number)]) if rng.random() < 0.5 else [1] * number
        return rng.choice(
            [
                None, True, False, 0, -1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 1.5, 1.0, float("nan"), "", "GPU",
                "lora", b"", "type", {"type": "BlockRemoved"}, {1.5: 1, None: 2, b"type": 3}, Entries([(1, 2), (1, 3)]),
                b"\xff" * 32, [], [[]], [1, 2], ["id", 3], [["id", 3]], {}, {"a": [1]}, {1: 2}, [None], "\udce4",
            ]
        )  # fmt: skip

    def some(self, value: Any) -> Any:
        return self.strange() if self.rng.random() < 0.02 else value

    def hash(self) -> Any:
        rng = self.rng
        return self.some(rng.choice([rng.getrandbits(64), -rng.getrandbits(63), rng.randbytes(32), rng.randbytes(3)]))

    def stored(self) -> dict[str, Any]:
        rng = self.rng
        blocks, size = rng.randrange(4), rng.choice([1, 2, 4])
        tokens: list[Any] = [self.some(rng.getrandbits(rng.choice([5, 9, 17, 32]))) for _ in range(blocks * size)]
        kind = rng.random()
        if kind < 0.15 and tokens:
            ends = [*tokens[1:], 7]
            tokens = [self.some([a, self.some(b)]) for a, b in zip(tokens, ends, strict=True)]
        elif kind < 0.25:
            tokens = tokens[:-1]
        fields = {
            "block_hashes": self.some([self.hash() for _ in range(blocks)]),
            "parent_block_hash": rng.choice([None, self.hash()]),
            "token_ids": self.some(tokens),
            "block_size": self.some(size),
            "lora_id": self.some(rng.choice([None, 0, 3])),
            "medium": self.some(rng.choice([None, "GPU", "cpu", "CPU_TIER2", "obj"])),
            "lora_name": self.some(rng.choice([None, "lora"])),
            "extra_keys": self.some(
                rng.choice([None, [None] * blocks, [rng.choice([None, ["lora"], ["salt"], [["id", 1]], "x"])] * blocks])
            ),
            "group_idx": self.some(rng.choice([None, 0, 1, 70_000])),
            "kv_cache_spec_kind": self.some(rng.choice([None, "full_attention", "mamba", "mla_attention"])),
            "kv_cache_spec_sliding_window": self.some(None),
        }
        kept = rng.randrange(3, len(fields) + 1) if rng.random() < 0.3 else len(fields)
        return dict(list(fields.items())[:kept])

    def event(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.6:
            tag, fields = "BlockStored", self.stored()
            key = {"type": "mm_key", "hash": self.some("ab" * 32), "start_offset": 1}
            extra = {
                "lookahead_token_ids": self.some(rng.choice([None, [1], [5, None], [9, 8]])),
                "cache_salt": "s",
                "mm_keys": self.some(rng.choice([None, [], [[]], [[], [self.some(key), key]]])),
            }
        elif kind < 0.85:
            tag = "BlockRemoved"
            fields = {"block_hashes": self.some([self.hash()]), "medium": self.some(None), "group_idx": self.some(0)}
            fields, extra = dict(list(fields.items())[: rng.randrange(4)]), {}
        else:
            tag, fields, extra = rng.choice(["AllBlocksCleared", "Unknown"]), {}, {}
        if rng.random() < 0.5:
            return self.some([self.some(tag), *fields.values()] + ([1, {"x": 2}] if rng.random() < 0.1 else []))
        entries: list[tuple[Any, Any]] = [
            ("type", self.some(tag)),
            *fields.items(),
            *(extra.items() if rng.random() < 0.5 else []),
        ]
        if rng.random() < 0.1:
            rng.shuffle(entries)
        entries.append(("unknown", self.strange()))
        while rng.random() < 0.1:
            # Once more, first or last of its name, or under a name that is no string.
            name, value = rng.choice(entries)
            strange: Any = rng.choice([name, name, 7, None, 1.5, b"type", extension(3, b"")[0], []])
            entries.insert(rng.randrange(len(entries) + 1), (strange, rng.choice([value, self.strange()])))
        return Entries(entries)

    def payload(self) -> bytes:
        rng = self.rng
        events = self.some([self.event() for _ in range(rng.randrange(4))])
        batch: Any = [self.some(1.5), events, self.some(rng.choice([None, 0, 3]))][: rng.randrange(1, 4)]
        if rng.random() < 0.2:
            entries: list[tuple[Any, Any]] = list(zip(("ts", "events", "data_parallel_rank"), batch, strict=False))
            while rng.random() < 0.2:
                entries.insert(rng.randrange(len(entries) + 1), (rng.choice(entries)[0], self.strange()))
            batch = Entries(entries)
        packed = bytearray(pack(batch, rng, wide=rng.choice([0.0, 0.2])))
        if rng.random() < 0.3:
            for _ in range(rng.randrange(1, 4)):
                packed[rng.randrange(len(packed))] = rng.getrandbits(8)
        if rng.random() < 0.1:
            del packed[rng.randrange(len(packed)) :]
        return bytes(packed)


def test_both_decoders_agree_on_random_payloads() -> None:
    payloads = Payloads(random.Random(test_seed()))
    good = 0
    for case in range(CASES):
        payload = payloads.payload()
        expected, found = by_reference(payload), by_native(payload)
        good += expected != "malformed"
        assert found == expected, f"case {case}: {payload.hex()}"
    assert good > CASES / 3, "most payloads test more than the frame"
