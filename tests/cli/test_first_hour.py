"""What a newcomer breaks is named by doctor first: two of the damages of `make first-hour`, which has them all."""

from __future__ import annotations

from support.first_hour import DAMAGES, Named, break_each


async def test_doctor_names_first_what_is_broken() -> None:
    named: list[Named] = []
    await break_each([DAMAGES[0], DAMAGES[2]], named.append)
    assert all(one.right for one in named), named
    assert [one.damage.what for one in named] == ["an engine hangs", "an engine's events end"]
