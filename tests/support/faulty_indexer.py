"""The indexer's process with a defect: reading any batch raises. For tests of what a defect does to the process."""

from typing import NoReturn

from kvscout_blocks.source import zmq_feed
from kvscout_indexer.main import main


def broken(index: object, payload: bytes) -> NoReturn:
    raise RuntimeError(f"a defect, met in {len(payload)} bytes")


if __name__ == "__main__":
    zmq_feed.decode_for = broken  # type: ignore[attr-defined]  # what the module imports, replaced
    main()
