"""A large block that is freed leaves the process, however large those before it were."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from kvscout_common.process.heap import keep_mmap_threshold

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo
libc.free.argtypes = [ctypes.c_void_p]
libc.malloc.restype = ctypes.c_void_p
{setting}
libc.free(libc.malloc(ctypes.c_size_t(8_000_000)))
before = libc.mallinfo2().hblkhd
block = libc.malloc(ctypes.c_size_t(1_000_000))
print(libc.mallinfo2().hblkhd - before >= 1_000_000)
libc.free(block)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc")
@pytest.mark.parametrize(("setting", "own_pages"), [("", False), ("assert keep_mmap_threshold()", True)])
def test_a_large_block_has_pages_of_its_own(setting: str, own_pages: bool) -> None:
    program = PROGRAM.format(setting=setting)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == str(own_pages)
