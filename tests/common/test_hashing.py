from __future__ import annotations

import array
import os
import random
import struct
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from support.seeds import test_seed
from xxhash import xxh3_64_intdigest

from kvscout_common import hashing, hashing_reference
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import MmItem

BACKENDS: list[ModuleType] = [hashing_reference]
if hashing.native_available():
    import kvscout_native

    BACKENDS.append(kvscout_native)

GOLDEN_LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]
GOLDEN_SEQUENCE = [14643705804678351452, 4945711292740353085, 12583592247330656132]
TWELVE = list(range(1, 13))


@pytest.fixture(params=BACKENDS, ids=lambda module: module.__name__.split(".")[-1])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def test_the_golden_vectors_come_out(backend: ModuleType) -> None:
    local = backend.block_hashes(TWELVE, 4)
    assert local == GOLDEN_LOCAL
    assert backend.sequence_hashes(local) == GOLDEN_SEQUENCE
    assert backend.block_hashes_packed(TWELVE, 4) == struct.pack("<3Q", *GOLDEN_LOCAL)
    assert backend.sequence_hashes(struct.pack("<3Q", *GOLDEN_LOCAL)) == GOLDEN_SEQUENCE
    assert backend.extend_sequence(None, GOLDEN_LOCAL[0]) == GOLDEN_SEQUENCE[0]
    assert backend.extend_sequence(GOLDEN_SEQUENCE[0], GOLDEN_LOCAL[1]) == GOLDEN_SEQUENCE[1]


def test_the_public_interface_gives_the_golden_vectors() -> None:
    assert hashing.block_hashes(TWELVE, 4) == GOLDEN_LOCAL
    assert hashing.block_hashes_packed(TWELVE, 4) == struct.pack("<3Q", *GOLDEN_LOCAL)
    assert hashing.sequence_hashes(GOLDEN_LOCAL) == GOLDEN_SEQUENCE
    assert hashing.extend_sequence(GOLDEN_SEQUENCE[1], GOLDEN_LOCAL[2]) == GOLDEN_SEQUENCE[2]
    assert hashing.block_seed("", "", True) == hashing.SEED == 1337
    assert hashing.mm_hash("ab" * 32) == 0xABABABABABABABAB
    assert hashing.engine_hash(-1) == 2**64 - 1
    assert hashing.backend_name() == ("native" if hashing.native_available() else "reference")


def test_keyed_hashes_are_siphash_of_the_sequence_hashes_of_every_few_blocks(backend: ModuleType) -> None:
    # Appendix A of the paper: the key and the message are 00 01 02 …; this is the hash of the first eight bytes.
    key, message = bytes(range(16)), int.from_bytes(range(8), "little")
    assert backend.keyed_sequence_hashes([message], 1, key).hex() == "6224939a79f5f593"
    every = backend.keyed_sequence_hashes(GOLDEN_LOCAL, 1, key)
    assert backend.keyed_sequence_hashes(GOLDEN_LOCAL, 2, key) == every[8:16], "the rest is no whole stride"
    assert backend.keyed_sequence_hashes(GOLDEN_LOCAL, 4, key) == b""
    assert backend.keyed_sequence_hashes(GOLDEN_LOCAL, 1, b"\1" * 16)[:8] != every[:8]
    with pytest.raises(InvalidArgument, match="stride"):
        backend.keyed_sequence_hashes(GOLDEN_LOCAL, 0, key)


@pytest.mark.parametrize(("tokens", "blocks"), [(10, 2), (8, 2), (4, 1), (3, 0), (0, 0)])
def test_only_complete_blocks_are_hashed(backend: ModuleType, tokens: int, blocks: int) -> None:
    assert backend.block_hashes(TWELVE[:tokens], 4) == GOLDEN_LOCAL[:blocks]


