"""Ladders as the page is told of them."""

from __future__ import annotations

import json

from support.scripted_dashboard import ladder

from kvscout.v1 import gateway_pb2
from kvscout_gateway.fronts.dashboard.ladder_rows import MAX_LADDERS, ladders_document


def test_each_loss_stands_above_its_rung_with_what_would_help() -> None:
    [one] = ladders_document([ladder()])
    assert [(rung["name"], rung["tokens"]) for rung in one["rungs"]] == [
        ("ideal", 800_000),
        ("capacity", 500_000),
        ("perfect routing", 450_000),
        ("predicted", 400_000),
        ("actual", 390_000),
    ]
    assert [loss["name"] for loss in one["rungs"][1]["losses"]] == ["expired: all caches together are too small"]
    assert one["rungs"][1]["losses"][0]["remedy"] == "2 more workers or 50 % more KV would bring 20."
    assert one["verdict"].startswith("30 points: expired: all caches together are too small. 2 more workers")
    assert one["sizes"] == [[1.25, 600_000], [1.5, 700_000], [2.0, 750_000], [4.0, 800_000]]


def test_names_of_models_are_text_and_the_largest_ladders_are_sent() -> None:
    many = [ladder("m\u202e\x1b[2J", prompt_tokens=1_000_000 + index) for index in range(MAX_LADDERS + 5)]
    document = ladders_document(many)
    assert len(document) == MAX_LADDERS
    assert document[0]["prompt"] == 1_000_000 + MAX_LADDERS + 4
    assert "\x1b" not in json.dumps(document, ensure_ascii=False)


def test_one_of_nothing_is_shown_without_a_share() -> None:
    [one] = ladders_document([gateway_pb2.Ladder(model="m")])
    assert one["verdict"] == "Nothing is lost."
    assert all(not rung["losses"] for rung in one["rungs"])
