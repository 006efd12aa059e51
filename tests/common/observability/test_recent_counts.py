"""Counts since start, and within the last minutes."""

from kvscout_common.observability.recent_counts import MAX_KEYS, RECENT_SECONDS, SPAN_SECONDS, RecentCounts


def test_what_is_old_counts_in_the_total_only_and_leaves_span_by_span() -> None:
    now = 0.0
    counts: RecentCounts[str] = RecentCounts(lambda: now)
    for _ in range(RECENT_SECONDS // SPAN_SECONDS):
        counts.add("a")
        now += SPAN_SECONDS
    now -= SPAN_SECONDS
    assert counts.recent()["a"] == counts.total["a"] == RECENT_SECONDS // SPAN_SECONDS
    now += SPAN_SECONDS
    assert counts.recent()["a"] == RECENT_SECONDS // SPAN_SECONDS - 1
    now += RECENT_SECONDS
    assert (counts.recent()["a"], counts.total["a"]) == (0, RECENT_SECONDS // SPAN_SECONDS)


def test_keys_are_bounded_and_those_that_are_counted_go_on() -> None:
    counts: RecentCounts[int] = RecentCounts(lambda: 0.0)
    for key in range(2 * MAX_KEYS):
        counts.add(key)
    counts.add(0)
    assert (len(counts.total), counts.total[0]) == (MAX_KEYS, 2)
