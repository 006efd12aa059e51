"""Which requests are worth a transfer."""

from __future__ import annotations

import pytest

from kvscout_gateway.request.disaggregated import computes_here


@pytest.mark.parametrize(
    ("isl_tokens", "overlap_tokens", "here"),
    [
        (1_000, 14 * 64, True),
        (100_000, 1_000 * 64, False),
        (10_000, 10_000 - 2048, False),
        (10_000, 10_000 - 2047, True),
        (1_000, 300, False),
        (1_000, 301, True),
        (100, 0, False),
    ],
)
def test_a_prompt_of_which_little_is_missing_stays_where_it_is(
    isl_tokens: int, overlap_tokens: int, here: bool
) -> None:
    assert computes_here(isl_tokens, overlap_tokens) is here
