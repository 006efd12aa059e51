"""A short `make chaos-events` of each transport: a few faults, then the index must be the engines' truth."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from chaos import events
from support.seeds import test_seed as seed

SECONDS = 4.0


@pytest.mark.timeout(240)  # the wait for the truth alone may take a minute
@pytest.mark.parametrize("transport", ["direct", "peers", "grpc", "nats-core", "jetstream"])
async def test_after_faults_the_index_is_the_engines_truth(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SECONDS", SECONDS)
    assert await events.run(transport, tmp_path, Random(seed())) == []
