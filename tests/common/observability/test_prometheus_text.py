"""The few samples of a page that are read: what is understood, what is refused, and that no page takes long."""

from __future__ import annotations

import time

import pytest

from kvscout_common.http.engine_http import MAX_PAGE_BYTES
from kvscout_common.observability.prometheus_text import MAX_HITS, MAX_LABELS, MAX_LINE_BYTES, Sample, read_samples

PAGE = rb"""# HELP a What a is.
# TYPE a gauge
a 1
a{x="1"} 2.5 1700000000000
a{ x = "q\"\\\n" , y="{}," ,} +Inf
a_total{x="1"} 7
b{} 3e2
other{broken
"""


def test_wanted_samples_are_read_with_their_labels() -> None:
    assert read_samples(PAGE, ["a", "b", "c"]) == [
        Sample("a", {}, 1.0),
        Sample("a", {"x": "1"}, 2.5),
        Sample("a", {"x": 'q"\\\n', "y": "{},"}, float("inf")),
        Sample("b", {}, 300.0),
    ]
    assert read_samples(b"a 1", ["a"]) == [Sample("a", {}, 1.0)]
    assert read_samples(b"", ["a"]) == read_samples(b"<html>{", ["a"]) == []


@pytest.mark.parametrize(
    "line",
    [
        b"a ",
        b"a one",
        b"a " + b"1" * 5000,
        b"a{",
        b'a{x="1" 3',
        b'a{x="1}" 3',
        b"a{x=1} 3",
        b'a{1x="1"} 3',
        b'a{x="\xff"} 3',
        b"a " + b" " * MAX_LINE_BYTES,
        b"a 1\n" * (MAX_HITS + 1),
        b"a{} x",
    ],
)
def test_a_wanted_sample_that_cannot_be_read_refuses_the_page(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_samples(b"b 1\n" + line, ["a"])


def test_labels_are_bounded_over_all_samples() -> None:
    line = b"a{" + b",".join(b'l%d=""' % number for number in range(1000)) + b"} 1\n"
    assert len(read_samples(line * (MAX_LABELS // 1000), ["a"])) == MAX_LABELS // 1000
    with pytest.raises(ValueError, match="labels"):
        read_samples(line * (MAX_LABELS // 1000 + 1), ["a"])


HOSTILE = {
    "an open label": b"a{" + b"a" * 60_000,
    "quotes that never end": b'a{x="' + b'\\"' * 30_000,
    "words without a value": b"a{" + b"x " * 30_000,
    "names amid others": b"xa" * 30_000,
    "almost labels": b'a{x="1",' * 8_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_page_takes_more_than_its_length(kind: str) -> None:
    """The time of a page of 4 MiB is a small multiple of that of one a sixteenth as long: nothing is quadratic."""

    def seconds(page: bytes) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            try:
                read_samples(page, ["a", "b"])
            except ValueError:
                pass  # most of them are refused; what counts is how soon
            best = min(best, time.process_time() - began)
        return best

    chunk = HOSTILE[kind] + b"\n"
    whole = (chunk * (MAX_PAGE_BYTES // len(chunk) + 1))[:MAX_PAGE_BYTES]
    # Below a millisecond it is noise.
    assert seconds(whole) <= 64 * max(seconds(whole[: MAX_PAGE_BYTES // 16]), 0.001)
