"""The sentence about the largest loss of a ladder."""

from __future__ import annotations

import pytest

from kvscout.v1 import gateway_pb2
from kvscout_common.doctor.ladder import NAMES, verdict
from kvscout_common.enum_words import value_of, word_of


def ladder(**losses: int) -> gateway_pb2.Ladder:
    return gateway_pb2.Ladder(
        prompt_tokens=1_000,
        workers=8,
        losses=[
            gateway_pb2.LadderLoss(kind=value_of(gateway_pb2.LadderLossKind, kind), tokens=tokens)
            for kind, tokens in losses.items()
        ],
        gains=[
            gateway_pb2.LadderGain(capacity_factor=factor, tokens=tokens)
            for factor, tokens in ((1.25, 90), (1.5, 120), (2.0, 120), (4.0, 120))
        ],
    )


def test_a_loss_to_capacity_says_what_would_bring_most_of_it() -> None:
    sentence = verdict(ladder(never_seen=500, capacity=120, moved=30))
    assert sentence == (
        "12 points: expired: all caches together are too small.\n2 more workers or 25 % more KV would bring 9."
    )
    assert "four times" in verdict(ladder(capacity=900))


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "never seen"])
def test_the_largest_loss_is_named_before_what_is_new(kind: str) -> None:
    losses = {"never_seen": 800, "moved": 1, kind.replace(" ", "_"): 50}
    sentences = verdict(ladder(**losses))
    assert sentences.startswith(f"5 points: {NAMES[kind]}.")
    assert max(map(len, sentences.splitlines())) <= 80


def test_moves_say_what_they_saved() -> None:
    moved = ladder(moved=300)
    assert "--kv-overlap-score-weight, or the policy" in verdict(moved)
    moved.losses[0].saved_seconds = 12.34
    sentences = verdict(moved)
    assert "Moves saved 12.3 s of waiting" in sentences
    assert max(map(len, sentences.splitlines())) <= 80


def test_a_small_loss_is_no_loss_of_0_points() -> None:
    assert verdict(ladder(moved=3)).startswith("0.3 points")


def test_where_all_is_new_or_nothing_is_lost_it_says_so() -> None:
    assert "never seen" in verdict(ladder(never_seen=800, moved=0))
    assert verdict(ladder(never_seen=0)) == "Nothing is lost."


def test_every_loss_has_a_name() -> None:
    words = {word_of(gateway_pb2.LadderLossKind, number) for number in gateway_pb2.LadderLossKind.values()}
    assert words - {""} == NAMES.keys()
