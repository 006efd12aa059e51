"""What a newcomer breaks is named by doctor first: three of the damages of `make first-hour`, which has them all."""

from __future__ import annotations

import pytest
from support.first_hour import DAMAGES, Named, break_each

SHORT = [one for one in DAMAGES if one.what in {"an engine hangs", "an engine's events end", "a wrong event endpoint"}]


@pytest.mark.timeout(300)  # three damages, each found by doctor within a minute
async def test_doctor_names_first_what_is_broken() -> None:
    named: list[Named] = []
    await break_each(SHORT, named.append)
    assert all(one.right for one in named), named
    assert [one.damage for one in named] == SHORT
