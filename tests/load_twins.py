"""The twins of active load, for tests that hold for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvscout_common.hashing import native_available
from kvscout_scheduler.active_load import ActiveLoad, ReferenceLoad

MakeLoad = Callable[..., ActiveLoad]


def twins() -> list[Any]:
    """Both classes, the native one where it is there."""
    made = [pytest.param(ReferenceLoad, id="reference")]
    if native_available():
        from kvscout_scheduler.native_load import NativeLoad

        made.append(pytest.param(NativeLoad, id="native"))
    return made