@pytest.mark.parametrize("pack", [bytes, bytearray, memoryview])
def test_token_ids_may_be_the_bytes_of_u32s(backend: ModuleType, pack: type) -> None:
    packed = struct.pack("<12I", *TWELVE)
    assert backend.block_hashes(pack(packed), 4) == GOLDEN_LOCAL
    assert backend.block_hashes(memoryview(array.array("I", TWELVE)), 4) == GOLDEN_LOCAL
    assert backend.block_hashes(array.array("q", TWELVE), 4) == GOLDEN_LOCAL
    assert backend.block_hashes(tuple(TWELVE), 4) == GOLDEN_LOCAL


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(backend: ModuleType, block_size: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.block_hashes(TWELVE, block_size)
    assert caught.value.field == "block_size"


@pytest.mark.parametrize("tokens", [[1, 2, 3, 2**32], [-1, 2, 3, 4], [1, 2, 3, 4.5], ["a"], b"123", None])
def test_token_ids_out_of_range_are_refused(backend: ModuleType, tokens: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.block_hashes(tokens, 4)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize("item", [("a", -1, 2), ("a", 0, 0)])
def test_an_item_outside_every_prompt_is_refused(backend: ModuleType, item: tuple[str, int, int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.block_hashes(TWELVE, 4, mm_items=[item])
    assert caught.value.field == "mm_items"


@pytest.mark.parametrize("local", [b"1234567", [2**64], [-1], ["a"]])
def test_local_hashes_out_of_range_are_refused(backend: ModuleType, local: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.sequence_hashes(local)
    assert caught.value.field == "block_hashes"


def test_adapter_and_salt_make_different_chains(backend: ModuleType) -> None:
    chains = [
        tuple(backend.sequence_hashes(backend.block_hashes(TWELVE, 4, lora_name=lora, cache_salt=salt)))
        for lora, salt in [("", ""), ("A", ""), ("B", ""), ("", "S"), ("A", "S")]
    ]
    assert len({hash_ for chain in chains for hash_ in chain}) == 15
    assert list(chains[0]) == GOLDEN_SEQUENCE


def test_the_salt_enters_the_first_block_alone(backend: ModuleType) -> None:
    salted = backend.block_hashes(TWELVE, 4, cache_salt="S")
    assert salted[0] != GOLDEN_LOCAL[0]
    assert salted[1:] == GOLDEN_LOCAL[1:]
    assert backend.block_seed("", "S", False) == 1337


def test_seeds_wrap_at_64_bits(backend: ModuleType) -> None:
    name = next(f"lora-{i}" for i in range(100) if hashing_reference.block_seed(f"lora-{i}", "", False) < 2**62)
    salts = [f"salt-{i}" for i in range(100)]
    sums = [backend.block_seed(name, "", False) + backend.block_seed("", salt, True) - 1337 for salt in salts]
    assert any(total >= 2**64 for total in sums)
    assert [backend.block_seed(name, salt, True) for salt in salts] == [total % 2**64 for total in sums]


def test_the_order_of_items_does_not_matter(backend: ModuleType) -> None:
    five, nine = (f"{number:016x}".ljust(64, "0") for number in (5, 9))
    there = backend.block_hashes(TWELVE, 4, mm_items=[(five, 4, 2), (nine, 6, 2)])
    back = backend.block_hashes(TWELVE, 4, mm_items=[MmItem(nine, 4, 1), MmItem(five, 5, 1)])
    assert there == back != GOLDEN_LOCAL


def test_an_item_changes_the_blocks_that_it_touches_alone(backend: ModuleType) -> None:
    local = backend.block_hashes(TWELVE, 4, mm_items=[("image", 5, 3)])
    assert [a != b for a, b in zip(local, GOLDEN_LOCAL, strict=True)] == [False, True, False]
    assert backend.sequence_hashes(local)[2] != GOLDEN_SEQUENCE[2]
    across = backend.block_hashes(TWELVE, 4, mm_items=[("image", 3, 2)])
    assert [a != b for a, b in zip(across, GOLDEN_LOCAL, strict=True)] == [True, True, False]


def test_item_ids_become_numbers(backend: ModuleType) -> None:
    assert backend.mm_hash("0123456789abcdef" + "f" * 48) == 0x0123456789ABCDEF
    assert backend.mm_hash("ABCDEF0123456789" + "0" * 48) == 0xABCDEF0123456789
    assert backend.mm_hash("g" * 64) == xxh3_64_intdigest(b"g" * 64)
    assert backend.mm_hash("image") == xxh3_64_intdigest(b"image")


def test_eagle_windows_hold_one_token_more(backend: ModuleType) -> None:
    for count in range(14):
        tokens = TWELVE[:count] + [77] * (count - 12)
        assert len(backend.block_hashes(tokens, 4, eagle=True)) == max(0, count - 1) // 4
    eagle = backend.block_hashes(TWELVE, 4, eagle=True)
    assert eagle == [backend.block_hashes(TWELVE[i : i + 5], 5)[0] for i in (0, 4)]


def test_engine_hashes_of_all_kinds_become_u64(backend: ModuleType) -> None:
    assert backend.engine_hash(2**64 - 1) == backend.engine_hash(-1) == 2**64 - 1
    assert backend.engine_hash(-(2**63)) == 2**63
    assert backend.engine_hash(bytes(24) + (258).to_bytes(8, "big")) == 258
    assert backend.engine_hash(b"\x01\x02") == 258


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, b"", "abc", 1.5])
def test_other_engine_hashes_are_refused(backend: ModuleType, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.engine_hash(value)
    assert caught.value.field == "block_hashes"


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the extension is not built")
def test_both_backends_agree_on_random_prompts() -> None:
    seed = test_seed()
    rng = random.Random(seed)
    for _ in range(300):
        tokens = [rng.getrandbits(rng.choice([1, 8, 17, 32])) for _ in range(rng.randrange(300))]
        # Every length class of XXH3 is met: up to 16, 128, 240 and more bytes.
        block_size = rng.choice([1, 2, 3, 4, 5, 16, 17, 32, 33, 60, 61, 64, 128])
        options: dict[str, Any] = {
            "lora_name": rng.choice(["", "adapter", "ä" * rng.randrange(300)]),
            "cache_salt": rng.choice(["", "tenant-7"]),
            "mm_items": [
                (
                    rng.choice(["image", f"{rng.getrandbits(256):064x}"]),
                    rng.randrange(310),
                    rng.randrange(1, 90),
                )
                for _ in range(rng.randrange(4))
            ],
            "eagle": rng.random() < 0.3,
        }
        expected = hashing_reference.block_hashes(tokens, block_size, **options)
        context = (seed, block_size, options, tokens)
        assert kvscout_native.block_hashes(tokens, block_size, **options) == expected, context
        packed = kvscout_native.block_hashes_packed(struct.pack(f"<{len(tokens)}I", *tokens), block_size, **options)
        assert packed == struct.pack(f"<{len(expected)}Q", *expected), context
        chain = hashing_reference.sequence_hashes(expected)
        assert kvscout_native.sequence_hashes(packed) == chain, context
        stride, key = rng.randrange(1, 9), rng.randbytes(16)
        keyed = [module.keyed_sequence_hashes(packed, stride, key) for module in BACKENDS]
        assert keyed[0] == keyed[1], context


def _import_hashing(**environment: str) -> subprocess.CompletedProcess[str]:
    # An import of kvscout_native fails where sys.modules holds None for it.
    hide = "import sys; sys.modules['kvscout_native'] = None; " if "HIDE" in environment else ""
    code = hide + "from kvscout_common import hashing; print(hashing.backend_name())"
    inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith("KVSCOUT_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_reference_can_be_forced() -> None:
    assert _import_hashing(KVSCOUT_NATIVE="0", KVSCOUT_REQUIRE_NATIVE="1").stdout == "reference\n"


def test_a_missing_extension_means_the_reference_unless_it_is_required() -> None:
    assert _import_hashing(HIDE="1").stdout == "reference\n"
    required = _import_hashing(HIDE="1", KVSCOUT_REQUIRE_NATIVE="1")
    assert required.returncode != 0
    assert "KVSCOUT_REQUIRE_NATIVE" in required.stderr
