"""Stacks that commands start wait for their own helpers: a machine that stands still makes no answer a worse one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

PATIENCE_MS = "5000"


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Give gateways that this folder's tests start longer timeouts of calls than operators want."""
    with pytest.MonkeyPatch.context() as patch:
        for helper in ("INDEXER", "SCHEDULER", "TOKENIZE"):
            patch.setenv(f"KVSCOUT_{helper}_TIMEOUT_MS", PATIENCE_MS)
        yield
