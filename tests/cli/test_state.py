"""What `up` leaves on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvscout_cli.state import StateDirectory
from kvscout_common.errors import DeadlineExceeded, FailedPrecondition


def test_it_tells_who_runs_only_while_that_process_holds_it(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "new")
    assert not state.is_held()
    with state.held():
        state.write({"gateway": "localhost:1"})
        other = StateDirectory(tmp_path / "new")
        assert other.is_held()
        assert other.read() == {"pid": os.getpid(), "gateway": "localhost:1"}
        with pytest.raises(FailedPrecondition, match=f"pid {os.getpid()}"), other.held():
            pass
        with pytest.raises(DeadlineExceeded):
            other.wait_until_free(0)
    assert not other.is_held()
    assert other.read() == {}
    other.wait_until_free(0)
