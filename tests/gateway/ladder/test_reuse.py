"""The sample of used blocks: the extension, its reference, and exact LRU caches beside them."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict

import pytest
from support.cpu_cost import TIMES, assert_in_proportion
from support.seeds import test_seed

from kvscout_common.hashing import native_module
from kvscout_gateway.ladder.reuse import MAX_SAMPLES, Reuse, ReuseSampler, sampler_type
from kvscout_gateway.ladder.reuse_reference import ReuseSampler as Reference

NATIVE = native_module()


def packed(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def prompts(draw: random.Random, number: int, *, sessions: int, growth: int) -> list[list[int]]:
    """Conversations that grow turn by turn and begin anew; half of the sessions share a prefix."""
    shared = [draw.getrandbits(64) for _ in range(5)]
    texts: list[list[int]] = [[] for _ in range(sessions)]
    made = []
    for _ in range(number):
        which = draw.randrange(sessions)
        if not texts[which] or draw.random() < 0.1:
            texts[which] = list(shared) if which % 2 else []
        texts[which] += [draw.getrandbits(64) for _ in range(draw.randint(1, growth))]
        made.append(list(texts[which]))
    return made


class ExactCache:
    """An LRU cache of prefixes that forgets nothing of what it has room for."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def use(self, prompt: list[int]) -> int:
        """Return the number of leading blocks that it had, and hold all of them."""
        prefixes = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        hits = sum(prefix in self.held for prefix in prefixes)
        for prefix in reversed(prefixes):
            self.held[prefix] = None
            self.held.move_to_end(prefix)
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)
        return hits


@pytest.fixture
def seed() -> int:
    return test_seed()


@pytest.mark.skipif(NATIVE is None, reason="the extension is not built: there is the reference alone")
@pytest.mark.parametrize("max_samples", [3, 40, 2_000])
def test_extension_and_reference_classify_alike(seed: int, max_samples: int) -> None:
    draw = random.Random(seed)
    native, reference = sampler_type()(max_samples), Reference(max_samples)
    for prompt in prompts(draw, 150, sessions=6, growth=8):
        local = packed(prompt)
        content = packed([value ^ 1 for value in prompt]) if prompt[0] % 3 == 0 else b""
        blocks, overlap = draw.randint(0, len(prompt) + 1), draw.randint(0, len(prompt))
        capacity = draw.choice([0, 50, 200, 10**6])
        asked = (local, content, blocks, overlap, capacity, capacity // 4)
        assert native.observe(*asked) == reference.observe(*asked)
        assert (native.weight, len(native)) == (reference.weight, len(reference))


def test_without_sampling_hits_are_those_of_an_exact_cache(seed: int) -> None:
    capacity = 60
    sampler, cache, ideal = sampler_type()(MAX_SAMPLES), ExactCache(capacity), ExactCache(1 << 40)
    for prompt in prompts(random.Random(seed), 200, sessions=8, growth=4):
        found = Reuse(*sampler.observe(packed(prompt), b"", len(prompt), 0, capacity, 0))
        assert sampler.weight == 1
        assert found.never == len(prompt) - ideal.use(prompt)
        assert found.split == cache.use(prompt)


def test_sampled_share_of_hits_is_near_the_exact_one(seed: int) -> None:
    capacity = 3_000
    sampler, cache = sampler_type()(2_048), ExactCache(capacity)
    hits = sampled = exact = total = 0
    for prompt in prompts(random.Random(seed), 3_000, sessions=120, growth=12):
        found = Reuse(*sampler.observe(packed(prompt), b"", len(prompt), 0, capacity, 0))
        hits, sampled = hits + found.split, sampled + sum(found)
        exact, total = exact + cache.use(prompt), total + len(prompt)
    assert sampler.weight > 4
    assert abs(hits / sampled - exact / total) < 0.1, (hits / sampled, exact / total)


def test_same_tokens_with_another_salt_are_told_from_new_ones() -> None:
    sampler = sampler_type()(MAX_SAMPLES)
    plain, salted, new = packed([1, 2, 3]), packed([9, 2, 3]), packed([7, 8, 9])
    sampler.observe(plain, b"", 3, 0, 0, 0)
    assert Reuse(*sampler.observe(salted, plain, 3, 0, 0, 0)).other_name == 3
    assert Reuse(*sampler.observe(new, b"", 3, 0, 0, 0)).never == 3
    assert Reuse(*sampler.observe(salted, plain, 3, 0, 0, 0)).split == 3


def test_what_workers_hold_of_others_is_foreign_and_nothing_of_it_is_lost() -> None:
    found = Reuse(*sampler_type()(MAX_SAMPLES).observe(packed([1, 2, 3]), b"", 3, 2, 0, 0))
    assert (found.foreign, found.never) == (2, 1)


def test_number_of_samples_is_bounded(seed: int) -> None:
    draw = random.Random(seed)
    sampler = sampler_type()(100)
    for _ in range(400):
        prompt = packed([draw.getrandbits(64) for _ in range(64)])
        sampler.observe(prompt, b"", 64, 0, 1_000, 100)
        assert len(sampler) <= 100


def test_work_on_a_request_grows_no_faster_than_its_blocks() -> None:
    def use(prompts: list[bytes]) -> None:
        sampler = sampler_type()(MAX_SAMPLES)
        for prompt in prompts:
            sampler.observe(prompt, b"", len(prompt) // 8, 0, 0, 0)

    def of(blocks: int) -> list[bytes]:
        draw = random.Random(blocks)
        return [draw.randbytes(8 * blocks) for _ in range(400)]

    if NATIVE is not None:  # the reference is to be read, not to be fast
        assert_in_proportion(use, of(1_000), of(1_000 * TIMES), "blocks of a prompt")


@pytest.mark.parametrize("made", [sampler_type(), Reference])
def test_hashes_that_are_none_are_refused(made: type[ReuseSampler]) -> None:
    sampler = made(8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="whole u64s"):
        sampler.observe(b"short", b"", 1, 0, 0, 0)
    with pytest.raises(ValueError, match="each block has a content"):
        sampler.observe(bytes(16), bytes(8), 2, 0, 0, 0)
