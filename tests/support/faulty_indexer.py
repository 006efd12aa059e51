"""The indexer's process with a defect: reading any batch raises. For tests of what a defect does to the process."""

from typing import NoReturn

from kvscout_blocks.index.backend import make_index
from kvscout_indexer.main import main


def broken(index: object, payload: bytes) -> NoReturn:
    raise RuntimeError(f"a defect, met in {len(payload)} bytes")


if __name__ == "__main__":
    type(make_index(1)).decode = broken  # type: ignore[assignment,method-assign]
    main()
