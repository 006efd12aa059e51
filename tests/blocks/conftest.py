"""Every implementation of the block index, for the tests that run over all of them."""

from __future__ import annotations

import pytest
from support.index_scenarios import IndexFactory

from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available

IMPLEMENTATIONS: dict[str, IndexFactory] = {"reference": ReferenceIndex}
if native_available():
    IMPLEMENTATIONS["native"] = NativeIndex


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def index_factory(request: pytest.FixtureRequest) -> IndexFactory:
    """Makes an empty index: `index_factory(block_size, eagle, max_blocks=...)`."""
    return IMPLEMENTATIONS[request.param]
