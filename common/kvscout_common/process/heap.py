"""The heap of a process that lives long: large blocks go back to the system once they are free."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD_BYTES = 64 * 1024
"""From here on a block has pages of its own."""

_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""


def keep_mmap_threshold() -> bool:
    """Keep glibc from taking large blocks out of the heap that small ones are in.

    By itself glibc raises its threshold, 128 KiB, to the size of every larger block that is freed. The tables of an
    index, which grow and shrink with the engines' caches, then leave holes, and the process takes up to a
    third more than what is in use. Applies to the whole process, so it is for a service's `main` only.

    Returns:
        False where the C library has no such setting; nothing changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))


def trim() -> bool:
    """Give memory that is free back to the system, wherever in the heap it is; blocks, without the interpreter's lock.

    By itself glibc gives back what is free at the heap's end, and what was freed of an index is between what is not.

    Returns:
        False where the C library cannot; nothing changed.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True
