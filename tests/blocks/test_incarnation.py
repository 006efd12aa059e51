"""A publisher knows its engine again after its own restart, and takes no other engine for it."""

from __future__ import annotations

import pytest

from kvscout_blocks.publish.incarnation import DIGESTS_KEPT, Comparison, Record, Verdict, next_epoch

RECORD = Record(epoch=5, event_id=10, digest=1010)


def seen(first: int, last: int, digest_offset: int = 1000) -> Comparison:
    comparison = Comparison()
    for event_id in range(first, last + 1):
        comparison.applied(event_id, event_id + digest_offset)
    return comparison


def test_the_batch_of_the_record_decides() -> None:
    assert seen(0, 12).judge(RECORD, replayed=True) is Verdict.SAME
    assert seen(0, 10).judge(RECORD, replayed=False) is Verdict.SAME
    assert seen(0, 12, 2000).judge(RECORD, replayed=True) is Verdict.OTHER


def test_before_that_batch_came_nothing_is_decided() -> None:
    assert seen(0, 9).judge(RECORD, replayed=False) is None
    assert Comparison().judge(RECORD, replayed=False) is None


def test_an_engine_that_has_less_or_only_later_batches_is_another() -> None:
    assert seen(0, 9).judge(RECORD, replayed=True) is Verdict.OTHER
    assert Comparison().judge(RECORD, replayed=True) is Verdict.OTHER
    assert seen(11, 12).judge(RECORD, replayed=False) is Verdict.OTHER


def test_an_engine_that_restarted_while_we_watched_is_another() -> None:
    comparison = seen(0, 3)
    comparison.restarted()
    for event_id in range(12):
        comparison.applied(event_id, event_id + 1000)
    assert comparison.judge(RECORD, replayed=True) is Verdict.OTHER


def test_without_a_batch_on_record_it_is_another() -> None:
    for record in (None, Record(epoch=5)):
        assert seen(0, 12).judge(record, replayed=False) is Verdict.OTHER


def test_what_is_compared_is_bounded_and_the_latest() -> None:
    comparison = seen(0, DIGESTS_KEPT + 20)
    assert comparison.judge(Record(5, DIGESTS_KEPT, DIGESTS_KEPT + 1000), replayed=True) is Verdict.SAME
    assert comparison.judge(RECORD, replayed=True) is Verdict.OTHER


def test_records_are_read_back_and_what_is_none_is_none() -> None:
    for record in (RECORD, Record(epoch=2**63)):
        assert Record.decode(record.encode()) == record


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"7", b'{"epoch": "5"}', b'{"epoch": -1}', b'{"epoch": true}',
                                   b'{"epoch": 1, "event_id": 1.5}', b'{"epoch": 1, "new": 2}'])  # fmt: skip
def test_a_damaged_record_is_as_good_as_none(value: bytes) -> None:
    assert Record.decode(value) is None


def test_epochs_grow_even_if_their_record_was_lost_or_the_clock_goes_back() -> None:
    first = next_epoch(0, 1_700_000_000.0)
    assert first == 1_700_000_000_000
    assert next_epoch(first, 1_700_000_001.0) > first
    assert next_epoch(first, 1_600_000_000.0) == first + 1
